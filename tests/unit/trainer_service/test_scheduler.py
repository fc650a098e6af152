"""The scheduler's promises."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer_service.scheduling import Bench, MakeBench
from tinsmith.cores import Cores, make_page
from tinsmith.errors import (
    InvalidRequest,
    ModelLost,
    ModelNotFound,
    OutOfCapacity,
    ResultNotFound,
    SequenceConflict,
    ServiceError,
)
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.durability.executing import Executing
from trainer_service.durability.records import Entry, EntryState
from trainer_service.operation import Answer, Turn, Work


async def test_operations_that_arrive_in_reverse_run_in_order(bench: Bench) -> None:
    await bench.create("a")
    operations = [await bench.step("a", seq_id) for seq_id in (5, 4, 3, 2, 1)]
    answers = [await operation.wait() for operation in operations]
    assert [seq_id for _, seq_id in bench.ran] == [1, 2, 3, 4, 5]
    assert [answer.optim_step.metrics["seq:mean"] for answer in answers] == [5, 4, 3, 2, 1]
    assert bench.queue_length() == 0


async def test_a_gap_holds_up_its_own_model_only(bench: Bench) -> None:
    await bench.create("a", "b")
    late = await bench.step("a", 2)
    await (await bench.step("b", 1)).wait()
    assert not late.outcome.done()
    await bench.step("a", 1)
    await late.wait()
    assert bench.ran == [("b", 1), ("a", 1), ("a", 2)]


async def test_a_failed_operation_uses_up_its_seq_id(bench: Bench) -> None:
    await bench.create("a")
    failed = await bench.step("a", 1, error=InvalidRequest("learning_rate: -1"))
    after = await bench.step("a", 2)
    with pytest.raises(InvalidRequest, match="learning_rate"):
        await failed.wait()
    await after.wait()


async def test_an_unexpected_error_fails_the_operation_and_not_the_service(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.create("a")
    failed = await bench.step("a", 1, error=ZeroDivisionError("secret"))
    with pytest.raises(ServiceError, match="internal error") as caught:
        await failed.wait()
    assert "secret" not in str(caught.value)
    assert "ZeroDivisionError: secret" in caplog.text
    await (await bench.step("a", 2)).wait()


async def test_a_repeat_runs_once_and_gets_the_first_answer(bench: Bench) -> None:
    await bench.create("a")
    first = await bench.hold("a", 1)
    again = await bench.batch("a", 1)
    assert again is first
    bench.engine.gate.set()
    answer = await first.wait()
    await asyncio.gather(*bench.scheduler.tasks)  # until the result is in the journal only
    stored = await bench.batch("a", 1)
    assert stored is not first
    assert await stored.wait() == answer
    assert bench.engine.calls == [[("a", "a1")]]


async def test_another_body_under_the_same_seq_id_is_refused_running_and_finished(bench: Bench) -> None:
    await bench.create("a")
    first = await bench.hold("a", 1)
    with pytest.raises(SequenceConflict, match="seq_id 1"):
        await bench.batch("a", 1, "other")
    bench.engine.gate.set()
    await first.wait()
    await asyncio.gather(*bench.scheduler.tasks)
    with pytest.raises(SequenceConflict, match="seq_id 1"):
        await bench.step("a", 1)


async def test_simultaneous_repeats_are_one_operation(bench: Bench) -> None:
    operations = await asyncio.gather(*(bench.step("a", 0) for _ in range(5)))
    await asyncio.gather(*(operation.wait() for operation in operations))
    assert bench.ran == [("a", 0)]


async def test_ready_batches_of_several_models_and_consecutive_ones_of_one_share_a_micro_batch(bench: Bench) -> None:
    await bench.create("a", "b", "c")
    first = await bench.hold("a", 1)  # runs at once, alone
    rest = [await bench.batch(model_id, seq_id) for model_id, seq_id in (("a", 2), ("a", 3), ("b", 1), ("c", 1))]
    bench.engine.gate.set()
    await asyncio.gather(*(operation.wait() for operation in (first, *rest)))
    assert bench.engine.calls[0] == [("a", "a1")]
    assert sorted(bench.engine.calls[1]) == [("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1")]


async def test_a_large_batch_goes_datum_by_datum_and_a_short_one_is_in_the_very_next_micro_batch(bench: Bench) -> None:
    await bench.create("a", "b")
    large = await bench.hold("a", 1, lengths=[30] * 8)
    short = await bench.batch("b", 1, lengths=[10, 20, 10])
    bench.engine.gate.set()
    await short.wait()
    await large.wait()
    assert bench.engine.sizes == [{"a1": 3}, {"b1": 3, "a1": 2}, {"a1": 3}]


async def test_a_datum_above_the_budget_goes_alone_and_the_budget_may_fall(bench: Bench) -> None:
    await bench.create("a")
    operation = await bench.hold("a", 1, lengths=[40, 40, 500, 40, 40])
    bench.engine.token_budget = 50
    bench.engine.gate.set()
    await operation.wait()
    assert bench.engine.sizes == [{"a1": 2}, {"a1": 1}, {"a1": 1}, {"a1": 1}]


@pytest.mark.parametrize(
    ("models", "alone", "first", "most"),
    [("a", False, 2, 20), ("ab", False, 2, 2), ("ab", True, 100, 100)],
    ids=["lone", "shared", "deterministic"],
)
async def test_a_micro_batch_has_what_takes_2_s_or_beside_another_models_work_a_tenth_of_a_second(
    make_bench: MakeBench, models: str, alone: bool, first: int, most: int
) -> None:
    """At least 256 tokens, which the first one has, too. In a deterministic trainer nothing depends on what was
    measured."""
    bench = await make_bench(token_budget=10_000, alone=alone)
    await bench.create(*models)
    held = await bench.hold("a", 1, lengths=[100] * 100)
    await asyncio.sleep(0.2)  # the first micro-batch takes as long, or longer
    bench.engine.gate.set()
    await held.wait()
    num_datums = [size["a1"] for size in bench.engine.sizes]
    assert num_datums[0] == first
    if not alone:
        assert num_datums[1] == most if most == first else first < num_datums[1] <= most


async def test_a_step_sees_all_micro_batches_before_it_and_runs_before_those_of_others(bench: Bench) -> None:
    await bench.create("a", "b")
    other = await bench.hold("b", 1, lengths=[50] * 8)
    own = [await bench.batch("a", 1, lengths=[50] * 3), await bench.batch("a", 2), await bench.step("a", 3)]
    own.append(await bench.batch("a", 4))
    bench.engine.gate.set()
    await asyncio.gather(*(operation.wait() for operation in (other, *own)))
    last = max(n for n, names in enumerate(bench.engine.events) if {"a1", "a2"} & names)
    assert bench.engine.events[last + 1] == {"a 3"}
    assert [n for n, names in enumerate(bench.engine.events) if "a4" in names] == [last + 2]


async def test_pipelined_steps_run_back_to_back_with_nothing_in_between(bench: Bench) -> None:
    await bench.create("a")
    operations = [await bench.batch("a", n) if n % 2 else await bench.step("a", n) for n in range(1, 41)]
    await asyncio.gather(*(operation.wait() for operation in operations))
    assert bench.engine.events == [{f"a{n}" if n % 2 else f"a {n}"} for n in range(1, 41)]


async def test_a_pipelined_step_follows_its_batch_without_the_event_loop(bench: Bench) -> None:
    await bench.create("a")
    operations = [await bench.hold("a", 1)]
    operations += [await bench.batch("a", n) if n % 2 else await bench.step("a", n) for n in range(2, 21)]
    await asyncio.sleep(0.01)  # the coroutines of the steps have asked for their places
    bench.engine.gate.set()
    deadline = time.monotonic() + 5
    while len(bench.engine.events) < 20 and time.monotonic() < deadline:
        time.sleep(0.001)  # the event loop does nothing  # noqa: ASYNC251
    assert len(bench.engine.events) == 20
    await asyncio.gather(*(operation.wait() for operation in operations))


async def test_steps_and_micro_batches_of_different_models_take_turns(bench: Bench) -> None:
    """A model that only steps holds up nobody's batch, and a step waits for one micro-batch at most."""
    await bench.create("a", "b")
    operations = [await bench.hold("b", 1, lengths=[100] * 5)]
    operations += [await bench.step("a", n) for n in range(1, 9)]
    await asyncio.sleep(0.01)
    bench.engine.gate.set()
    await asyncio.gather(*(operation.wait() for operation in operations))
    batch, steps = {"b1"}, iter([{f"a {n}"} for n in range(1, 9)])
    assert bench.engine.events[:9] == [batch, *(event for _ in range(4) for event in (next(steps), batch))]
    assert bench.engine.events[9:] == list(steps)


