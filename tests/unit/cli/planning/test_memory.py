"""Bytes that the planner foresees, against bytes of tiny models that are loaded and trained on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import VISION, make_model, make_sparse_model, make_vision_model
from tests.support.parameters import fast_ones
from tests.unit.trainer_service.engines import batch, create, run
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.sizing import Footprint, full_bytes
from tinsmith_cli.planning import memory
from tinsmith_cli.planning.config_files import read
from tinsmith_cli.planning.shape import Shape
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.measure import Bounds, measure
from trainer_service.engine.memory import peak_bytes
from trainer_service.engine.optimizers import AdamParams

TOKENS = 128
RANK = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES: dict[str, dict[str, Any]] = {
    "usual": {},
    "deep": {"num_hidden_layers": 8},
    "wide": {"hidden_size": 256},
    "large feed-forward": {"intermediate_size": 512},
    "many heads": {"num_attention_heads": 16},
    "many key heads": {"num_key_value_heads": 8},
}
USUAL = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 4, "vocab_size": 64,
}  # fmt: skip


def loaded(folder: Path, dtype: str = "float32") -> tuple[BaseModel, Shape]:
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=DTYPES[dtype], kernels="plain")
    return base, read(folder, name="model")


class WithoutProducts(TorchDispatchMode):
    """Gives zeros for matrix products, which take the same bytes. In bfloat16 the products are most of a CPU's time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.mm.out:
            return (kwargs or {})["out"].zero_()
        if func is aten.addmm_.default:
            return args[0]
        if func in (aten.mm.default, aten.addmm.default, aten.bmm.default):
            left, right = args[-2:]
            return left.new_zeros(*left.shape[:-1], right.shape[-1])
        return func(*args, **(kwargs or {}))


def engine_of(base: BaseModel) -> TrainingEngine:
    return TrainingEngine(base, max_tokens_per_microbatch=4096)


@pytest.mark.parametrize("dtype", DTYPES)
def test_base_weights(dtype: str, tmp_path: Path) -> None:
    base, shape = loaded(make_model(tmp_path), dtype)
    assert memory.base_bytes(shape, dtype) == sum(parameter.nbytes for parameter in base.parameters.values())


def test_an_adapter_with_its_gradient_and_optimizer(tmp_path: Path) -> None:
    base, shape = loaded(make_model(tmp_path))
    engine = engine_of(base)
    create(engine, "m", rank=4)
    assert engine.models["m"].adapter.num_bytes == memory.adapter_bytes(shape, 4)
    run(engine, "m", batch(engine, [20]))
    engine.optim_step("m", AdamParams(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0))
    assert engine.models["m"].num_bytes == full_bytes(memory.adapter_bytes(shape, 4))


@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen3_5", "Gemma3", "Gemma4", "Kimi_K25"])
def test_base_weights_and_adapters_of_a_model_with_a_vision_tower(family: str, tmp_path: Path) -> None:
    base, shape = loaded(make_vision_model(tmp_path, family), "bfloat16")
    assert memory.base_bytes(shape, "bfloat16") == sum(one.nbytes for one in base.parameters.values())
    engine = engine_of(base)
    for vision in (False, True):
        engine.create_model(f"{vision}", AdapterConfig(8, seed=1, train_vision=vision), "adamw")
        assert engine.models[f"{vision}"].adapter.num_bytes == memory.adapter_bytes(shape, 8, vision=vision)


@pytest.mark.parametrize("dtype", fast_ones(DTYPES, ["bfloat16"]))
@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen3_5", "Gemma3"])
def test_activations_of_models_that_see_pictures_are_foreseen(family: str, dtype: str, tmp_path: Path) -> None:
    text = {**VISION[family]["text_config"], **{name: USUAL[name] for name in USUAL if name != "num_hidden_layers"}}
    vision = {**VISION[family]["vision_config"], "out_hidden_size": text["hidden_size"]}
    base, shape = loaded(make_vision_model(tmp_path, family, text_config=text, vision_config=vision), dtype)
    assert base.tower is not None
    for checkpointing in (False, True):
        foreseen = _foreseen(shape, dtype, checkpointing=checkpointing)
        assert 0.9 <= foreseen / _measured(base, checkpointing=checkpointing) <= 1.7, f"{checkpointing=}"


def test_the_trainer_finds_the_longest_sequence_beside_an_adapter_of_the_tower(tmp_path: Path) -> None:
    text = {**VISION["Qwen3VL"]["text_config"], "max_position_embeddings": 100_000}
    base, shape = loaded(make_vision_model(tmp_path, text_config=text))
    given, rank = 200_000_000, 64
    plan = measure(engine_of(base), Bounds(4096, max_lora_rank=rank, memory_bytes=given))
    found, blind = (
        memory.TrainingCapacity.within(
            given, one, "float32", rank=rank, host_bytes=10**12, max_models=100, device_type="cpu"
        )
        for one in (shape, replace(shape, tower=()))
    )
    assert plan.longest_datum is not None
    assert 0.3 <= found.longest / plan.longest_datum <= 1
    assert found.longest < blind.longest


@pytest.mark.parametrize("dtype", fast_ones(DTYPES, ["bfloat16"]))
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_no_fewer_activations_are_foreseen_than_measured_and_at_most_two_fifths_more(
    changes: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    base, shape = loaded(make_model(tmp_path, **{**USUAL, **changes}), dtype)
    for checkpointing in (False, True):
        foreseen = _foreseen(shape, dtype, checkpointing=checkpointing)
        assert 1 <= foreseen / _measured(base, checkpointing=checkpointing) <= 1.4, f"{checkpointing=}"


def test_activations_of_experts_are_foreseen(tmp_path: Path) -> None:
    base, shape = loaded(make_sparse_model(tmp_path))
    for checkpointing in (False, True):
        foreseen = _foreseen(shape, "float32", checkpointing=checkpointing)
        assert 0.9 <= foreseen / _measured(base, checkpointing=checkpointing) <= 1.5, f"{checkpointing=}"


def _foreseen(shape: Shape, dtype: str, *, checkpointing: bool) -> float:
    """All bytes of a pass over TOKENS tokens. The chunk of logits is as large as they are."""
    found = memory.activations(shape, dtype, rank=RANK, checkpointing=checkpointing, device_type="cpu")
    return found.bytes_per_token * TOKENS


def _measured(base: BaseModel, *, checkpointing: bool) -> float:
    """Growth of the bytes from TOKENS to twice as many tokens, but for the logits, which a large batch divides."""
    engine = engine_of(base)
    create(engine, "m", rank=RANK)

    def peak(lengths: Any) -> int:
        return peak_bytes(base.device, lambda: engine.probe("m", lengths, checkpointing=checkpointing))

    with WithoutProducts():
        return Footprint.measured(peak, TOKENS, with_pairs=False).bytes_per_token * TOKENS


def test_the_trainer_finds_the_adapters_and_the_context_that_were_foreseen(tmp_path: Path) -> None:
    base, shape = loaded(make_model(tmp_path, **USUAL, max_position_embeddings=100_000))
    engine = engine_of(base)
    given = 200_000_000
    plan = measure(engine, Bounds(4096, max_lora_rank=RANK, memory_bytes=given))
    found = memory.TrainingCapacity.within(
        given, shape, "float32", rank=RANK, host_bytes=10**12, max_models=10**6, device_type="cpu"
    )
    assert plan.models_bytes is not None
    assert found.adapters == plan.models_bytes // full_bytes(memory.adapter_bytes(shape, RANK))
    assert plan.longest_datum is not None
    assert 0.3 <= found.longest / plan.longest_datum <= 1
