"""An error that no operation causes ends the trainer: nothing is journalled as failed, and a restart runs it again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.trainer_service.engines import batch, create
from tests.unit.trainer_service.scheduling import Bench
from tinsmith.errors import NotReady, OutOfCapacity
from tinsmith.modeling.base_model import BaseModel
from trainer_service.durability.executing import Deaths, Executing
from trainer_service.durability.records import EntryState
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.passes import Passes
from trainer_service.operation import Operation
from trainer_service.scheduling import compute
from trainer_service.scheduling.compute import ComputeThread
from trainer_service.scheduling.execution import Execution
from trainer_service.scheduling.packing import Lanes
from trainer_service.scheduling.speed import Speed

FAULT = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


async def ends(bench: Bench, *operations: Operation) -> None:
    """The scheduler says that the engine is dead, and the journal has nothing but acceptances of these operations."""
    async with asyncio.timeout(5):
        await bench.scheduler.compute.engine_died.wait()
    assert not await bench.scheduler.close(timeout_s=5)
    for operation in operations:
        assert not operation.outcome.done()
        record = await bench.journal.find(operation.model_id, operation.seq_id)
        assert record is not None
        assert record.state == EntryState.ACCEPTED


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the loop itself is wrong")


@pytest.mark.parametrize("phase", ["_next", "_deliver", "_begin", "_run_call", "_run_micro_batch", "_end", "_measure"])
async def test_an_exception_in_any_phase_of_the_compute_threads_loop_ends_the_engine_and_fails_no_operation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    await bench.create("a", "b")
    held = await bench.hold("a", 1)
    step, batch = await bench.step("b", 1), await bench.batch("b", 2)
    monkeypatch.setattr(ComputeThread, phase, fails)
    bench.engine.gate.set()
    done_before = {"_run_call": (held,), "_run_micro_batch": (held, step)}.get(phase, ())
    await ends(bench, *(one for one in (held, step, batch) if one not in done_before))


@pytest.mark.parametrize("method", ["next", "end", "end_micro_batch"])
async def test_an_exception_of_the_lanes_ends_the_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    await bench.create("a")
    held = await bench.hold("a", 1)
    monkeypatch.setattr(Lanes, method, fails)
    bench.engine.gate.set()
    await ends(bench, held)


@pytest.mark.parametrize("method", ["put", "withdraw", "withhold"])
async def test_an_exception_of_the_lanes_on_the_event_loop_ends_the_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    await bench.create("a")
    held = await bench.hold("a", 1)
    waiting = [await bench.batch("a", 2), await bench.step("a", 3)]
    monkeypatch.setattr(Lanes, method, fails)
    match method:
        case "put":
            waiting.append(await bench.batch("a", 4))
        case _:
            getattr(bench.scheduler.compute, method)("a", NotReady("it leaves"))
    assert bench.scheduler.compute.engine_died.is_set()
    bench.engine.gate.set()
    assert not any(operation.outcome.done() for operation in (held, *waiting))


@pytest.mark.parametrize(("owner", "name"), [(Speed, "loss_tokens"), (Execution, "enter")])
async def test_a_batch_that_gets_no_place_on_the_compute_thread_ends_the_engine_and_does_not_fail(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Failed, it would let the model's next step run without its gradients; left alone, its model would wait for
    ever."""
    await bench.create("a")
    monkeypatch.setattr(owner, name, fails)
    batch = await bench.batch("a", 1, loss_s=0.1)
    monkeypatch.undo()
    await ends(bench, batch)


async def test_an_exception_before_the_compute_threads_loop_ends_the_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "yield_to_event_loops", fails)
    one = bench.scheduler
    thread = ComputeThread(bench.engine, one._metrics, one.executing, one.cores)
    async with asyncio.timeout(5):
        await thread.engine_died.wait()


@pytest.mark.parametrize("method", ["run", "finish"])
async def test_a_fault_of_the_device_in_a_batch_ends_the_engine_and_fails_no_operation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    await bench.create("a", "b")
    held = await bench.hold("a", 1)

    def faults(*_: Any) -> Any:
        raise FAULT

    monkeypatch.setattr(bench.engine, method, faults)
    second = await bench.batch("b", 1)
    bench.engine.gate.set()
    await ends(bench, *(() if method != "finish" else (held,)), second)


async def test_a_fault_of_the_device_in_a_step_ends_the_engine_and_fails_no_operation(bench: Bench) -> None:
    await bench.create("a")
    step = await bench.step("a", 1, fault=FAULT)
    await ends(bench, step)


@pytest.mark.parametrize("where", ["a coroutine", "an answer"])
async def test_a_fault_of_the_device_outside_the_compute_thread_ends_the_engine_and_counts_as_a_death(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    await (await bench.step("a", 0)).stored.wait()

    def faults(*_: Any) -> Any:
        raise FAULT

    if where == "a coroutine":
        operation = await bench.step("a", 1, error=FAULT)
    else:
        monkeypatch.setattr("trainer_service.scheduling.execution._answer", faults)
        operation = await bench.batch("a", 1)
    await ends(bench, operation)
    assert Executing(bench.journal.folder).deaths == {("a", 1): Deaths(executing=1)}


async def test_a_stop_iteration_fails_its_operation_like_any_other_error(bench: Bench) -> None:
    """A future takes no StopIteration, so the operation would wait for ever."""
    await bench.create("a", "b")
    step = await bench.step("a", 1, fault=StopIteration("next() of nothing"))
    other = await bench.step("b", 1)
    async with asyncio.timeout(5):
        assert "the trainer's log has the cause" in str(await asyncio.shield(step.outcome))
        assert not isinstance(await asyncio.shield(other.outcome), Exception)


async def test_a_fault_of_the_device_in_what_belongs_to_no_operation_ends_the_engine(bench: Bench) -> None:
    def faults() -> None:
        raise FAULT

    calling = asyncio.create_task(bench.scheduler.compute.run_alone(faults))
    await ends(bench)
    calling.cancel()


@pytest.mark.parametrize("result", ["a batch", "an answer"])
async def test_an_answer_that_cannot_be_made_fails_its_operation_instead_of_leaving_it_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, result: str
) -> None:
    await bench.create("a")
    monkeypatch.setattr("trainer_service.scheduling.execution._answer", fails)
    operation = await bench.batch("a", 1, num_tokens=10_000 if result == "a batch" else 10)
    async with asyncio.timeout(5):
        outcome = await asyncio.shield(operation.outcome)
    assert "the trainer's log has the cause" in str(outcome)


@pytest.mark.parametrize(
    ("error", "dead"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (OutOfCapacity("no room"), False),
    ],
)
def test_an_engine_is_dead_after_a_fault_of_its_device_and_not_for_lack_of_memory(
    base: BaseModel, error: Exception, dead: bool
) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=64)
    assert engine.passes.is_dead(error) == dead


@pytest.mark.parametrize("num_models", [1, 3])
def test_a_fault_of_the_device_leaves_a_pass_at_once_and_blames_no_batch(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch, num_models: int
) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=64)
    batches = []
    for n in range(num_models):
        create(engine, f"m{n}")
        batches.append(replace(batch(engine, [5, 6]), model_id=f"m{n}"))
    tried: list[int] = []

    def faults(*_: Any, **__: Any) -> Callable[[], None]:
        tried.append(1)
        raise FAULT

    monkeypatch.setattr(Passes, "_compute", faults)
    with pytest.raises(torch.AcceleratorError):
        engine.passes.run([(one, range(2)) for one in batches])
    assert tried == [1]
    assert [one.error for one in batches] == [None] * num_models