async def test_gradients_and_forward_only_go_apart_and_neither_waits_for_all_of_the_other(bench: Bench) -> None:
    await bench.create("a", "b")
    operations = [
        await bench.hold("a", 1, lengths=[25] * 16),
        await bench.batch("b", 1, lengths=[25] * 16, forward_only=True),
        await bench.batch("a", 2, forward_only=True),  # behind gradients of its own, for which it does not wait
        await bench.batch("a", 3),
    ]
    bench.engine.gate.set()
    await asyncio.gather(*(operation.wait() for operation in operations))
    kinds = ["b" if "b1" in names else "a" for names in bench.engine.events[:6]]
    assert kinds == ["a", "b", "a", "b", "a", "b"]


async def test_hundreds_of_operations_behind_a_gap_start_when_it_closes(make_bench: MakeBench) -> None:
    bench = await make_bench(max_queued_operations=500)
    await bench.create("a")
    operations = await asyncio.gather(*(bench.batch("a", n, num_tokens=1) for n in range(2, 501)))
    await bench.batch("a", 1)
    await asyncio.gather(*(operation.wait() for operation in operations))
    assert bench.queue_length() == 0


async def test_a_batch_that_fails_in_the_middle_is_over_and_its_neighbours_go_on(bench: Bench) -> None:
    await bench.create("a", "b")
    bad, good = await bench.hold("a", 1, "bad", lengths=[50] * 9), await bench.batch("b", 1, lengths=[50] * 3)
    bench.engine.gate.set()
    with pytest.raises(InvalidRequest, match="not finite"):
        await bad.wait()
    await good.wait()
    assert sum(sizes.get("bad", 0) for sizes in bench.engine.sizes) == 2
    assert (bench.engine.num_begun, bench.engine.num_finished) == (2, 2)
    assert bench.engine.tainted == [("a", "not finite")]
    await (await bench.batch("a", 2)).wait()


