"""The scheduler's description of the reason for which an operation waits."""

import asyncio

import pytest

from tests.unit.trainer_service.scheduling import Bench, MakeBench, fake_batch
from tinsmith.errors import ResultNotFound
from trainer_service.operation import Answer, Operation, Turn
from trainer_service.scheduling.compute import Backlog
from trainer_service.scheduling.model_queue import ModelQueue
from trainer_service.scheduling.queue_status import Queue, status_of
from trainer_service.scheduling.speed import Speed


async def test_works_ahead_are_counted_with_their_tokens_as_the_models_share_the_thread(make_bench: MakeBench) -> None:
    bench = await make_bench(token_budget=20)
    await bench.create("a", "b")
    await bench.hold("a", 1, num_tokens=10)
    for model_id, seq_id, num_tokens in (("a", 2, 20), ("a", 3, 30), ("b", 1, 100), ("b", 2, 200)):
        await bench.batch(model_id, seq_id, num_tokens=num_tokens)
    await bench.step("a", 4)
    await asyncio.sleep(0.01)
    running = await bench.scheduler.describe("a", 1)
    assert (running.running, running.position, running.reason) == (True, 0, "is being computed")
    # While a gets the 20 tokens of its second, b gets 20 of its first.
    second = await bench.scheduler.describe("a", 2)
    assert (second.position, second.tokens_ahead) == (2, 10 + 20)
    third = await bench.scheduler.describe("a", 3)
    assert (third.position, third.tokens_ahead) == (3, 10 + 20 + 50)
    # a has no more than 50 in front of its step, whatever b has.
    assert (await bench.scheduler.describe("b", 1)).tokens_ahead == 10 + 50
    assert (await bench.scheduler.describe("b", 2)).tokens_ahead == 10 + 50 + 100
    step = await bench.scheduler.describe("a", 4)
    assert (step.running, step.position, step.tokens_ahead) == (False, 4, 10 + 20 + 30 + 50)
    assert step.reason == "waits for its turn: 4 operations with 110 tokens are before it or beside it"


async def test_a_batch_that_is_through_in_part_is_being_computed_and_what_is_left_of_it_counts(bench: Bench) -> None:
    await bench.create("a")
    await (await bench.batch("a", 1, lengths=[100] * 2)).wait()  # which measures the speed
    await bench.hold("a", 2, lengths=[100] * 4)
    await bench.batch("a", 3, num_tokens=10)
    first = await bench.scheduler.describe("a", 3)
    bench.engine.step()
    bench.engine.step()
    status = await bench.scheduler.describe("a", 2)
    assert (status.running, status.position, status.reason) == (True, 0, "is being computed")
    later = await bench.scheduler.describe("a", 3)
    assert (first.position, first.tokens_ahead) == (1, 400)
    assert (later.position, later.tokens_ahead) == (1, 200)


async def test_the_time_is_expected_from_the_measured_speed_and_from_what_others_have(bench: Bench) -> None:
    await bench.create("a", "b")  # which measures what other operations take
    await bench.hold("a", 1, num_tokens=10)
    second = await bench.batch("a", 2, num_tokens=1000)
    assert (await bench.scheduler.describe("a", 2)).expected_s is None
    await asyncio.sleep(0.05)
    bench.engine.gate.set()
    await second.wait()
    await bench.hold("a", 3, num_tokens=10)
    await bench.batch("a", 4, num_tokens=40)
    await bench.batch("a", 5, num_tokens=4000)
    soon, late = [(await bench.scheduler.describe("a", seq_id)).expected_s for seq_id in (4, 5)]
    assert 0 <= soon < late
    await bench.batch("b", 1, lengths=[10] * 2000)
    shared = (await bench.scheduler.describe("a", 5)).expected_s
    assert 1.5 * late < shared < 2.5 * late


async def test_the_time_of_all_waiting_work_is_expected_from_the_measured_speed(bench: Bench) -> None:
    assert bench.scheduler.queued_s() == 0
    await bench.create("a", "b")
    assert bench.scheduler.models.num_known == 2
    await (await bench.batch("a", 1, lengths=[100] * 2)).wait()  # which measures the speed
    await bench.hold("a", 2, lengths=[100] * 4)
    await bench.batch("b", 1, num_tokens=10)
    few = bench.scheduler.queued_s()
    assert bench.registry.get_sample_value("trainer_queued_tokens") == 410
    await bench.batch("b", 2, num_tokens=4000)
    assert 0 < 2 * few < bench.scheduler.queued_s()
    assert bench.registry.get_sample_value("trainer_queued_tokens") == 4410
    assert bench.registry.get_sample_value("trainer_queued_seconds") == bench.scheduler.queued_s()


