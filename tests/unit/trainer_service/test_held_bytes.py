"""Memory of what is accepted: bounded, shared, and given back."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import numpy as np
import psutil
import pytest
from google.protobuf.message import Message

from tests.support.batches import datum, request, wide
from tests.unit.trainer_service.scheduling import Bench, MakeBench, fake_batch
from tinsmith.allocator import give_back_freed_memory
from tinsmith.errors import InvalidRequest, OutOfCapacity
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.durability.records import Body, Entry
from trainer_service.engine.batch import BatchLimits
from trainer_service.operation import Answer, Turn, Work
from trainer_service.request_bytes import batch_bytes, message_bytes
from trainer_service.requests import batch_of

LIMITS = BatchLimits(vocab_size=100, max_context_length=64)


def held(bench: Bench) -> float:
    return bench.registry.get_sample_value("trainer_held_bytes") or 0.0


@pytest.mark.parametrize("part", ["datum", "chunk", "span", "input", "dimension", "setting", "note", "few notes"])
def test_a_message_counts_for_its_parts_however_small_they_are_on_the_wire(part: str) -> None:
    """32,500 empty chunks have 0.13 MB on the wire and 2 MB in memory, of which 0.25 MB counted: queued batches took
    eight times max_queued_bytes."""
    one = types_pb2.Datum()
    batch, save = pb.ForwardBackwardRequest(), pb.SaveCheckpointRequest()
    for number in range(6000 if part == "few notes" else 32_500):
        match part:
            case "datum":
                batch.data.add()
            case "span":
                one.model_input_spans.add()
            case "dimension":
                one.loss_fn_inputs["weights"].shape.append(1)
            case "chunk":
                one.model_input.add().encoded_text.tokens = b""
            case "input":
                one.loss_fn_inputs[str(number)].dtype = types_pb2.DTYPE_INT64
            case "setting":
                batch.loss_fn_config_v2[str(number)].number = 1.0
            case _:
                save.user_metadata[str(number)] = ""
    batch.data.append(one)
    made: Message = save if part.endswith(("note", "notes")) else batch
    body, process = made.SerializeToString(), psutil.Process()
    gc.collect()
    give_back_freed_memory()  # which earlier cases have left, and the messages would take
    before = process.memory_info().rss
    kept = [type(made).FromString(body) for _ in range(125 if part == "few notes" else 25)]
    taken = process.memory_info().rss - before
    assert taken < sum(message_bytes(one, len(body)) for one in kept)


async def test_a_refused_batch_counts_for_its_message_until_its_turn(make_bench: MakeBench) -> None:
    """A refused batch has no arrays, but its call keeps the message."""
    bench = await make_bench(max_queued_bytes=10_000)
    await bench.create("a")
    body = Body.pack("forward_backward", pb.ForwardBackwardRequest(loss_fn="none"))
    operation, _ = await bench.scheduler.accept("a", 2, body, message_bytes=800, held_bytes=3000)

    async def refused(turn: Turn) -> Answer:
        raise InvalidRequest("no")

    await bench.scheduler.begin(operation, refused)
    assert held(bench) == 800
    await bench.step("a", 1)
    with pytest.raises(InvalidRequest):
        await operation.wait()


async def test_a_creation_that_finds_no_memory_leaves_no_model(make_bench: MakeBench) -> None:
    bench = await make_bench(max_queued_bytes=1000)
    with pytest.raises(OutOfCapacity, match="max_queued_bytes 1000"):
        await bench.batch("a", 0, held_bytes=600)
    assert not bench.registry.get_sample_value("trainer_models")


async def test_queued_batches_are_bounded_by_their_memory_and_taken_when_others_are_done(make_bench: MakeBench) -> None:
    bench = await make_bench(max_queued_bytes=1000)
    await bench.create("a")
    assert bench.registry.get_sample_value("trainer_held_limit_bytes") == 1000
    operations = [await bench.hold("a", 1, held_bytes=300), await bench.batch("a", 2, held_bytes=200)]
    assert held(bench) == 500
    with pytest.raises(OutOfCapacity, match=r"a: its operations hold 500 bytes .* needs 1, .*max_queued_bytes 1000"):
        await bench.batch("a", 3, held_bytes=1)
    assert await bench.journal.find("a", 3) is None
    bench.engine.gate.set()
    for operation in operations:
        await operation.stored.wait()
    assert held(bench) == 0
    await (await bench.batch("a", 3, held_bytes=500)).stored.wait()
    assert held(bench) == 0


async def test_models_that_take_all_they_get_leave_a_share_to_one_that_comes(make_bench: MakeBench) -> None:
    bench = await make_bench(max_queued_bytes=1000)
    greedy = ["g1", "g2", "g3"]
    await bench.create(*greedy, "modest")
    await bench.hold("g1", 1, held_bytes=10)
    seq_ids = {"g1": 2, "g2": 1, "g3": 1}
    for _ in range(30):
        for model_id in greedy:
            try:
                await bench.batch(model_id, seq_ids[model_id], held_bytes=10)
            except OutOfCapacity:
                continue
            seq_ids[model_id] += 1
    assert all(25 <= seq_id <= 27 for seq_id in seq_ids.values())  # a quarter each
    await bench.batch("modest", 1, held_bytes=125)
    bench.engine.gate.set()


async def test_the_operation_that_all_of_its_model_waits_for_is_taken_above_the_bound(make_bench: MakeBench) -> None:
    bench = await make_bench(max_queued_bytes=1000)
    await bench.create("a")
    waiting = [await bench.batch("a", 2, held_bytes=450)]
    with pytest.raises(OutOfCapacity):
        await bench.batch("a", 3, held_bytes=450)
    waiting.append(await bench.batch("a", 1, held_bytes=450))
    for operation in waiting:
        await operation.stored.wait()
    await (await bench.batch("a", 3, held_bytes=450)).wait()


async def test_operations_in_reverse_behind_a_gap_are_bounded_too(make_bench: MakeBench) -> None:
    """Each of them comes before all others that are there, and all wait for one that has not come."""
    bench = await make_bench(max_queued_bytes=1000)
    await bench.create("a")
    waiting = []
    for seq_id in range(40, 1, -1):
        try:
            waiting.append(await bench.batch("a", seq_id, held_bytes=100))
        except OutOfCapacity:
            continue
    assert len(waiting) == 5
    assert held(bench) == 500


async def test_the_next_operations_of_all_models_go_above_the_bound_by_half_of_it_together(
    make_bench: MakeBench,
) -> None:
    models = ["a", "b", "c", "d"]
    bench = await make_bench(max_queued_bytes=1000)
    await bench.create(*models, "e")
    for model_id, held_bytes in zip(models, (500, 250, 120, 60), strict=True):
        await bench.batch(model_id, 2, held_bytes=held_bytes)
    await bench.hold("e", 1, held_bytes=10)  # so that what is taken stays
    first = await bench.batch("a", 1, held_bytes=490)
    for model_id in models[1:]:
        with pytest.raises(OutOfCapacity, match="max_queued_bytes"):
            await bench.batch(model_id, 1, held_bytes=500)
    assert held(bench) <= 1500
    bench.engine.gate.set()
    await first.stored.wait()
    for model_id in models[1:]:  # each closes its gap in the end
        while True:
            try:
                await bench.batch(model_id, 1, held_bytes=500)
                break
            except OutOfCapacity:
                await asyncio.sleep(0.01)
    for model_id in models:
        await (await bench.scheduler.find(model_id, 2)).wait()


async def test_a_small_operation_ahead_of_many_large_ones_does_not_let_all_of_them_in(make_bench: MakeBench) -> None:
    bench = await make_bench(max_queued_bytes=1000)
    await bench.create("a")
    await bench.batch("a", 40)  # all that comes closes a gap
    await bench.hold("a", 1, held_bytes=300)
    num_taken = 0
    for seq_id in range(2, 40):
        try:
            await bench.batch("a", seq_id, held_bytes=100)
            num_taken += 1
        except OutOfCapacity:
            continue
    assert num_taken == 2
    assert held(bench) == 500
    bench.engine.gate.set()


async def test_a_refused_batch_holds_its_body_alone_and_one_that_the_journal_refuses_nothing(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await make_bench(max_queued_bytes=100_000)
    await bench.create("a")

    async def fail(turn: Turn) -> Answer:
        raise InvalidRequest("no")

    body = Body.pack("forward_backward", pb.GetModelRequest(model_id="x" * 500))
    operation, _ = await bench.scheduler.accept("a", 2, body, held_bytes=40_000)
    assert held(bench) == 40_000
    await bench.scheduler.begin(operation, fail)  # waits for 1
    assert held(bench) == body.num_bytes == 503

    async def full(*_: object, **__: object) -> None:
        raise OutOfCapacity("the disk is full")

    monkeypatch.setattr(bench.journal, "append", full)
    with pytest.raises(OutOfCapacity, match="disk"):
        await bench.batch("a", 3, held_bytes=40_000)
    assert held(bench) == 503


async def test_deleting_a_model_gives_its_memory_back(make_bench: MakeBench) -> None:
    bench = await make_bench(max_queued_bytes=1000)
    await bench.create("a")
    operations = [await bench.hold("a", 1, held_bytes=200), await bench.batch("a", 3, held_bytes=200)]
    bench.engine.gate.set()
    await bench.scheduler.delete("a", lambda: None)
    for operation in operations:
        await operation.stored.wait()
    assert held(bench) == 0


async def found(turn: Turn) -> Answer:
    await turn.run(lambda: None)
    return Answer()


async def not_called() -> None:
    raise AssertionError


async def restarted(bench: Bench, make_bench: MakeBench, **settings: int) -> Bench:
    assert await bench.scheduler.close(timeout_s=5)
    await asyncio.to_thread(bench.journal.close)
    return await make_bench(**settings)


async def test_a_replay_reads_no_more_than_the_bound_ahead_of_what_runs(make_bench: MakeBench) -> None:
    """By their number 16 of each model would be read."""
    models = ("a", "b", "c")
    bench = await make_bench()
    await bench.create(*models)
    for seq_id in range(1, 21):
        for model_id in models:
            await (await bench.batch(model_id, seq_id)).stored.wait()
    bench = await restarted(bench, make_bench, max_queued_bytes=1000)
    seen = []

    async def work_of(entry: Entry) -> Work:
        seen.append(held(bench))
        return fake_batch(f"again {entry.seq_id}", held_bytes=400)

    for model_id in models:
        history = await bench.journal.history(model_id)
        bench.scheduler.replay.begin(model_id, history, start=0, found=found, work_of=work_of, forget=not_called)
    for model_id in models:
        await bench.scheduler.check_held(model_id)
    assert len(seen) == 60
    assert 0 < max(seen) < 1000  # before one more is read
    assert held(bench) == 0


async def test_a_batch_behind_a_gap_since_before_a_restart_holds_up_no_replay(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.create("a", "b")
    for seq_id in (2, 3, 4, 5):
        await bench.batch("a", seq_id)  # they wait for 1
    for seq_id in range(1, 6):
        await (await bench.batch("b", seq_id)).stored.wait()
    bench = await restarted(bench, make_bench, max_queued_bytes=1000)

    async def work_of(entry: Entry) -> Work:
        return fake_batch(f"again {entry.seq_id}", held_bytes=400)

    for model_id in ("a", "b"):
        history = await bench.journal.history(model_id)
        bench.scheduler.replay.begin(model_id, history, start=0, found=found, work_of=work_of, forget=not_called)
    await asyncio.wait_for(bench.scheduler.check_held("b"), 10)
    await (await bench.batch("a", 1, held_bytes=400)).wait()
    await (await bench.scheduler.find("a", 5)).wait()


def arrays(size: int, *names: str) -> dict[str, object]:
    return {name: np.ones(size, np.float32) for name in names}


def plain(num_datums: int, **more: object) -> Sequence[types_pb2.Datum]:
    return [datum([1] * 60, target_tokens=[1] * 60, **more)] * num_datums


@pytest.mark.parametrize(
    "message",
    [
        request(plain(50)),
        request([datum([1] * 8, target_tokens=np.zeros((8, 900), np.int32))]),
        request([wide(1000, tokens=50)] * 4),
        request(plain(9, **arrays(60, "logprobs", "advantages")), "ppo"),
    ],
)
def test_counted_bytes_are_no_less_than_those_of_a_batch(message: pb.ForwardBackwardRequest) -> None:
    batch = batch_of(message, LIMITS)
    held = 2 * message.ByteSize()  # gRPC keeps the serialized form, too
    for one in batch.datums:
        held += one.tokens_N.nbytes + one.targets.nbytes + sum(values.nbytes for values in one.inputs.values())
        held += 2 * 4 * one.targets.size  # the logprobs, as an array and in the answer
    assert held <= batch.held_bytes == batch_bytes(message) <= 2 * held + 2048 * len(batch.datums)


def test_a_request_that_needs_more_memory_than_one_may_ever_have_is_refused_by_name() -> None:
    message = request(plain(50))
    needed = batch_bytes(message)
    batch_of(message, LIMITS, max_bytes=needed)
    with pytest.raises(
        InvalidRequest,
        match=rf"data: the batch and its answer take {needed} bytes of memory.*{needed - 1}.*max_queued_bytes",
    ):
        batch_of(message, LIMITS, max_bytes=needed - 1)
