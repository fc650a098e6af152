"""Quantised base weights: the numbers, the model that computes with them, its memory, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.adapters import random_adapter
from tests.support.models import VOCAB_SIZE, make_model, make_recurrent_model, make_sparse_model
from tests.support.oracle import Oracle
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.grouped_lora import torch_grouped_mm
from tinsmith.modeling.kernels import choice
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.modeling.parallel import Division
from tinsmith.modeling.parallel_tensor import CannotDivide
from tinsmith.modeling.quantized import _NF4, all_quantized, dequantized, num_weights, quantized, shape_of
from tinsmith.quantization import BLOCK, QUANTIZATIONS, Quantization, bytes_per_parameter
from trainer_service.engine.memory import peak_bytes

CPU = torch.device("cpu")
both = pytest.mark.parametrize("quantize", QUANTIZATIONS)
families = pytest.mark.parametrize("make", [make_model, make_sparse_model])


def load(folder: Path, quantize: Quantization | None, **settings: object) -> BaseModel:
    settings = {"device": CPU, "dtype": torch.float32, **settings}
    return BaseModel.load(folder, quantize=quantize, **settings)  # type: ignore[arg-type]


def round_trip(weight: Tensor, quantize: Quantization, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantized(*quantized(weight, quantize), quantize, weight.shape, dtype)


# The numbers


@both
@pytest.mark.parametrize("shape", [(64,), (3, 64), (7, 9), (2, 5, 11), (300, 300)])
def test_each_weight_becomes_the_nearest_value_of_its_block(quantize: Quantization, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours = round_trip(weight, quantize)
    values = torch.tensor(_NF4) if quantize == "nf4" else torch.arange(-127, 128).float()
    for block, mine in zip(weight.flatten().split(BLOCK), ours.flatten().split(BLOCK), strict=True):
        scale = (block.abs().max() / values.max()).to(torch.bfloat16).float()
        distances = (block[:, None] / scale - values).abs()
        chosen = (mine[:, None] / scale - values).abs()
        assert chosen.min(1).values.max() < 1e-5, "each is a value"
        torch.testing.assert_close((block - mine).abs() / scale, distances.min(1).values, rtol=0, atol=1e-4)


@both
def test_what_lies_on_the_values_is_exact_and_quantising_again_changes_nothing(quantize: Quantization) -> None:
    once = round_trip(torch.randn(40, 64), quantize)
    assert torch.equal(round_trip(once, quantize), once)


@both
def test_zeros_stay_zeros_and_numbers_that_are_none_are_not_hidden(quantize: Quantization) -> None:
    weight = torch.zeros(4, 64)
    assert torch.equal(round_trip(weight, quantize), weight)
    for broken in (torch.nan, torch.inf):
        weight[1, 5] = broken
        ours = round_trip(weight, quantize)
        assert not ours[1].isfinite().all()
        assert torch.equal(ours[2], weight[2])


@both
def test_bfloat16_is_the_rounded_float32(quantize: Quantization) -> None:
    weight = torch.randn(40, 64)
    expected = round_trip(weight, quantize).to(torch.bfloat16)
    assert torch.equal(round_trip(weight, quantize, torch.bfloat16), expected)


@both
def test_parts_that_are_quantised_one_after_the_other_are_as_one(
    quantize: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(11, 63)
    whole = quantized(weight, quantize)
    monkeypatch.setattr("tinsmith.modeling.quantized._CHUNK", 2 * BLOCK)
    assert all(torch.equal(a, b) for a, b in zip(quantized(weight, quantize), whole, strict=True))


# The model


def dense_copy(folder: Path, out: Path, quantize: Quantization) -> Path:
    """The model with each quantised weight in full precision, as files."""
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            assert not weight.numel() % BLOCK, "so that experts, which are quantised together, share no block"
            tensors[name] = round_trip(weight, quantize)
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


def losses(base: BaseModel, adapters: list[Adapter], tokens: Tensor, *, length: int) -> Tensor:
    """Logprobs of tokens[1:] for a sequence of each adapter."""
    runs = [Run(one, slice(n * length, (n + 1) * length)) for n, one in enumerate(adapters)]
    lengths = [length] * len(adapters)
    hidden = base.hidden_states(tokens, positions_of(lengths, CPU), Packed(lengths), runs)
    return target_logprobs(base.head, hidden, torch.arange(len(tokens)), tokens.roll(-1), runs)


@both
@families
@pytest.mark.parametrize(
    ("grouped", "length"),  # 70: adapters are merged
    [
        pytest.param(False, 6, marks=pytest.mark.slow),
        (False, 70),
        (True, 6),
        pytest.param(True, 70, marks=pytest.mark.slow),
    ],
)
def test_logprobs_and_gradients_are_those_of_the_dequantised_weights_in_full_precision(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    quantize: Quantization,
    length: int,
    grouped: bool,
) -> None:
    folder = make(tmp_path / "model")
    if grouped:  # as on a GPU
        monkeypatch.setattr(choice, "_elementwise", lambda *_: None)
        monkeypatch.setattr(choice.Kernels, "groups", lambda _, *a: choice.Groups.of(*a, torch_grouped_mm))
    base = load(folder, quantize)
    assert not base.one_by_one
    adapters = [random_adapter(base.targets, seed=1, rank=8), random_adapter(base.targets, seed=2, rank=4)]
    tokens = torch.randint(VOCAB_SIZE, (2 * length,), generator=torch.Generator().manual_seed(0))
    ours = losses(base, adapters, tokens, length=length)
    weights = torch.randn(2 * length, generator=torch.Generator().manual_seed(1))
    tensors = [tensor for one in adapters for tensor in one.tensors()]
    grads = torch.autograd.grad((ours * weights).sum(), tensors)

    dense = dense_copy(folder, tmp_path / "dense", quantize)
    theirs, expected = [], []
    for n, adapter in enumerate(adapters):
        oracle, rows = Oracle(dense, adapter, tmp_path / f"adapter{n}"), slice(n * length, (n + 1) * length)
        named = tokens.roll(-1)[rows]
        theirs.append(oracle.logprobs(tokens[rows].tolist(), named).detach())
        expected += oracle.gradients(
            lambda oracle=oracle, rows=rows, named=named: (
                oracle.logprobs(tokens[rows].tolist(), named) * weights[rows]
            ).sum()
        )
    torch.testing.assert_close(ours.detach(), torch.cat(theirs), rtol=1e-5, atol=1e-5)
    for grad, oracles in zip(grads, expected, strict=True):
        assert (grad - oracles).norm() <= 1e-5 * oracles.norm()
    with torch.no_grad():
        torch.testing.assert_close(losses(base, adapters, tokens, length=length), ours.detach(), rtol=1e-5, atol=1e-5)


@both
@families
@pytest.mark.parametrize("train_mlp", [True, False])  # False: layers without an adapter, between such with one
def test_no_dequantised_weight_is_kept_for_backward(
    tmp_path: Path, make: Callable[[Path], Path], quantize: Quantization, train_mlp: bool
) -> None:
    base = load(make(tmp_path), quantize)
    sizes = {shape_of(one).numel() for _, one in all_quantized(base.decoder)}
    adapter = random_adapter(base.targets, seed=1, rank=2, train_mlp=train_mlp)
    tokens, saved = torch.arange(5), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        losses(base, [adapter], tokens, length=5).sum().backward()
    assert saved
    assert not sizes & set(saved)


@both
def test_a_layer_that_carries_a_state_is_quantised_too_and_continues_from_its_cache(
    tmp_path: Path, quantize: Quantization
) -> None:
    base = load(make_recurrent_model(tmp_path), quantize)
    assert any("linear_attn.in_proj" in name for name, _ in all_quantized(base.decoder))
    assert (base.one_by_one, base.why_not_cached) == ("", "")


@both
def test_embeddings_norms_routers_and_the_output_layer_keep_their_numbers(
    tmp_path: Path, quantize: Quantization
) -> None:
    folder = make_sparse_model(tmp_path)
    base = load(folder, quantize)
    kept = {name: one for name, one in base.parameters.items() if "parametrizations" not in name}
    files = load_file(folder / "model.safetensors")
    assert {name.split(".")[-2] for name in kept} >= {"embed_tokens", "norm", "lm_head", "gate", "input_layernorm"}
    assert not any(name.endswith("_proj.weight") for name in kept)
    assert all(torch.equal(parameter, files[name]) for name, parameter in kept.items())


@both
def test_every_process_has_the_same_codes_whatever_type_it_computes_in(tmp_path: Path, quantize: Quantization) -> None:
    folder = make_model(tmp_path)
    one, other = load(folder, quantize), load(folder, quantize, dtype=torch.bfloat16)
    assert one.weights_sum == other.weights_sum == f"{load(folder, None).weights_sum}-{quantize}"
    for (name, mine), (_, theirs) in zip(all_quantized(one.decoder), all_quantized(other.decoder), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True)), name


# Memory


@both
@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_take_the_bytes_of_the_formula(
    tmp_path: Path, make: Callable[[Path], Path], quantize: Quantization, dtype: torch.dtype
) -> None:
    base = load(make(tmp_path), quantize, dtype=dtype)
    few = sum(shape_of(one).numel() for _, one in all_quantized(base.decoder))
    whole = sum(one.numel() for name, one in base.parameters.items() if "parametrizations" not in name)
    kind = str(dtype).removeprefix("torch.")
    formula = few * bytes_per_parameter(quantize, kind) + whole * bytes_per_parameter(None, kind)
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in base.parameters.values()}
    assert sum(held.values()) == formula
    layers = sum(num_weights(layer) for layer in base.layers)
    assert layers == sum(one.numel() for name, one in load(tmp_path, None).parameters.items() if ".layers." in name)


@both
def test_loading_holds_one_weight_at_a_time_in_full(tmp_path: Path, quantize: Quantization) -> None:
    folder = make_model(tmp_path, vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=12)
    plain = peak_bytes(CPU, lambda: load(folder, None))
    loaded: list[BaseModel] = []
    ours = peak_bytes(CPU, lambda: loaded.append(load(folder, quantize)))
    (base,) = loaded
    largest = max(4 * shape_of(one).numel() for _, one in all_quantized(base.decoder))
    held = sum(one.nbytes for one in base.parameters.values())
    # Quantising takes some copies of the weight, and the checks after it activations of the few tokens.
    assert ours < held + 4 * largest < 0.4 * plain


# Refusals


def test_what_a_quantised_base_cannot_do_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    with pytest.raises(ValueError, match=r"^quantize: nf4 is for adapters; full-parameter training changes the base"):
        load(folder, "nf4", trainable=True)
    with pytest.raises(ValueError, match=r"^quantize: int8 leaves no matrices to prepack; leave prepack out"):
        load(folder, "int8", prepack=True)
    for division in (Division(object(), None, lambda call: call()), Division(None, object(), lambda call: call())):  # type: ignore[arg-type]
        with pytest.raises(CannotDivide, match=r"^quantize: nf4 weights cannot be divided among ranks; set tensor_par"):
            load(folder, "nf4", division=division)


def test_models_without_plain_linear_layers_are_refused_by_the_layers_name(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^quantize: transformer\.h\.0\.attn\.c_attn \(Conv1D\) cannot be quantised"):
        load(tmp_path, "nf4")


def test_files_that_are_quantised_already_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^quantize: the files of this model are quantised already \(fp8\)"):
        load(folder, "int8")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_tensor_of_another_shape_is_refused_as_without_quantisation(tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path)
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(3, 64)}, file, metadata={"format": "pt"})
    for quantize in (None, "nf4"):
        with pytest.raises(OSError, match=rf"{name} is \[3, 64\] in the weights and .* by config\.json: they are not"):
            load(folder, quantize)
