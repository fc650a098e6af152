"""Draws, and the logprobs of what was given and of what was drawn."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import tinker
from tinker import types

from tests.conformance.kit import Absent, case
from tests.conformance.world import (
    CLOSE,
    NEAR,
    PROMPT,
    TEXTS,
    World,
    assert_close,
    datum,
    logprobs,
    need,
    prompt,
    raises,
    sample,
    scores,
    settle,
)


@case("sample: several, up to max_tokens")
def several(world: World) -> None:
    drawn = sample(world.base_sampler, num_samples=3, max_tokens=7, stop=[], seed=1).sequences
    assert [len(one.tokens) for one in drawn] == [7, 7, 7], drawn
    assert {one.stop_reason for one in drawn} == {"length"}, drawn
    assert len({tuple(one.tokens) for one in drawn}) > 1, "all draws are equal"


@case("sample: a seed repeats a draw")
def seed(world: World) -> None:
    first, again = (sample(world.base_sampler, num_samples=2, seed=-3).sequences for _ in range(2))
    assert [one.tokens for one in first] == [one.tokens for one in again], (first, again)
    other = sample(world.base_sampler, num_samples=2, seed=2**40, max_tokens=12).sequences
    assert [one.tokens for one in first] != [one.tokens[:6] for one in other], "another seed gives the same"


@case("sample: temperature 0 takes the likeliest, and a token id stops")
def greedy(world: World) -> None:
    (whole,) = sample(world.base_sampler, temperature=0.0, stop=[], max_tokens=8).sequences
    for position in (0, 3):
        stop = whole.tokens[position]
        expected = whole.tokens[: whole.tokens.index(stop) + 1]
        (cut,) = sample(world.base_sampler, temperature=0.0, stop=[stop], max_tokens=8).sequences
        assert (cut.tokens, cut.stop_reason) == (expected, "stop"), (cut, expected)


@case("sample: logprobs of what was drawn are the trainer's")
def sampled_logprobs(world: World) -> None:
    (drawn,) = sample(world.sampler, seed=2, temperature=1.0, max_tokens=8, stop=[]).sequences
    expected = logprobs(world.forward(world.trained, [datum([*PROMPT, *drawn.tokens])]))[0]
    assert_close(drawn.logprobs, expected[len(PROMPT) - 1 :], "logprobs", within=NEAR)


@case("sample: logprobs of the prompt")
def prompt_logprobs(world: World) -> None:
    drawn = sample(world.base_sampler, include_prompt_logprobs=True)
    assert drawn.prompt_logprobs[0] is None, drawn.prompt_logprobs
    assert_close(drawn.prompt_logprobs[1:], scores(world.base_sampler, PROMPT), "logprobs")


@case("sample: the likeliest tokens at each place of the prompt")
def topk_prompt_logprobs(world: World) -> None:
    need(world.base_sampler, "sample", "topk_prompt_logprobs")
    drawn = sample(world.base_sampler, include_prompt_logprobs=True, topk_prompt_logprobs=4)
    rows = drawn.topk_prompt_logprobs
    assert len(rows) == len(PROMPT), rows
    assert rows[0] is None, rows[0]
    for token, own, row in zip(PROMPT[1:], drawn.prompt_logprobs[1:], rows[1:], strict=True):
        values = [logprob for _, logprob in row]
        assert len(values) == 4, row
        assert values == sorted(values, reverse=True), row
        assert own <= values[0] + CLOSE, (own, row)
        for other, logprob in row:
            assert other != token or abs(logprob - own) < CLOSE, (token, own, row)


@case("sample: the likeliest tokens at each drawn place")
def topk_sample_logprobs(world: World) -> None:
    need(world.base_sampler, "sample", "topk_sample_logprobs")
    (drawn,) = sample(world.base_sampler, topk_sample_logprobs=3, temperature=0.0, stop=[]).sequences
    for token, logprob, row in zip(drawn.tokens, drawn.logprobs, drawn.topk_logprobs, strict=True):
        assert len(row) == 3, row
        assert row[0][0] == token, (token, row)
        assert_close(row[0][1], logprob, "the greedy token's logprob")


@case("sample: logprobs of named tokens")
def target_prompt_logprobs(world: World) -> None:
    need(world.base_sampler, "sample", "target_prompt_logprobs")
    targets = np.full((len(PROMPT) - 1, 2), -1)
    targets[:, 0] = PROMPT[1:]
    tensor = types.TensorData.from_numpy(targets)
    found = sample(world.base_sampler, target_prompt_logprobs=tensor).target_prompt_logprobs.to_numpy()
    assert_close(found[:, 0], scores(world.base_sampler, PROMPT), "logprobs of the prompt's own tokens")
    assert_close(found[:, 1], np.zeros(len(PROMPT) - 1), "logprobs of unwanted cells")


@case("sample: other draws at each place of the prompt")
def prompt_alt_tokens(world: World) -> None:
    need(world.base_sampler, "sample", "prompt_alt_tokens_k")
    found = sample(world.base_sampler, prompt_alt_tokens_k=2, seed=3).prompt_alt_tokens
    tokens, values = found.tokens.to_numpy(), found.logprobs.to_numpy()
    assert tokens.shape == values.shape == (len(PROMPT) - 1, 2), (tokens.shape, values.shape)
    for place in (0, 4):
        text = [*PROMPT[: place + 1], int(tokens[place, 0])]
        assert_close(scores(world.base_sampler, text)[-1], values[place, 0], "logprob", within=NEAR)


@case("compute_logprobs of the last tokens only")
def last_n(world: World) -> None:
    compute = need(world.base_sampler, "compute_logprobs", "prompt_logprobs_last_n")
    found = settle(compute(prompt(), prompt_logprobs_last_n=4))
    assert found[:-4] == [None] * (len(PROMPT) - 4), found
    assert_close(found[-4:], scores(world.base_sampler, PROMPT)[-4:], "logprobs")


@case("many samples at once")
def many(world: World) -> None:
    params = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    texts = [TEXTS[n % 3] for n in range(40)]
    futures = [world.base_sampler.sample(prompt(text), 1, params) for text in texts]
    drawn = [settle(future).sequences[0].tokens for future in futures]
    assert drawn == [drawn[n % 3] for n in range(40)], "equal prompts, other tokens"


@case("many samples at once, polled together")
def polled_together(world: World) -> None:
    world.set_flags(sample_use_retrieve_futures=True)
    try:
        client = settle(world.service.create_sampling_client(base_model=world.base_model))
        params = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
        futures = [client.sample(prompt(TEXTS[n % 3]), 1, params) for n in range(12)]
        drawn = [settle(future).sequences[0].tokens for future in futures]
    finally:
        world.set_flags(sample_use_retrieve_futures=False)
    assert drawn == [drawn[n % 3] for n in range(12)], "equal prompts, other tokens"
    assert (
        drawn[0]
        == sample(world.base_sampler, tokens=TEXTS[0], max_tokens=3, temperature=0.0, stop=[]).sequences[0].tokens
    )


@case("a pickled sampling client samples")
def pickled(world: World) -> None:
    if type(world.sampler).__reduce__ is object.__reduce__:
        raise Absent
    client = pickle.loads(pickle.dumps(world.sampler))
    assert_close(scores(client, TEXTS[0]), scores(world.sampler, TEXTS[0]), "logprobs")


@case("a pickled sampling client asks for its number")
def joined(world: World) -> None:
    world.set_flags(sample_join_sampling_session=True)
    try:
        pickled(world)
    finally:
        world.set_flags(sample_join_sampling_session=False)


@case("get_sampler, get_base_model")
def get_sampler(world: World) -> None:
    found = settle(need(world.rest, "get_sampler")(world.sampler._sampling_session_id))
    assert (found.base_model, found.model_path) == (world.base_model, world.saved_sampler), found
    if hasattr(world.sampler, "get_base_model"):
        assert settle(world.sampler.get_base_model()) == world.base_model


@case("the async methods of a sampler do the same")
def async_methods(world: World) -> None:
    async def run() -> tuple[list[int], list[float | None]]:
        params = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[])
        drawn = await world.base_sampler.sample_async(prompt(), 1, params)
        return drawn.sequences[0].tokens, await world.base_sampler.compute_logprobs_async(prompt())

    tokens, values = asyncio.run(run())
    assert tokens == sample(world.base_sampler, max_tokens=5, temperature=0.0, stop=[]).sequences[0].tokens
    assert_close(values[1:], scores(world.base_sampler, PROMPT), "logprobs")


@case("errors: a prompt beyond the context fails its future, category user")
def too_long(world: World) -> None:
    def ask() -> None:
        sample(world.base_sampler, max_tokens=2**30)

    error = raises(tinker.RequestFailedError, ask, "2**30 tokens")
    assert isinstance(error, tinker.RequestFailedError)
    assert error.category.value.lower() == "user", error
