"""A seq_id that never comes delays what waits behind it, and no more than that."""

import asyncio

import pytest

from tests.unit.trainer_service.scheduling import Bench, MakeBench
from tinsmith.errors import InvalidRequest, SequenceConflict
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.operation import Operation, Work
from trainer_service.operations.missing import LostOperations
from trainer_service.operations.operations import refused


def lost(bench: Bench, skipped: list[pb.SkipOperationRequest], *, timeout_s: float = 10) -> LostOperations:
    def skip(request: pb.SkipOperationRequest) -> Work:
        skipped.append(request)
        return refused(InvalidRequest(request.reason))

    return LostOperations(bench.scheduler, skip, timeout_s=timeout_s)


async def test_an_operation_behind_a_number_that_never_comes_runs_in_the_end(bench: Bench) -> None:
    await bench.create("a", "b")
    skipped: list[pb.SkipOperationRequest] = []
    looking = lost(bench, skipped)
    behind = [await bench.step("a", seq_id) for seq_id in (2, 4)]
    await looking.look(100)
    await looking.look(109)
    assert skipped == []
    await looking.look(110)
    await behind[0].wait()
    assert [(one.model_id, one.seq_id, one.gradients_missing) for one in skipped] == [("a", 1, True)]
    assert "seq_id 1 has not arrived" in skipped[0].reason
    assert "10 s" in skipped[0].reason
    assert not behind[1].outcome.done()  # number 3 has its own time
    await looking.look(111)
    await looking.look(121)
    await behind[1].wait()
    assert bench.ran == [("a", 2), ("a", 4)]
    with pytest.raises(SequenceConflict, match="seq_id 1") as late:  # it is too late
        await bench.step("a", 1)
    assert late.value.metadata["kind"] == "skip"


async def test_a_model_of_which_more_arrives_is_not_given_up(bench: Bench) -> None:
    await bench.create("a")
    skipped: list[pb.SkipOperationRequest] = []
    looking = lost(bench, skipped)
    late: list[Operation] = []
    for now_s, seq_id in ((0, 2), (9, 5), (18, 4), (27, 3)):  # also what closes another gap
        late.append(await bench.step("a", seq_id))
        await looking.look(now_s)
    await looking.look(36)
    await bench.step("a", 1)
    for operation in late:
        await operation.wait()
    await looking.look(1000)
    assert skipped == []
    assert bench.ran == [("a", seq_id) for seq_id in (1, 2, 3, 4, 5)]


async def test_work_in_its_turn_is_no_gap_however_long_it_takes(bench: Bench) -> None:
    await bench.create("a")
    skipped: list[pb.SkipOperationRequest] = []
    looking = lost(bench, skipped)
    running = await bench.hold("a", 1)
    waiting = await bench.step("a", 2)
    await looking.look(0)
    await looking.look(1000)
    bench.engine.gate.set()
    await running.wait()
    await waiting.wait()
    assert skipped == []


async def test_a_number_that_cannot_be_given_up_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.create("a")
    skipped: list[pb.SkipOperationRequest] = []
    looking = lost(bench, skipped)
    behind = await bench.step("a", 2)
    await looking.look(0)
    with monkeypatch.context() as broken:

        async def append(*_: object, **__: object) -> None:
            raise OSError("no space left")

        broken.setattr(bench.journal, "append", append)
        await looking.look(10)
    assert "no space left" in caplog.text
    assert not behind.outcome.done()
    await looking.look(11)
    await behind.wait()


async def test_it_looks_by_itself(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.create("a")
    behind = await bench.step("a", 2)
    running = asyncio.create_task(lost(bench, [], timeout_s=0.05).run())
    await asyncio.wait_for(behind.wait(), 10)
    running.cancel()
    await asyncio.wait({running})
