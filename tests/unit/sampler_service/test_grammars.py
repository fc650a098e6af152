"""Sequences that have to fit a grammar: what is drawn, what is told of it, and what is refused."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio
import jsonschema
import numpy as np
import pytest
from transformers import AutoTokenizer

from sampler_service import grammars
from sampler_service.core.request import Grammar, Penalties, StopCondition
from sampler_service.grammars import Grammars
from tests.unit.sampler_service.conftest import Service
from tests.unit.sampler_service.serving import generate, metric, plain_logits, request, sample, serving
from tests.unit.sampler_service.serving import prompt as any_prompt
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.v1 import sampler_pb2 as pb

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "sex": {"enum": ["f", "m", None]},
    },
    "required": ["name", "age", "sex"],
    "additionalProperties": False,
}
ANSWER = Grammar("lark", 'start: "yes" | "no, and " /[a-z]{3,5}/')


def prompt(length: int) -> Any:
    return any_prompt(length, vocab_size=300)


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def texts(folder: Path, result: Any) -> list[str]:
    decode = AutoTokenizer.from_pretrained(folder).decode
    return [decode(list(one.tokens), skip_special_tokens=True) for one in result.sequences]


async def test_every_sequence_fits_the_schema_and_ends_by_itself(text_model_folder: Path) -> None:
    async with serving(text_model_folder) as engine:
        result = await generate(engine, prompt(5), num_samples=12, max_tokens=240, seed=1, grammar=schema(PERSON))
    assert len(set(texts(text_model_folder, result))) > 6  # it is drawn, not made up
    for sequence, text in zip(result.sequences, texts(text_model_folder, result), strict=True):
        jsonschema.validate(json.loads(text), PERSON)
        assert sequence.stop_reason == "stop"
        assert sequence.tokens[-1] == 0  # <|end|>, of the tokenizer


async def test_logprobs_are_those_of_the_model_without_the_grammar(text_model_folder: Path) -> None:
    tokens = prompt(7)
    async with serving(text_model_folder) as engine:
        result = await generate(
            engine, tokens, max_tokens=9, temperature=0.7, seed=3, grammar=schema(PERSON), topk_sample_logprobs=3
        )
    sequence = result.sequences[0]
    logits = plain_logits(text_model_folder, [*tokens, *sequence.tokens])[6:-1] / 0.7
    expected = logits.log_softmax(-1).numpy()
    np.testing.assert_allclose(
        sequence.logprobs, expected[np.arange(len(sequence.tokens)), list(sequence.tokens)], atol=1e-4
    )
    assert sequence.topk is not None
    np.testing.assert_allclose(sequence.topk.logprobs, -np.sort(-expected, -1)[:, :3], atol=1e-4)


async def test_a_draw_is_in_proportion_to_what_the_grammar_leaves(text_model_folder: Path) -> None:
    tokens = prompt(7)
    first = Grammar("lark", "start: /[abc]/")
    names = AutoTokenizer.from_pretrained(text_model_folder).convert_tokens_to_ids(["a", "b", "c"])
    async with serving(text_model_folder) as engine:
        result = await generate(engine, tokens, num_samples=600, max_tokens=1, seed=5, grammar=first)
    odds = plain_logits(text_model_folder, [*tokens, 0])[6][names].softmax(-1).numpy()
    drawn = Counter(sequence.tokens[0] for sequence in result.sequences)
    np.testing.assert_allclose([drawn[name] / 600 for name in names], odds, atol=0.08)
    assert result.sequences[0].stop_reason == "length"


async def test_a_seed_gives_the_same_text_alone_and_beside_others(text_model_folder: Path) -> None:
    async with serving(text_model_folder) as engine:
        alone = await generate(engine, prompt(6), num_samples=2, max_tokens=60, seed=11, grammar=schema(PERSON))
        free = await generate(engine, prompt(8), max_tokens=60, seed=12, stop=StopCondition())
        both = await asyncio.gather(
            generate(engine, prompt(6), num_samples=2, max_tokens=60, seed=11, grammar=schema(PERSON)),
            generate(engine, prompt(8), max_tokens=60, seed=12, stop=StopCondition()),
            generate(engine, prompt(4), num_samples=3, max_tokens=60, grammar=ANSWER),
        )
    assert [list(one.tokens) for one in both[0].sequences] == [list(one.tokens) for one in alone.sequences]
    assert list(both[1].sequences[0].tokens) == list(free.sequences[0].tokens)
    np.testing.assert_allclose(both[1].sequences[0].logprobs, free.sequences[0].logprobs, atol=1e-5)


@pytest.mark.parametrize("draw", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.01}], ids=str)
async def test_a_token_that_the_grammar_forbids_is_never_drawn_however_probable(
    text_model_folder: Path, draw: dict[str, Any]
) -> None:
    async with serving(text_model_folder) as engine:
        result = await generate(engine, prompt(5), max_tokens=30, grammar=ANSWER, **draw)
    text = texts(text_model_folder, result)[0]
    assert text == "yes" or text.startswith("no, and ")


async def test_a_model_that_likes_spaces_does_not_go_on_with_them(text_model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(text_model_folder)
    spaces = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()]
    penalties = Penalties(logit_bias=[(token, 100.0) for token in spaces])
    async with serving(text_model_folder) as engine:
        result = await generate(engine, prompt(5), max_tokens=240, seed=1, grammar=schema(PERSON), penalties=penalties)
    text = texts(text_model_folder, result)[0]
    assert ": " in text
    assert ", " in text
    assert result.sequences[0].stop_reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)


async def test_max_tokens_cuts_the_text(text_model_folder: Path) -> None:
    async with serving(text_model_folder) as engine:
        result = await generate(engine, prompt(5), max_tokens=4, seed=1, grammar=schema(PERSON))
    assert result.sequences[0].stop_reason == "length"
    assert texts(text_model_folder, result)[0].startswith("{")


async def test_a_sequence_that_is_interrupted_goes_on_in_its_grammar(
    text_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without max_tokens a sequence grows, and gives its place back when there is no room."""
    monkeypatch.setattr("sampler_service.core.sequence.HEADROOM", 16)
    digits = Grammar("lark", "start: /[0-9]{150}/")
    async with serving(text_model_folder, max_kv_tokens=260) as engine:
        asked = [await engine.submit(request(prompt(20), seed=n, grammar=digits)) for n in range(3)]
        results = await asyncio.gather(*(generation.result() for generation in asked))
        assert metric(engine, "preemptions_total") > 0
    for result in results:
        (text,) = texts(text_model_folder, result)
        assert len(text) == 150
        assert text.isdigit()