async def test_a_batch_that_the_engine_refuses_fails_and_taints_its_model(bench: Bench) -> None:
    await bench.create("a")
    for seq_id, forward_only in ((1, True), (2, False)):
        with pytest.raises(InvalidRequest, match="never fits"):
            await (await bench.batch("a", seq_id, "refused", forward_only=forward_only)).wait()
    assert bench.engine.tainted == [("a", "never fits")]
    await (await bench.step("a", 3)).wait()


async def test_a_step_waits_for_the_batches_before_it_and_none_after(bench: Bench) -> None:
    await bench.create("a")
    operations = [await bench.hold("a", 1), await bench.batch("a", 2), await bench.step("a", 3)]
    operations.append(await bench.batch("a", 4))
    bench.engine.gate.set()
    await asyncio.gather(*(operation.wait() for operation in operations))
    assert bench.engine.events == [{"a1"}, {"a2"}, {"a 3"}, {"a4"}]


async def test_a_failed_batch_taints_its_model_and_spares_its_neighbours(bench: Bench) -> None:
    await bench.create("a", "b", "c")
    await bench.hold("a", 1)
    bad, good = await bench.batch("b", 1, "bad"), await bench.batch("c", 1)
    harmless = await bench.batch("a", 2, "bad", forward_only=True)
    bench.engine.gate.set()
    with pytest.raises(InvalidRequest, match="not finite"):
        await bad.wait()
    with pytest.raises(InvalidRequest, match="not finite"):
        await harmless.wait()
    assert (await good.wait()).forward_backward.metrics == {"c1": 1.0}
    assert bench.engine.tainted == [("b", "not finite")]


