"""Tokens as they come: with their tables, however slow their reader is, and until it leaves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sampler_service.core.request import Delta, Generation, Result, SampledSequence
from tests.support.waiting import until
from tests.unit.sampler_service.conftest import Service
from tests.unit.sampler_service.serving import floats, ints, make_adapter, metric, prompt, request, sample, serving
from tinsmith.errors import InvalidRequest, VersionNotLoaded
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.v1 import sampler_pb2 as pb


def joined(deltas: list[Delta], num_samples: int) -> list[list[Delta]]:
    return [[delta for delta in deltas if delta.index == index] for index in range(num_samples)]


def check(parts: list[Delta], sequence: SampledSequence) -> None:
    """The pieces of a sequence, end to end, are the sequence."""
    assert [token for part in parts for token in part.tokens] == list(sequence.tokens)
    assert [logprob for part in parts for logprob in part.logprobs] == list(sequence.logprobs)
    if sequence.topk is not None:
        tables = [part.topk for part in parts if part.topk is not None]
        assert [len(table.token_ids) for table in tables] == [len(part.tokens) for part in parts]
        np.testing.assert_array_equal(np.concatenate([table.token_ids for table in tables]), sequence.topk.token_ids)
        np.testing.assert_array_equal(np.concatenate([table.logprobs for table in tables]), sequence.topk.logprobs)


@pytest.mark.parametrize("k", [0, 3, 600], ids=["no tables", "tables", "tables wider than the vocabulary"])
async def test_each_piece_has_its_rows_of_the_table(model_folder: Path, k: int) -> None:
    async with serving(model_folder, max_topk_logprobs=600) as engine:
        asked = request(prompt(6), num_samples=3, max_tokens=20, seed=1, topk_sample_logprobs=k)
        generation = await engine.submit(asked, stream=True)
        deltas = [delta async for delta in generation.deltas()]
        result = await generation.result()
    assert all((delta.topk is None) == (k == 0) for delta in deltas)
    for parts, sequence in zip(joined(deltas, 3), result.sequences, strict=True):
        check(parts, sequence)


async def test_the_engine_does_not_wait_for_a_slow_reader_and_joins_what_it_has_missed(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        asked = request(prompt(6), num_samples=4, max_tokens=200, seed=1, topk_sample_logprobs=2)
        generation = await engine.submit(asked, stream=True)
        deltas = generation.deltas()
        first = await anext(deltas)
        result = await generation.result()
        rest = [delta async for delta in deltas]
    assert len(rest) <= 2 * 4  # what had come with the first one, and all the rest at once
    for parts, sequence in zip(joined([first, *rest], 4), result.sequences, strict=True):
        check(parts, sequence)


async def test_pieces_come_before_the_end() -> None:
    """Without an engine: what was pushed is read at once, and an end after it ends the reading."""
    generation = Generation(stream=True, on_cancel=lambda: pytest.fail("it has ended"))
    deltas = generation.deltas()
    for token in (1, 2):
        generation.push(Delta(0, (token,), (-0.5,)))
        assert await anext(deltas) == Delta(0, [token], [-0.5])
    generation.push(Delta(1, (3,), (-0.25,)))
    generation.push(Delta(0, (4,), (-0.5,)))
    generation.push(Delta(1, (5,), (-0.75,)))
    generation.finish(Result([]))
    assert [delta async for delta in deltas] == [Delta(1, [3, 5], [-0.25, -0.75]), Delta(0, [4], [-0.5])]


async def test_a_failure_ends_the_pieces_after_those_that_had_come(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        generation = await engine.submit(request(prompt(6), max_tokens=240), stream=True)
        deltas = generation.deltas()
        count = len((await anext(deltas)).tokens)
        await engine.stop()
        count += sum([len(delta.tokens) async for delta in deltas])
        assert 1 <= count < 240


async def test_tables_and_several_samples_over_the_wire(service: Service) -> None:
    asked = sample(
        prompt(4, vocab_size=200), num_samples=2, max_tokens=40, seed=1, topk_sample_logprobs=2,
        stop=pb.StopCondition(strings=["a", "e"]),
    )  # fmt: skip
    tokens: dict[int, list[int]] = {0: [], 1: []}
    tables: dict[int, list[float]] = {0: [], 1: []}
    result = None
    async for event in service.stub.StreamSample(pb.StreamSampleRequest(request=asked)):
        if event.WhichOneof("event") == "delta":
            delta = event.delta
            tokens[delta.index] += ints(delta.tokens)
            table = delta.topk_sampled_logprobs
            assert (table.length, table.k) == (len(delta.tokens) // 4, 2)
            tables[delta.index] += floats(table.logprobs).tolist()
        else:
            result = event.result
    assert result is not None
    for index, sequence in enumerate(result.sequences):
        assert ints(sequence.tokens) == tokens[index]
        assert floats(sequence.topk_sampled_logprobs.logprobs).tolist() == tables[index]
        assert not sequence.version_spans
    assert result == await service.stub.Sample(asked)


async def test_a_client_that_does_not_read_holds_nobody_up_and_finds_everything(service: Service) -> None:
    """More than its connection takes without being read: a table of 20 columns for each of 2000 tokens."""
    asked = sample(prompt(4, vocab_size=200), num_samples=8, max_tokens=250, seed=1, topk_sample_logprobs=20)
    call: Any = service.stub.StreamSample(pb.StreamSampleRequest(request=asked))
    events = aiter(call)
    first = await anext(events)
    await until(lambda: metric(service.engine, "requests_total", outcome="ok") >= 1)
    await service.stub.Sample(sample(prompt(4, vocab_size=200), max_tokens=2))
    tokens: dict[int, list[int]] = {index: [] for index in range(8)}
    tokens[first.delta.index] += ints(first.delta.tokens)
    async for event in events:
        if event.WhichOneof("event") == "delta":
            tokens[event.delta.index] += ints(event.delta.tokens)
        else:
            assert [ints(sequence.tokens) for sequence in event.result.sequences] == list(tokens.values())
    # And one that leaves without having read leaves nothing behind.
    call = service.stub.StreamSample(pb.StreamSampleRequest(request=asked))
    await call.read()
    call.cancel()
    await until(lambda: not service.engine.requests)
    assert metric(service.engine, "running_sequences") == 0


async def test_moves_over_the_wire(service: Service) -> None:
    run = "s:train:0"
    for number in (1, 2):
        await service.engine.install(f"{run}@{number}", make_adapter(service.engine.targets, seed=number))
    asked = sample(
        prompt(4, vocab_size=200), version_id=f"{run}@1", follow_run=run, num_samples=2, max_tokens=240, seed=1
    )
    call: Any = service.stub.StreamSample(pb.StreamSampleRequest(request=asked))
    events = aiter(call)
    await anext(events)
    reply = await service.stub.MoveGenerations(pb.MoveGenerationsRequest(run_id=run, version_id=f"{run}@2"))
    assert reply.num_sequences == 2
    result = None
    async for event in events:
        result = event.result
    assert result is not None
    for sequence in result.sequences:
        assert [span.version_id for span in sequence.version_spans] == [f"{run}@1", f"{run}@2"]
        assert sum(span.num_tokens for span in sequence.version_spans) == 240
    single = await service.stub.Sample(sample(prompt(4, vocab_size=200), version_id=f"{run}@2", follow_run=run))
    assert [span.version_id for span in single.sequences[0].version_spans] == [f"{run}@2"]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"version_id": "s:train:0@1"}, InvalidRequest, "run_id: is empty"),
        ({"run_id": "s:train:0"}, InvalidRequest, "version_id: is empty"),
        ({"run_id": "s:train:0", "version_id": "s:train:0@1"}, VersionNotLoaded, "'s:train:0@1' is not loaded"),
        ({"run_id": "s:train:1", "version_id": "s:train:0@2"}, InvalidRequest, "not a version of run 's:train:1'"),
    ],
    ids=str,
)
async def test_a_wrong_move_is_refused(
    service: Service, fields: dict[str, str], error: type[Exception], message: str
) -> None:
    await service.engine.install("s:train:0@2", make_adapter(service.engine.targets, seed=2))
    with pytest.raises(Exception) as raised:  # noqa: PT011
        await service.stub.MoveGenerations(pb.MoveGenerationsRequest(**fields))
    with pytest.raises(error, match=message):
        raise from_rpc_error(raised.value)  # type: ignore[arg-type]