REFUSED = {
    "an unknown type": ({"type": "object", "properties": {"a": {"type": "strong"}}}, "strong"),
    "a keyword that is not enforced": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "a reference to nothing": ({"$ref": "#/$defs/none"}, "none"),
    "a broken pattern": ({"type": "string", "pattern": "((("}, "unclosed group"),
    "no object": ([1, 2], "grammar.json_schema"),
    "a reference to itself": ({"$ref": "#"}, r"json_schema: \$ref: '#' leads back to itself"),
    "references in a circle": (
        {"properties": {"a": {"anyOf": [{"$ref": "#/$defs/x"}]}}, "$defs": {"x": {"$ref": "#/properties/a"}}},
        r"properties\.a\.anyOf\.0\.\$ref: '#/\$defs/x' leads back to itself",
    ),
    "a schema that nothing fits": ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
}


@pytest.mark.parametrize(("value", "named"), REFUSED.values(), ids=REFUSED)
async def test_a_schema_that_cannot_be_compiled_is_refused_with_the_reason(
    text_model_folder: Path, value: Any, named: str
) -> None:
    made = Grammars(str(text_model_folder), vocab_size=300, eos_token_ids=[0])
    with pytest.raises(InvalidRequest, match=named) as refused:
        await made.compiled(schema(value))
    assert refused.value.metadata["field"] == "grammar.json_schema"