async def test_an_engine_that_raises_fails_the_call_and_taints_its_models(bench: Bench) -> None:
    await bench.create("a")
    with pytest.raises(ServiceError, match="internal error"):
        await (await bench.batch("a", 1, "explode")).wait()
    assert bench.engine.tainted[0][0] == "a"
    await (await bench.batch("a", 2)).wait()


async def test_the_work_after_a_turn_does_not_hold_up_the_model(bench: Bench) -> None:
    await bench.create("a")
    written = asyncio.Event()

    async def save(turn: Turn) -> Answer:
        await turn.run(lambda: bench.ran.append(("a", 1)))
        await written.wait()
        return Answer(save_checkpoint=pb.SaveCheckpointResponse(num_samplers=7))

    saving = await bench.accept("a", 1, "save_checkpoint", save)
    await (await bench.step("a", 2)).wait()
    assert not saving.outcome.done()
    written.set()
    assert (await saving.wait()).save_checkpoint.num_samplers == 7


async def test_a_turn_waits_until_the_results_are_in_the_journal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.create("a")
    finish, may_finish = bench.journal.finish, {seq_id: asyncio.Event() for seq_id in (1, 2)}
    turns: list[Turn] = []

    async def held(model_id: str, seq_id: int, *outcome: Any, **options: Any) -> None:
        await may_finish[seq_id].wait()
        await finish(model_id, seq_id, *outcome, **options)

    async def save(turn: Turn) -> Answer:
        turns.append(turn)
        await turn.run(lambda: None)
        return Answer()

    monkeypatch.setattr(bench.journal, "finish", held)
    for operation in [await bench.accept("a", seq_id, "save_checkpoint", save) for seq_id in (1, 2)]:
        await operation.wait()
    earlier, all_of_it = asyncio.create_task(turns[1].earlier_stored()), asyncio.create_task(turns[1].stored())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not earlier.done()
    may_finish[1].set()
    await earlier
    for _ in range(10):
        await asyncio.sleep(0)
    assert not all_of_it.done()
    may_finish[2].set()
    await all_of_it
    assert [entry.state for entry in await bench.journal.history("a")] == [EntryState.DONE] * 3


async def test_an_operation_can_wait_for_the_results_before_it(bench: Bench) -> None:
    await bench.create("a")
    written = asyncio.Event()
    events: list[str] = []

    async def save(turn: Turn) -> Answer:
        await turn.run(lambda: None)
        await written.wait()
        events.append("written")
        return Answer()

    async def load(turn: Turn) -> Answer:
        await turn.settled()
        events.append("read")
        await turn.run(lambda: None)
        return Answer()

    await bench.accept("a", 1, "save_checkpoint", save)
    loading = await bench.accept("a", 2, "load_checkpoint", load)
    written.set()
    await loading.wait()
    assert events == ["written", "read"]