def test_speed_weighs_calls_by_their_tokens() -> None:
    speed = Speed()
    assert speed.seconds(num_tokens=0, num_calls=0) == 0
    assert speed.seconds(num_tokens=1, num_calls=0) is None
    speed.observe(1.0, num_tokens=1000)
    assert speed.seconds(num_tokens=500, num_calls=0) == pytest.approx(0.5)
    assert speed.seconds(num_tokens=500, num_calls=1) is None
    speed.observe(0.1, num_tokens=0)
    assert speed.seconds(num_tokens=500, num_calls=2) == pytest.approx(0.7)
    for _ in range(100):  # it follows a change
        speed.observe(2.0, num_tokens=1000)
    assert speed.seconds(num_tokens=500, num_calls=0) == pytest.approx(1.0, rel=1e-3)


async def test_a_number_that_has_not_arrived_is_named(bench: Bench) -> None:
    await bench.create("a")
    for seq_id in (1, 2, 5, 9):
        await bench.step("a", seq_id)
    assert (await bench.scheduler.describe("a", 5)).reason == "waits for seq_id 3 of this model, which has not arrived"
    status = await bench.scheduler.describe("a", 9)
    assert status.reason == "waits for seq_id 3 of this model, which has not arrived"
    assert status.expected_s is None


async def test_a_save_that_is_being_written_and_what_waits_for_it_say_so(bench: Bench) -> None:
    await bench.create("a")
    captured, written = asyncio.Event(), asyncio.Event()

    async def save(turn: Turn) -> Answer:
        await turn.run(lambda: None)
        captured.set()
        await written.wait()
        return Answer()

    async def load(turn: Turn) -> Answer:
        await turn.settled()
        await turn.run(lambda: None)
        return Answer()

    saving = await bench.accept("a", 1, "save_checkpoint", save)
    loading = await bench.accept("a", 2, "load_checkpoint", load)
    after = await bench.step("a", 3)
    await captured.wait()
    status = await bench.scheduler.describe("a", 1)
    assert (status.running, status.position, status.reason) == (False, 0, "the checkpoint is being written")
    assert (await bench.scheduler.describe("a", 2)).reason == "the checkpoint is being read"
    assert (await bench.scheduler.describe("a", 3)).position == 1
    written.set()
    for operation in (saving, loading, after):
        await operation.wait()
    assert (await bench.scheduler.describe("a", 1)).reason == "has finished"


async def test_an_operation_knows_when_it_was_computed(bench: Bench) -> None:
    await bench.create("a")
    operations = [await bench.batch("a", 1), await bench.step("a", 2)]
    early = await bench.accept("a", 4, "forward_backward", fake_batch("early"))
    for operation in operations:
        await operation.wait()
    assert early.ran is None
    (start_1, end_1), (start_2, end_2) = [operation.ran or (0.0, 0.0) for operation in operations]
    assert 0 < start_1 <= end_1 <= start_2 <= end_2


async def test_sums_over_many_operations_serve_for_many_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536 operations of 64 models: each of the questions that clients ask about each of them took 0.1 s of the event
    loop."""
    clock = [0.0]

    def now() -> float:
        clock[0] += 0.001
        return clock[0]

    monkeypatch.setattr("trainer_service.scheduling.queue_status.time.perf_counter", now)
    loop, num_asked = asyncio.get_running_loop(), 0
    lanes = {
        model_id: [
            Operation(model_id, n, "optim_step", b"", accepted=loop.create_future(), outcome=loop.create_future())
            for n in range(600)
        ]
        for model_id in ("a", "b")
    }

    def backlog() -> Backlog:
        nonlocal num_asked
        num_asked += 1
        return Backlog(None, {model_id: lane[:] for model_id, lane in lanes.items()})

    queue, model, speed = Queue(backlog), ModelQueue("a", next_to_enter=600), Speed()

    def positions() -> list[int]:
        return [
            status_of(operation, model, lanes=queue.lanes(), running=None, speed=speed).position
            for operation in lanes["a"]
        ]

    assert positions() == [600 + n for n in range(600)]
    assert num_asked <= 600 // 20 + 2
    late = Operation("a", 600, "optim_step", b"", accepted=loop.create_future(), outcome=loop.create_future())
    lanes["a"].append(late)
    model.next_to_enter = 601
    assert status_of(late, model, lanes=queue.lanes(), running=None, speed=speed).position == 1200
    lanes["a"][0].is_computed = True
    computed = status_of(lanes["a"][0], model, lanes=queue.lanes(), running=None, speed=speed)
    assert (computed.running, computed.reason) == (False, "its result is being stored"), (
        "also while older sums are kept"
    )
    lanes["b"].clear()
    del lanes["a"][300:]
    clock[0] += 1
    assert positions() == list(range(300))
    num_asked = 0
    positions()
    assert num_asked == 300, "few operations are added up anew each time"


async def test_an_operation_that_was_never_accepted_is_not_found(bench: Bench) -> None:
    await bench.create("a")
    for model_id, seq_id in (("a", 1), ("ghost", 0)):
        with pytest.raises(ResultNotFound, match=f"{model_id}: no operation with seq_id {seq_id}"):
            await bench.scheduler.describe(model_id, seq_id)