def _exponential() -> dict[str, Any]:
    def level(n: int) -> dict[str, Any]:
        either = {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"type": "object", "properties": {f"x{n}": {}}}]}
        return {"allOf": [either, either]}

    return {"$defs": {f"d{n}": level(n) for n in range(14)} | {"d14": {"type": "object"}}, "$ref": "#/$defs/d0"}


def _deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


HOSTILE = {
    "exponential": _exponential(),
    "deep": _deep(300),
    "a million items": {"type": "array", "minItems": 100_000, "maxItems": 1_000_000, "items": {"type": "integer"}},
    "thousands of optional properties": {"properties": {f"p{n}": {"type": "string"} for n in range(8000)}},
    "too long": {"enum": [f"{n:010}" for n in range(30_000)]},
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_schema_is_refused_and_stalls_nobody(text_model_folder: Path, value: Any) -> None:
    async with serving(text_model_folder) as engine:
        hostile = asyncio.create_task(engine.submit(request(prompt(5), max_tokens=3, grammar=schema(value))))
        others = 0
        while not hostile.done():
            await generate(engine, prompt(4), max_tokens=4)
            others += 1
            await asyncio.sleep(0.02)
        with pytest.raises(InvalidRequest) as refused:
            await hostile
        assert others
        assert refused.value.metadata["field"] == "grammar.json_schema"
        await generate(engine, prompt(4), max_tokens=4, grammar=ANSWER)


PATTERNS = ["^(a+)+$", "^(?:(?:a|b|[0-9]{1,99}){1,99}){1,99}$", "^(.*[ab].{300}){3}$", "^(.*a.{20})$"]


@pytest.mark.parametrize("pattern", PATTERNS)
async def test_a_catastrophic_pattern_costs_little_for_each_token(text_model_folder: Path, pattern: str) -> None:
    async with serving(text_model_folder) as engine:
        started = time.perf_counter()
        try:
            await generate(
                engine, prompt(5), max_tokens=40, seed=1, grammar=schema({"type": "string", "pattern": pattern})
            )
        except InvalidRequest as refused:
            assert refused.metadata["field"].startswith("grammar")  # noqa: PT017 - either way is right
        assert time.perf_counter() - started < 20
        await generate(engine, prompt(4), max_tokens=4)


async def test_compiled_grammars_are_kept_and_bounded_by_number_and_length(
    text_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_KEPT", 3)
    made = Grammars(str(text_model_folder), vocab_size=300, eos_token_ids=[0])
    numbers = [schema({"const": n}) for n in range(4)]
    first, again = await asyncio.gather(made.compiled(numbers[0]), made.compiled(numbers[0]))
    assert first is again
    for one in numbers[1:]:
        await made.compiled(one)
    assert list(made._kept) == numbers[1:]
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", len(numbers[1].text))
    assert await made.compiled(numbers[3]) is made._kept[numbers[3]]
    await made.compiled(numbers[0])
    assert list(made._kept) == [numbers[0]]
    umlauts = [Grammar("json_schema", f'{{"const": "{letter * 9}"}}') for letter in "äö"]  # two bytes each
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", sum(len(one.text) for one in umlauts))
    for one in umlauts:
        await made.compiled(one)
    assert list(made._kept) == umlauts[1:]


async def test_a_model_without_a_tokenizer_has_no_grammars(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        with pytest.raises(Unsupported, match="needs a tokenizer"):
            await engine.submit(request(prompt(5), grammar=ANSWER))


async def test_a_grammar_travels_over_grpc(service: Service) -> None:
    asked = sample(prompt(5), num_samples=2, max_tokens=20, grammar=pb.Grammar(lark='start: "yes" | "no"'))
    reply = await service.stub.Sample(asked)
    assert len(reply.sequences) == 2
    asked.grammar.json_schema = '{"type": "strong"}'
    for broken, field in ((asked, "grammar.json_schema"), (sample(prompt(5), grammar=pb.Grammar()), "grammar")):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await service.stub.Sample(broken)
        assert from_rpc_error(failed.value).metadata["field"] == field