async def test_a_cancelled_wait_does_not_cancel_the_operation(bench: Bench) -> None:
    await bench.create("a")
    operation = await bench.hold("a", 1)
    waiting = asyncio.create_task(operation.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    bench.engine.gate.set()
    assert (await operation.wait()).HasField("forward_backward")
    assert (await (await bench.scheduler.find("a", 1)).wait()).HasField("forward_backward")


async def test_a_full_queue_refuses_before_the_journal(make_bench: MakeBench) -> None:
    bench = await make_bench(max_queued_operations=3)
    await bench.create("a")
    for seq_id in (4, 3, 2):
        await bench.step("a", seq_id)
    with pytest.raises(OutOfCapacity, match="max_queued_operations"):
        await bench.step("a", 5)
    assert await bench.journal.find("a", 5) is None


async def test_a_full_queue_still_takes_what_closes_a_gap(make_bench: MakeBench) -> None:
    bench = await make_bench(max_queued_operations=3)
    await bench.create("a")
    waiting = [await bench.step("a", seq_id) for seq_id in (2, 4, 3)]
    with pytest.raises(OutOfCapacity):
        await bench.step("a", 5)
    waiting += [await bench.step("a", 1)]
    await asyncio.gather(*(operation.wait() for operation in waiting))
    assert [seq_id for _, seq_id in bench.ran] == [1, 2, 3, 4]
    await (await bench.step("a", 5)).wait()


async def test_a_seq_id_further_ahead_than_the_queue_is_long_is_refused_and_leaves_nothing(
    make_bench: MakeBench,
) -> None:
    bench = await make_bench(max_queued_operations=3)
    await bench.create("a")
    await (await bench.step("a", 1)).wait()
    for seq_id in (6, 2_000_000_000):
        with pytest.raises(InvalidRequest) as refused:
            await bench.step("a", seq_id)
        assert f"seq_id: {seq_id} is {seq_id - 2} ahead of the next one, 2" in refused.value.message
        assert "max_queued_operations (3)" in refused.value.message
        assert refused.value.metadata["field"] == "seq_id"
        assert await bench.journal.find("a", seq_id) is None
    waiting = [await bench.step("a", seq_id) for seq_id in (5, 4, 3)]
    with pytest.raises(InvalidRequest, match="seq_id: 2000000000 is"):  # also while the queue is full
        await bench.step("a", 2_000_000_000)
    waiting.append(await bench.step("a", 2))
    await asyncio.gather(*(operation.wait() for operation in waiting))
    assert [seq_id for _, seq_id in bench.ran] == [1, 2, 3, 4, 5]


async def test_how_far_ahead_a_seq_id_is_counts_from_what_had_run_before_a_restart(make_bench: MakeBench) -> None:
    bench = await make_bench(max_queued_operations=3)
    await bench.create("a")
    for seq_id in range(1, 8):
        await (await bench.step("a", seq_id)).wait()
    bench = await restarted(bench, make_bench, max_queued_operations=3)
    reading = asyncio.Event()

    async def work_of(entry: Entry) -> Work:
        await reading.wait()
        return nothing

    history = await bench.journal.history("a")
    bench.scheduler.replay.begin("a", history, start=0, found=nothing, work_of=work_of, forget=not_called)
    ahead = await bench.step("a", 11)
    with pytest.raises(InvalidRequest, match="seq_id: 12 is 4 ahead of the next one, 8"):
        await bench.step("a", 12)
    reading.set()
    await asyncio.gather(*[(await bench.step("a", seq_id)).wait() for seq_id in (8, 9, 10)], ahead.wait())


async def test_too_many_models_are_refused(make_bench: MakeBench) -> None:
    bench = await make_bench(max_models=1)
    await bench.create("a")
    with pytest.raises(OutOfCapacity, match="max_models"):
        await bench.step("b", 0)


async def test_unknown_models_and_results_are_named_and_not_journalled(bench: Bench) -> None:
    with pytest.raises(ModelNotFound, match="'ghost'"):
        await bench.step("ghost", 1)
    assert await bench.journal.find("ghost", 1) is None
    await bench.create("a")
    with pytest.raises(ResultNotFound, match="seq_id 9"):
        await bench.scheduler.find("a", 9)


async def test_a_failed_creation_leaves_no_model_but_its_error(bench: Bench) -> None:
    creation = await bench.step("a", 0, error=InvalidRequest("rank: 0"))
    with pytest.raises(InvalidRequest):
        await creation.wait()
    await asyncio.gather(*bench.scheduler.tasks)
    with pytest.raises(ModelNotFound):
        await bench.step("a", 1)
    with pytest.raises(InvalidRequest, match="rank"):
        await (await bench.step("a", 0)).wait()


async def test_deleting_a_model_fails_what_is_queued_and_forgets_it(bench: Bench) -> None:
    await bench.create("a")
    running, queued = await bench.hold("a", 1), await bench.step("a", 2)
    early = await bench.batch("a", 7)
    freed: list[str] = []
    deleting = asyncio.create_task(bench.scheduler.delete("a", lambda: freed.append("a")))
    with pytest.raises(ModelNotFound, match="deleted"):
        await queued.wait()
    with pytest.raises(ModelNotFound, match="deleted"):
        await early.wait()
    bench.engine.gate.set()
    await running.wait()
    await deleting
    assert freed == ["a"]
    assert bench.ran == []
    assert bench.queue_length() == 0
    with pytest.raises(ResultNotFound):
        await bench.scheduler.find("a", 1)
    await bench.create("a")


async def test_deleting_a_model_stops_its_batch_at_the_next_micro_batch(bench: Bench) -> None:
    await bench.create("a", "b")
    begun = await bench.hold("a", 1, lengths=[100] * 9)
    through = await bench.batch("b", 1, lengths=[10])
    deleting = asyncio.create_task(bench.scheduler.delete("a", lambda: bench.ran.append(("a", -1))))
    await asyncio.sleep(0.01)
    assert not begun.outcome.done()  # the engine still has it
    bench.engine.gate.set()
    with pytest.raises(ModelNotFound, match="deleted"):
        await begun.wait()
    await deleting
    await through.wait()
    assert bench.engine.sizes == [{"a1": 1}, {"b1": 1}]
    assert bench.engine.num_begun == bench.engine.num_finished
    assert bench.ran == [("a", -1)]
    assert bench.queue_length() == 0


async def test_deleting_a_model_ends_a_batch_that_waits_between_two_micro_batches(bench: Bench) -> None:
    await bench.create("a", "b")
    begun, other = await bench.hold("a", 1, lengths=[100] * 2), await bench.batch("b", 1, lengths=[90] * 2)
    bench.engine.step()
    deleting = asyncio.create_task(bench.scheduler.delete("a", lambda: None))  # while one of b runs
    await asyncio.sleep(0.01)
    bench.engine.gate.set()
    with pytest.raises(ModelNotFound, match="deleted"):
        await begun.wait()
    await deleting
    await other.wait()
    assert bench.engine.sizes == [{"a1": 1}, {"b1": 1}, {"b1": 1}]
    assert (bench.engine.num_begun, bench.engine.num_finished) == (2, 2)


async def test_closing_stops_a_batch_at_the_next_micro_batch_and_leaves_it_accepted(bench: Bench) -> None:
    await bench.create("a")
    begun = await bench.hold("a", 1, lengths=[100] * 9)
    closing = asyncio.create_task(bench.scheduler.close(timeout_s=5))
    await asyncio.sleep(0.01)
    bench.engine.gate.set()
    assert await closing
    assert bench.engine.sizes == [{"a1": 1}]
    assert not begun.outcome.done()
    record = await bench.journal.find("a", 1)
    assert record is not None
    assert record.outcome is None


async def test_closing_waits_no_longer_than_it_may(bench: Bench) -> None:
    await bench.create("a")
    await bench.hold("a", 1)
    assert not await bench.scheduler.close(timeout_s=0.05)


async def nothing(turn: Turn) -> Answer:
    return Answer()


async def test_a_restored_model_replays_what_had_run_and_what_waits_behind_a_gap_goes_on_waiting(
    make_bench: MakeBench,
) -> None:
    bench = await make_bench()
    await bench.create("a")
    answer = await (await bench.step("a", 1)).wait()
    await bench.step("a", 3)  # waits for 2
    bench = await restarted(bench, make_bench)
    replayed: list[int] = []

    async def work_of(entry: Entry) -> Work:
        async def work(turn: Turn) -> Answer:
            await turn.run(lambda: replayed.append(entry.seq_id))
            return Answer(optim_step=pb.OptimStepResponse(metrics={"again": 1.0}))

        return work

    history = await bench.journal.history("a")
    bench.scheduler.replay.begin("a", history, start=0, found=nothing, work_of=work_of, forget=not_called)
    waiting = await bench.scheduler.find("a", 3)
    assert await (await bench.scheduler.find("a", 1)).wait() == answer, "it keeps its answer"
    assert await (await bench.step("a", 1)).wait() == answer
    await bench.scheduler.check_held("a")
    assert (replayed, bench.scheduler.models["a"].next_seq_id) == ([1], 2)
    with pytest.raises(SequenceConflict):
        await bench.step("a", 3, text="another")
    assert await bench.step("a", 3) is waiting
    await (await bench.step("a", 2)).wait()
    assert (await waiting.wait()).optim_step.metrics == {"again": 1.0}
    await waiting.stored.wait()
    assert (await bench.journal.history("a"))[3].state == EntryState.DONE


async def test_a_model_whose_replay_fails_is_given_up_and_stays_in_the_journal_for_another_try(
    make_bench: MakeBench,
) -> None:
    bench = await make_bench()
    await bench.create("a", "b")
    answer = await (await bench.step("a", 1)).wait()
    await bench.step("a", 3)  # waits for 2
    bench = await restarted(bench, make_bench)
    forgotten = asyncio.Event()

    async def fails(entry: Entry) -> Work:
        async def work(turn: Turn) -> Answer:
            raise InvalidRequest("boom")

        return work

    async def forget() -> None:
        forgotten.set()

    before = await bench.journal.history("a")
    bench.scheduler.replay.begin("a", before, start=0, found=nothing, work_of=fails, forget=forget)
    waiting = await bench.scheduler.find("a", 3)
    with pytest.raises(ModelLost, match=r"optim_step, seq_id 1, fails when it runs again: boom; resume from"):
        await waiting.wait()
    await forgotten.wait()
    assert await (await bench.scheduler.find("a", 1)).wait() == answer
    with pytest.raises(ModelLost, match="boom"):
        await bench.scheduler.find("a", 3)
    with pytest.raises(ModelLost, match="boom"):
        await bench.step("a", 4)
    with pytest.raises(ModelLost, match="boom"):
        await bench.scheduler.check_held("a")
    assert await bench.journal.history("a") == before
    await bench.scheduler.delete("a", lambda: None)
    with pytest.raises(ModelNotFound):
        await bench.step("a", 4)


async def restarted(bench: Bench, make_bench: MakeBench, **settings: int) -> Bench:
    assert await bench.scheduler.close(timeout_s=5)
    await asyncio.to_thread(bench.journal.close)
    return await make_bench(**settings)


async def not_called() -> None:
    raise AssertionError


async def test_closing_leaves_queued_operations_accepted_and_waits_for_the_running_one(bench: Bench) -> None:
    await bench.create("a")
    running, queued = await bench.hold("a", 1), await bench.step("a", 2)
    closing = asyncio.create_task(bench.scheduler.close(timeout_s=5))
    await asyncio.sleep(0)
    bench.engine.gate.set()
    assert await closing
    assert running.outcome.done()
    assert not queued.outcome.done()
    finished, accepted = await bench.journal.find("a", 1), await bench.journal.find("a", 2)
    assert finished is not None
    assert finished.outcome is not None
    assert accepted is not None
    assert accepted.outcome is None


async def test_the_time_of_a_models_loss_is_charged_to_that_model(bench: Bench) -> None:
    """A micro-batch takes about a millisecond here, and each costly datum holds up everybody for 50 ms."""
    await bench.create("a", "b")
    costly = await bench.hold("a", 1, "costly", lengths=[100] * 20)
    cheap = await bench.batch("b", 1, "cheap", lengths=[100] * 200)
    bench.engine.gate.set()
    await cheap.wait()
    assert sum("costly" in sizes for sizes in bench.engine.sizes) <= 10  # by tokens it would be through
    await costly.wait()


async def test_datums_whose_losses_will_take_long_do_not_share_a_micro_batch(bench: Bench) -> None:
    """Otherwise everybody else would wait for all of them, ten seconds at most, before the first is charged."""
    await bench.create("a", "b")
    await (await bench.batch("b", 1, lengths=[100] * 3)).wait()  # so the speed is known
    await (await bench.batch("a", 1, "slow", lengths=[5] * 10, loss_s=60.0)).wait()
    assert [sizes["slow"] for sizes in bench.engine.sizes if "slow" in sizes] == [1] * 10
    await (await bench.batch("a", 2, "fast", lengths=[5] * 10, loss_s=1e-9)).wait()
    assert [sizes["fast"] for sizes in bench.engine.sizes if "fast" in sizes] == [10]


async def test_a_score_of_a_canary_uses_the_threads_that_its_tokens_need_and_other_calls_all_that_are_free(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    make_page(tmp_path / "cores", cores=8, shares=[4, 4])
    cores = Cores(f"{tmp_path / 'cores'}:0", most=0, set_threads=lambda _: None)
    scheduler = (await make_bench(cores=cores)).scheduler
    threads = [await scheduler.compute.run_alone(lambda: cores.threads, canary_tokens=tokens) for tokens in (2, 100)]
    assert (threads, await scheduler.compute.run_alone(lambda: cores.threads)) == ([2, 4], 8)


async def test_a_call_that_is_cancelled_while_its_operation_is_appended_leaves_it_to_the_others(bench: Bench) -> None:
    await bench.create("a")
    first = asyncio.create_task(bench.step("a", 1))
    await asyncio.sleep(0)
    second = asyncio.create_task(bench.step("a", 1))
    await asyncio.sleep(0)
    assert not second.done()
    second.cancel()
    await asyncio.wait([second])
    assert (await (await first).wait()).HasField("optim_step")


async def test_a_model_can_be_parked_as_soon_as_its_last_answer_is_stored(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shelf:
        async def put_away(self, model_id: str, seq_id: int) -> None:
            pass

        async def bring_back(self, model_id: str) -> None:
            raise AssertionError

    monkeypatch.setattr("trainer_service.scheduling.parking._PATIENCE_S", 600.0)
    bench = await make_bench(max_models=1)
    parking = bench.scheduler.parking
    parking.shelf = Shelf()
    await bench.create("a")
    await bench.hold("a", 1)

    async def take_place() -> None:
        async with parking.place():
            assert bench.registry.get_sample_value("trainer_parked_models") == 1

    waiting = asyncio.create_task(take_place())
    await asyncio.sleep(0)  # no place is free
    assert not waiting.done()
    bench.engine.gate.set()
    async with asyncio.timeout(60):
        await waiting


async def test_closing_reads_no_further_operation_of_a_model_that_is_restored(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.create("a")
    for seq_id in (1, 2):
        await (await bench.step("a", seq_id)).wait()
    bench = await restarted(bench, make_bench)
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def work_of(entry: Entry) -> Work:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return nothing

    history = await bench.journal.history("a")
    bench.scheduler.replay.begin("a", history, start=0, found=nothing, work_of=work_of, forget=not_called)
    await begun.wait()
    assert await bench.scheduler.close(timeout_s=5)
    async with asyncio.timeout(60):
        await cancelled.wait()


async def test_a_deleted_models_operations_are_no_suspects_any_more(make_bench: MakeBench, tmp_path: Path) -> None:
    Executing(tmp_path).begin([("a", 1)])  # and the process dies
    bench = await make_bench()
    await bench.create("a")
    assert bench.scheduler.executing.is_suspect("a", 1)
    await bench.scheduler.delete("a", lambda: None)
    assert not bench.scheduler.executing.is_suspect("a", 1)


async def test_a_failed_creation_takes_no_place(make_bench: MakeBench) -> None:
    bench = await make_bench(max_models=1)
    creation = await bench.step("a", 0, error=InvalidRequest("rank: 0"))
    with pytest.raises(InvalidRequest, match="rank: 0"):
        await creation.wait()
    await creation.stored.wait()
    await bench.create("b")


async def test_closing_gives_up_an_answer_that_cannot_be_stored(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*arguments: object, **options: object) -> None:
        raise OutOfCapacity("the disk is full")

    monkeypatch.setattr("trainer_service.scheduling.answer_store._STORE_AGAIN_S", 0.01)
    monkeypatch.setattr("trainer_service.scheduling.answer_store._LONGEST_PAUSE_S", 0.01)
    await bench.create("a")
    monkeypatch.setattr(bench.journal, "finish", full)
    await (await bench.step("a", 1)).wait()
    assert await bench.scheduler.close(timeout_s=60)
