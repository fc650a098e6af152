"""When memory runs out, less goes through at once, and the numbers stay what they were."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.unit.trainer_service.custom_losses import custom_loss, graph, node, ref
from tests.unit.trainer_service.engines import ADAM, assert_near, batch, create, gradient, run
from tinsmith.errors import OutOfCapacity
from tinsmith.modeling.base_model import BaseModel
from tinsmith.rpc.tensors import from_numpy
from tinsmith.sizing import Footprint
from trainer_service.engine import budget as budget_module
from trainer_service.engine.batch import Example, Output
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.passes import halves
from trainer_service.metrics import Metrics
from trainer_service.objectives import custom_loss_graph
from trainer_service.requests import batch_of

LENGTHS = (9, 30, 4, 17, 12, 25)


def make(base: BaseModel, **settings: Any) -> tuple[TrainingEngine, CollectorRegistry]:
    registry = CollectorRegistry()
    return TrainingEngine(base, max_tokens_per_microbatch=200, metrics=Metrics(registry), **settings), registry


class Memory:
    """A forward pass fails above a number of tokens; with activation checkpointing above another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, base: BaseModel) -> None:
        self.max_tokens = 10_000
        self.max_tokens_checkpointed = 10_000
        self.passes: list[int] = []
        whole, usual = type(base).hidden_states, base.layers[0].__dict__.get("forward")

        def hidden_states(self_: BaseModel, tokens_T: torch.Tensor, *args: Any) -> torch.Tensor:
            checkpointed = base.layers[0].__dict__.get("forward") is not usual
            self.passes.append(len(tokens_T))
            if len(tokens_T) > (self.max_tokens_checkpointed if checkpointed else self.max_tokens):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return whole(self_, tokens_T, *args)

        monkeypatch.setattr(type(base), "hidden_states", hidden_states)


