"""Layers computed twice: the same numbers, less memory, and only where it is needed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import VOCAB_SIZE
from tests.unit.modeling.test_families import DENSE, FAMILIES, SPARSE, make
from tests.unit.trainer_service.engines import assert_near, batch, create, gradient, run
from tinsmith.modeling.base_model import BaseModel
from tinsmith.sizing import Footprint
from trainer_service.engine.batch import Batch
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.memory import peak_bytes

LENGTHS = (9, 30, 9, 17)


def engine_of(base: BaseModel, mode: Any = "auto") -> TrainingEngine:
    return TrainingEngine(base, max_tokens_per_microbatch=100, activation_checkpointing=mode)


def losses_and_gradients(base: BaseModel, mode: str, one: Batch) -> tuple[dict[str, float], torch.Tensor]:
    """Losses and gradients of two tenants of different rank in one micro-batch."""
    engine = engine_of(base, mode)
    create(engine, "a", rank=4)
    create(engine, "b", rank=3)
    outputs = engine.forward_backward([("a", one), ("b", one)])
    metrics = {f"{n}:{key}": value for n, output in enumerate(outputs) for key, value in output.metrics.items()}  # type: ignore[union-attr]
    return metrics, torch.cat([gradient(engine, "a"), gradient(engine, "b")])


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("family", [*DENSE, *SPARSE, "Qwen3_5Text", "FalconH1", "Jamba", "StableLm"])
def test_losses_and_gradients_of_every_family_are_the_same(family: str, tmp_path: Path) -> None:
    folder = make(tmp_path, family, FAMILIES[family])
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    engine = engine_of(base)
    one = batch(engine, LENGTHS, vocab_size=base.vocab_size)
    calls = count_layer_calls(base)
    metrics, grads = losses_and_gradients(base, "off", one)
    once = calls.pop()
    calls.append(0)
    checkpointed_metrics, checkpointed_grads = losses_and_gradients(base, "on", one)
    assert calls == [2 * once]  # it did compute twice
    assert checkpointed_metrics == pytest.approx(metrics, rel=1e-6)
    assert_near(checkpointed_grads, grads)


def count_layer_calls(base: BaseModel) -> list[int]:
    """A list of one number, that counts from now on."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    for layer in base.layers:
        next(layer.children()).register_forward_pre_hook(count)
    return calls


def test_it_takes_less_memory_for_each_token(base: BaseModel) -> None:
    engine = engine_of(base)
    create(engine, "m")
    plain, checkpointed = (
        peak_bytes(base.device, lambda c=c: engine.probe("m", [250], checkpointing=c)) for c in (False, True)
    )
    assert checkpointed < 0.75 * plain  # of two layers one is held at a time


def test_it_is_chosen_where_a_sequence_would_not_fit_and_only_there(base: BaseModel) -> None:
    engine = engine_of(base)
    create(engine, "m")
    engine.follow(Plan(100, memory_bytes=4000, activation_bytes=2000, plain=Footprint(0, 100, 0)))
    used: list[bool] = []
    compute = engine.passes._compute

    def spy(items: Any, *, checkpointing: bool, share: bool) -> Any:
        used.append(checkpointing)
        return compute(items, checkpointing=checkpointing, share=share)

    engine.passes._compute = spy  # type: ignore[method-assign]
    run(engine, "m", batch(engine, [20]))
    run(engine, "m", batch(engine, [21]))
    assert used == [False, True]


def test_a_model_without_a_list_of_layers_refuses_to_have_it_always(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(base), "layers", [])
    with pytest.raises(ValueError, match="activation_checkpointing: 'on' is not possible for Qwen3ForCausalLM"):
        engine_of(base, "on")
    assert not engine_of(base).memory.can_checkpoint


def test_the_layers_are_as_before_afterwards(base: BaseModel) -> None:
    engine = engine_of(base, "on")
    create(engine, "m")
    before = [layer.forward for layer in base.layers]
    run(engine, "m", batch(engine, LENGTHS, vocab_size=VOCAB_SIZE))
    assert [layer.forward for layer in base.layers] == before
    assert base.active.runs == ()
