"""The official `openai` client against the real stack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import tinker
from openai.types import Completion
from tinker import ModelInput, SamplingParams
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.examples import BASE_MODEL, PROMPT, batch, new_model, score, train
from tests.support.stack import Stack
from tests.support.waiting import wait_until
from tests.support.wire import Wire

MESSAGES = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="tml-test", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(toy: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(toy)


@pytest.fixture(scope="module")
def path(service: tinker.ServiceClient) -> str:
    """A trained adapter."""
    model = new_model(service, seed=5)
    train(model, batch(3), steps=5, adam=tinker.AdamParams(learning_rate=1e-2))
    return model.save_weights_for_sampler("openai").result().path


def complete(client: openai.OpenAI, model: str, **fields: object) -> Completion:
    asked = {"prompt": PROMPT, "max_tokens": 12, "seed": 7, **fields}
    return client.completions.create(model=model, **asked)  # type: ignore[call-overload]


def test_models(client: openai.OpenAI, path: str) -> None:
    names = [model.id for model in client.models.list()]
    assert BASE_MODEL in names
    assert path in names
    assert client.models.retrieve(path).id == path
    with pytest.raises(openai.NotFoundError, match="no/model"):
        client.models.retrieve("no/model")


def test_a_completion_is_what_the_sdk_samples(
    client: openai.OpenAI, service: tinker.ServiceClient, path: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    drawn: dict[str, list[int]] = {}
    for model in (BASE_MODEL, path):
        named = {"model_path": path} if model == path else {"base_model": BASE_MODEL}
        sampler = service.create_sampling_client(**named).result()  # type: ignore[arg-type]
        expected = sampler.sample(ModelInput.from_ints(PROMPT), 2, SamplingParams(max_tokens=12, seed=7)).result()
        answer = complete(client, model, n=2, logprobs=0, extra_body={"return_token_ids": True})
        assert answer.model == model
        assert (answer.version is None) == (model == BASE_MODEL)  # type: ignore[attr-defined]
        for choice, sequence in zip(answer.choices, expected.sequences, strict=True):
            assert choice.token_ids == sequence.tokens  # type: ignore[attr-defined]
            assert choice.prompt_token_ids == PROMPT  # type: ignore[attr-defined]
            assert choice.text == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs == sequence.logprobs
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(PROMPT)
        assert answer.usage.completion_tokens == sum(len(sequence.tokens) for sequence in expected.sequences)
        drawn[model] = list(expected.sequences[0].tokens)
    assert drawn[path] != drawn[BASE_MODEL]


def test_a_chat_is_rendered_by_the_models_template(client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase) -> None:
    answer = client.chat.completions.create(
        model=BASE_MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        max_completion_tokens=10,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"return_token_ids": True},
    )
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(rendered, add_special_tokens=False)["input_ids"]  # type: ignore[arg-type]
    assert answer.prompt_token_ids == prompt  # type: ignore[attr-defined]
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)  # type: ignore[attr-defined]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for entry in choice.logprobs.content:  # greedy: each token is the first of its list
        assert len(entry.top_logprobs) == 3
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)


def test_a_stream_brings_the_same_as_the_whole(client: openai.OpenAI, path: str) -> None:
    whole = complete(client, path, n=2, max_tokens=30)
    texts, reasons = ["", ""], [None, None]
    usage = None
    num_chunks = 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in complete(client, path, n=2, max_tokens=30, **options):
        usage = chunk.usage or usage  # type: ignore[union-attr]
        for choice in chunk.choices:  # type: ignore[union-attr]
            num_chunks += 1
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert num_chunks > 10


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    asked = {"model": BASE_MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    """POST /v1/responses, whole and as a stream."""
    asked = {"model": BASE_MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 3}
    chat = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    fields = {"model": BASE_MODEL, "input": MESSAGES, "max_output_tokens": 12, "extra_body": {"seed": 3}}
    response = client.responses.create(**fields)  # type: ignore[call-overload]
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert (response.status == "incomplete") == (chat.choices[0].finish_reason == "length")
    events = list(client.responses.create(**fields, stream=True))  # type: ignore[call-overload]
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == response.output_text
    )
    assert events[-1].response.output_text == response.output_text


def test_penalties_and_biases_change_the_text_and_no_log_probability(client: openai.OpenAI) -> None:
    asked = {"temperature": 0, "max_tokens": 20, "logprobs": 0, "extra_body": {"return_token_ids": True}}
    plain = complete(client, BASE_MODEL, **asked).choices[0]
    biased = complete(client, BASE_MODEL, **asked, logit_bias={"17": 100}).choices[0]
    assert set(biased.token_ids) == {17}  # type: ignore[attr-defined]
    assert biased.logprobs is not None
    assert biased.logprobs.token_logprobs is not None
    assert max(biased.logprobs.token_logprobs) < 0  # type: ignore[type-var]
    assert complete(client, BASE_MODEL, **asked, frequency_penalty=2).choices[0].text != plain.text
    with pytest.raises(openai.BadRequestError, match="logit_bias: token id 99999999") as outside:
        complete(client, BASE_MODEL, logit_bias={"99999999": 1})
    assert outside.value.param == "logit_bias"


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    text = complete(client, BASE_MODEL, max_tokens=30).choices[0].text
    stop = text[len(text) // 2 :][:3]
    choice = complete(client, BASE_MODEL, max_tokens=30, stop=stop).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_echo_scores_the_prompt_as_the_sdk_does(
    client: openai.OpenAI, service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    (choice,) = complete(client, BASE_MODEL, max_tokens=0, echo=True, logprobs=2).choices
    assert choice.text == tokenizer.decode(PROMPT)
    assert choice.logprobs is not None
    listed = choice.logprobs.token_logprobs
    assert listed is not None
    assert listed[0] is None
    expected = score(service.create_sampling_client(base_model=BASE_MODEL).result(), PROMPT)
    np.testing.assert_allclose(np.array(listed[1:], np.float32), expected, atol=1e-6)


def test_errors_are_those_of_the_client_library(client: openai.OpenAI, path: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, path + "x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="context window") as too_long:
        complete(client, BASE_MODEL, max_tokens=10**6)
    assert too_long.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        complete(client, BASE_MODEL, presence_penalty=3.0)
    with pytest.raises(openai.BadRequestError, match="500") as too_many:
        client.chat.completions.create(model=BASE_MODEL, messages=MESSAGES, logprobs=True, top_logprobs=500)  # type: ignore[arg-type]
    assert too_many.value.param == "top_logprobs"


def test_leaving_a_stream_stops_the_generation(client: openai.OpenAI, stack: Stack, wire: Wire) -> None:
    def running() -> float:
        return wire.metrics(stack.metrics_url("sampler"))["sampler_running_sequences"]

    stream = complete(client, BASE_MODEL, max_tokens=1000, stream=True, logprobs=0)
    next(iter(stream))  # type: ignore[call-overload]
    assert running() == 1
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: running() == 0, what="the sampler ends the sequence")