@pytest.fixture
def memory(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr(budget_module, "drop_caches", lambda device: None)  # collecting garbage takes most of the time
    return Memory(monkeypatch, base)


def test_a_batch_that_does_not_fit_runs_in_halves_with_the_same_numbers(base: BaseModel, memory: Memory) -> None:
    engine, registry = make(base)
    for model_id in ("a", "b", "alone a", "alone b"):
        create(engine, model_id)
    works = [("a", batch(engine, LENGTHS)), ("b", batch(engine, LENGTHS[:3]))]
    expected = [run(engine, f"alone {model_id}", one) for model_id, one in works]
    assert registry.get_sample_value("trainer_out_of_memory_total") == 0

    memory.max_tokens = 40
    outputs = engine.forward_backward(works)
    for (model_id, _), output, right in zip(works, outputs, expected, strict=True):
        assert isinstance(output, Output)
        assert output.metrics == pytest.approx(right.metrics, rel=1e-6)
        for ours, theirs in zip(output.logprobs, right.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert_near(gradient(engine, model_id), gradient(engine, f"alone {model_id}"), 1e-5)
    assert engine.optim_step("a", ADAM)["grad_norm:mean"] > 0  # not tainted
    assert registry.get_sample_value("trainer_out_of_memory_total") not in (None, 0)


def test_the_budget_falls_below_what_failed_and_the_next_batch_runs_at_once(base: BaseModel, memory: Memory) -> None:
    engine, registry = make(base)
    create(engine, "m")
    memory.max_tokens = 60
    run(engine, "m", batch(engine, LENGTHS))
    assert engine.passes.token_budget <= 60
    assert registry.get_sample_value("trainer_token_budget") == engine.passes.token_budget
    failed = registry.get_sample_value("trainer_out_of_memory_total")
    run(engine, "m", batch(engine, LENGTHS))
    assert registry.get_sample_value("trainer_out_of_memory_total") == failed


@pytest.mark.parametrize("max_tokens", [20, 0], ids=["one datum finds none", "there is none for a while"])
def test_a_batch_that_finds_no_memory_even_alone_leaves_everybody_the_budget(
    base: BaseModel, memory: Memory, max_tokens: int
) -> None:
    engine, _ = make(base, activation_checkpointing="off")
    create(engine, "greedy")
    create(engine, "other")
    memory.max_tokens = max_tokens
    engine.forward_backward([("greedy", batch(engine, [25])), ("other", batch(engine, LENGTHS[2:5]))])
    memory.max_tokens = 10_000
    assert engine.passes.token_budget == 200
    memory.passes.clear()
    run(engine, "other", batch(engine, LENGTHS))
    assert memory.passes == [sum(LENGTHS)]


def test_the_budget_rises_again_when_all_has_gone_well_for_long(
    base: BaseModel, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "_RECOVERS_AFTER", 3)
    engine, _ = make(base)
    create(engine, "m")
    memory.max_tokens = 60
    run(engine, "m", batch(engine, LENGTHS))
    lowered = engine.passes.token_budget
    assert lowered < 60
    memory.max_tokens = 10_000
    budgets = []
    for _ in range(9):
        run(engine, "m", batch(engine, [4]))
        budgets.append(engine.passes.token_budget)
    assert budgets == [*[lowered] * 2, *[2 * lowered] * 3, *[min(200, 4 * lowered)] * 3, min(200, 8 * lowered)]


def test_a_loss_that_is_not_finite_costs_its_neighbours_one_more_pass(base: BaseModel, memory: Memory) -> None:
    engine, _ = make(base)
    works = []
    for n in range(6):
        create(engine, str(n))
        works.append((str(n), batch(engine, [5 + n])))
    bad = request([random_datum(9, 0, vocab_size=VOCAB_SIZE, policy=True)], "importance_sampling")
    values = np.full(9, -1e30, np.float32)
    bad.data[0].loss_fn_inputs["logprobs"].CopyFrom(from_numpy(values))
    create(engine, "bad")
    works.insert(3, ("bad", batch_of(bad, engine.limits)))
    outputs = engine.forward_backward(works)
    assert [n for n, output in enumerate(outputs) if not isinstance(output, Output)] == [3]
    assert len(memory.passes) == 3


def test_without_moves_a_micro_batch_has_as_many_models_as_their_gradients_have_room(base: BaseModel) -> None:
    engine, _ = make(base)
    for n in range(4):
        create(engine, str(n))
    size = engine.models["0"].adapter.num_bytes
    engine.follow(Plan(200, memory_bytes=8 * size + 100, plain=Footprint(0, 0, 0)))
    # Four adapters are there; each in the micro-batch adds its gradient and the buffer for it.
    assert engine.memory.go_together(["0", "1"], tokens=200)
    assert not engine.memory.go_together(["0", "1", "2"], tokens=200)


def test_a_long_datum_that_fails_alone_says_nothing_of_the_budget(base: BaseModel, memory: Memory) -> None:
    engine, _ = make(base)
    create(engine, "m")
    memory.max_tokens = 200
    run(engine, "m", batch(engine, [230]))
    assert engine.passes.token_budget == 200


def test_a_datum_that_fails_alone_runs_with_activation_checkpointing_at_once_the_next_time(
    base: BaseModel, memory: Memory
) -> None:
    engine, _ = make(base)
    create(engine, "m")
    create(engine, "roomy")
    one = batch(engine, [50, 9])
    expected = run(engine, "roomy", one)
    memory.max_tokens = 40
    output = run(engine, "m", one)
    assert output.metrics == pytest.approx(expected.metrics, rel=1e-5)
    assert_near(gradient(engine, "m"), gradient(engine, "roomy"), 1e-5)
    memory.passes.clear()
    run(engine, "m", one)
    assert sorted(memory.passes) == [9, 50]


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_only_the_job_whose_datum_does_not_fit_even_so_fails(base: BaseModel, memory: Memory, mode: str) -> None:
    engine, _ = make(base, activation_checkpointing=mode)
    create(engine, "long")
    create(engine, "short")
    memory.max_tokens = memory.max_tokens_checkpointed = 40
    refused, fine = engine.forward_backward([("long", batch(engine, [5, 50])), ("short", batch(engine, LENGTHS))])
    assert isinstance(refused, OutOfCapacity)
    assert str(refused) == "data[1].model_input: there is no memory for its 50 tokens at this moment, even alone"
    assert isinstance(fine, Output)
    assert engine.optim_step("short", ADAM)["grad_norm:mean"] > 0


def test_a_forward_without_gradients_has_nothing_to_checkpoint(base: BaseModel, memory: Memory) -> None:
    engine, _ = make(base)
    create(engine, "m")
    memory.max_tokens = 40
    (refused,) = engine.forward_backward([("m", batch(engine, [50], forward_only=True))])
    assert isinstance(refused, OutOfCapacity)
    assert memory.passes == [50]


@pytest.mark.parametrize("where", ["loss", "backward"])
def test_nothing_is_added_twice_wherever_it_fails(base: BaseModel, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    engine, _ = make(base)
    for model_id in ("a", "b"):
        create(engine, model_id)
    one = batch(engine, LENGTHS)
    run(engine, "b", one)
    run(engine, "b", one)
    run(engine, "a", one)
    fails = [True]

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)  # everything has been computed by then
            if fails.pop() if fails else False:
                raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
            return result

        return maybe

    if where == "backward":
        monkeypatch.setattr(torch.autograd, "grad", failing(torch.autograd.grad))
    else:
        monkeypatch.setattr(type(one.loss), "evaluate", failing(type(one.loss).evaluate))
    run(engine, "a", one)
    assert not fails
    assert_near(gradient(engine, "a"), gradient(engine, "b"))


def test_a_step_without_room_changes_nothing_and_can_be_sent_again(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make(base)
    create(engine, "m")
    run(engine, "m", batch(engine, LENGTHS))
    before, grads = engine.models["m"].adapter.flat.clone(), gradient(engine, "m")

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", fail)
        with pytest.raises(OutOfCapacity, match="an optimizer step of m"):
            engine.optim_step("m", ADAM)
    assert torch.equal(engine.models["m"].adapter.flat, before)
    assert torch.equal(gradient(engine, "m"), grads)
    assert engine.optim_step("m", ADAM)["grad_norm:mean"] > 0


def test_halves_have_about_as_many_tokens_and_none_is_empty(base: BaseModel) -> None:
    engine, _ = make(base)
    for lengths in ((5, 5), (50, 1, 1), (1, 1, 50), (3, 4, 5, 6)):
        one = batch(engine, lengths)
        items = [Example(one, index) for index in range(len(lengths))]
        left, right = halves(items)
        assert left
        assert right
        assert [*left, *right] == items


def test_a_custom_loss_that_finds_no_memory_is_tried_smaller_and_not_blamed(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make(base)
    create(engine, "m")
    message = request([random_datum(length, 0, vocab_size=VOCAB_SIZE) for length in (9, 20)], "custom")
    total = graph(node("call_method", "total", "sum", ref("logprobs")), loss="total")
    message.custom_loss.CopyFrom(custom_loss(total, {"logprobs": 1}))
    one = batch_of(message, engine.limits)
    expected = run(engine, "m", one)
    fails = [True]

    def resolved(*args: Any) -> Any:
        if fails:
            fails.clear()
            raise torch.OutOfMemoryError
        return resolve(*args)

    resolve = custom_loss_graph._resolved
    monkeypatch.setattr(custom_loss_graph, "_resolved", resolved)
    assert run(engine, "m", one).metrics == pytest.approx(expected.metrics, rel=1e-5)
    assert not fails


_STARVED = """
import resource, sys
import torch
from pathlib import Path
from tests.unit.trainer_service.engines import batch, create, gradient, run
from tests.unit.trainer_service.test_out_of_memory import make
from tinsmith.modeling.base_model import BaseModel

torch.set_num_threads(1)
engine, registry = make(BaseModel.load(Path(sys.argv[1]), device=torch.device("cpu"), dtype=torch.float32))
engine.follow(type(engine.memory.plan)(token_budget=100_000))
create(engine, "free")
create(engine, "starved")
one = batch(engine, [250] * 72)  # its activations take 230 MB
run(engine, "free", batch(engine, [20]))
engine.models["free"].clear_gradient()
gradient(engine, "starved")
_, hard = resource.getrlimit(resource.RLIMIT_AS)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 30_000_000, hard))
output = run(engine, "starved", one)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert registry.get_sample_value("trainer_out_of_memory_total") >= 1
assert engine.passes.token_budget < one.num_tokens
starved_budget = engine.passes.token_budget
engine.follow(type(engine.memory.plan)(token_budget=100_000))
roomy = run(engine, "free", one)
assert engine.passes.token_budget == 100_000
assert abs(output.metrics["loss:sum"] / roomy.metrics["loss:sum"] - 1) < 1e-5
gap = (gradient(engine, "starved") - gradient(engine, "free")).norm() / gradient(engine, "free").norm()
assert gap < 1e-5, gap
print("budget", starved_budget)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS bounds nothing elsewhere")
def test_a_process_that_really_runs_out_of_address_space_trains_on(model_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STARVED, str(model_folder)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert "budget" in done.stdout
