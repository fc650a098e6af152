"""Adapters of fused experts: the grouped products that they run on, and PEFT's files of them."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.models import SPARSE, VOCAB_SIZE, make_sparse_family, make_sparse_model
from tinsmith.errors import InvalidRequest
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.experts import grouped_mm
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.modeling.peft_import import import_peft

CPU = torch.device("cpu")
SAFE = "adapter_model.safetensors"
EXPERTS = "model.layers.0.mlp.experts"
TOKENS = torch.randint(VOCAB_SIZE, (20,), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def sparse_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_model(tmp_path_factory.mktemp("sparse"))


@pytest.fixture(scope="module")
def sparse(sparse_folder: Path) -> BaseModel:
    return BaseModel.load(sparse_folder, device=CPU, dtype=torch.float32)


@pytest.fixture
def adapter(sparse: BaseModel) -> Adapter:
    adapter = Adapter.create(AdapterConfig(rank=4, train_unembed=False, seed=0), sparse.targets, CPU)
    adapter.flat.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    return adapter


def imported(base: BaseModel, folder: Path, *, max_rank: int = 32) -> Adapter:
    return import_peft(folder, base.targets, {}, base_model="tiny", max_rank=max_rank).adapter


def logprobs(base: BaseModel, adapter: Adapter) -> Tensor:
    runs = [Run(adapter, slice(0, 20))]
    with torch.no_grad():
        hidden = base.hidden_states(TOKENS, positions_of([20], CPU), Packed([20]), runs)
        return target_logprobs(base.head, hidden, torch.arange(20), TOKENS, runs)


def peft_logprobs(model_folder: Path, folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, folder).eval()
    with torch.no_grad():
        return model(TOKENS[None]).logits[0].log_softmax(-1).gather(1, TOKENS[:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(32, 16), (32, 3), (5, 16)])
def test_grouped_products_equal_one_product_for_each_group(
    dtype: torch.dtype, num_inputs: int, num_outputs: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 0, 1, 4, 0]
    flat = torch.randn(1 + 5 * num_outputs * num_inputs, generator=generator, dtype=torch.float64).to(dtype)
    weight = flat[1:].view(5, num_outputs, num_inputs).requires_grad_()  # where an aligned one would not begin
    x = torch.randn(8, num_inputs, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    grad = torch.randn(8, num_outputs, generator=generator, dtype=torch.float64).to(dtype)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    y = grouped_mm(x, weight, ends)
    expected = torch.cat([part @ w.T for part, w in zip(x.double().split(sizes), weight.double(), strict=True)])
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 1e-1)
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=atol)
    theirs = torch.autograd.grad(expected, (x, weight), grad.double())
    for ours, wanted in zip(torch.autograd.grad(y, (x, weight), grad), theirs, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=rtol, atol=atol)
        assert not ours.isnan().any()


def test_a_frozen_weight_keeps_no_rows_for_the_backward_pass() -> None:
    kept: list[Tensor] = []
    x = torch.randn(8, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        grouped_mm(x, torch.randn(2, 16, 32), torch.tensor([4, 8], dtype=torch.int32))
    assert all(tensor.shape != x.shape for tensor in kept)


def test_a_new_adapter_shares_what_tinker_says_and_equals_the_base_model(sparse: BaseModel) -> None:
    adapter = Adapter.create(AdapterConfig(rank=4, train_attn=False, seed=7), sparse.targets, CPU)
    shapes = {name.removeprefix("base_model.model."): shape for name, shape in adapter.specs()}
    assert shapes[f"{EXPERTS}.gate_up_proj.lora_A.weight"] == (4, 64)
    assert shapes[f"{EXPERTS}.gate_up_proj.lora_B.weight"] == (4, 64, 4)
    assert shapes[f"{EXPERTS}.down_proj.lora_A.weight"] == (4, 4, 32)
    assert shapes[f"{EXPERTS}.down_proj.lora_B.weight"] == (64, 4)
    down = adapter.weights[f"{EXPERTS}.down_proj"]
    assert 0.9 * 32**-0.5 < down.a_R_I.abs().max() <= 32**-0.5
    assert not torch.equal(down.a_R_I[0], down.a_R_I[1])
    assert not down.b_O_R.any()
    assert sum(tensor.numel() for tensor in adapter.tensors()) == adapter.flat.numel()


def test_factors_that_experts_share_are_repeated_in_the_file_and_taken_back_only_when_equal(
    sparse: BaseModel, sparse_folder: Path, adapter: Adapter, tmp_path: Path
) -> None:
    adapter.save_peft(tmp_path, base_model="tiny")
    stored = load_file(tmp_path / SAFE)
    a, b = f"base_model.model.{EXPERTS}.base_layer.lora_A.weight", f"base_model.model.{EXPERTS}.lora_B.weight"
    assert (stored[a].shape, stored[b].shape) == ((16, 64), (64, 16))
    assert torch.equal(Adapter.load_peft(tmp_path, adapter.config, sparse.targets).flat, adapter.flat)
    assert torch.equal(imported(sparse, tmp_path).flat, adapter.flat)
    torch.testing.assert_close(logprobs(sparse, adapter), peft_logprobs(sparse_folder, tmp_path), rtol=1e-5, atol=2e-5)
    for name, side in ((a, "A"), (b, "B")):
        spoilt = {**stored, name: stored[name].clone()}
        spoilt[name][-1, -1] += 1e-3
        save_file(spoilt, tmp_path / SAFE)
        for read in (imported, lambda base, folder: Adapter.load_peft(folder, adapter.config, base.targets)):
            with pytest.raises(InvalidRequest, match=f"experts differ in lora_{side}") as caught:
                read(sparse, tmp_path)
            assert name in caught.value.message


def make_peft(model_folder: Path, out: Path, *, shared: bool, **settings: Any) -> Path:
    """A folder of stock PEFT, made to share what adapters share here or not."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **settings))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.1)
        if shared and "base_layer.lora_A" in name:
            parameter.data = parameter.data[: parameter.shape[0] // 4].repeat(4, 1)
        elif shared and "experts.lora_B" in name:
            parameter.data = parameter.data[:, ::4].repeat_interleave(4, 1)
    adapted.save_pretrained(str(out))
    return out


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match any targeted module")  # but they do
def test_an_adapter_of_peft_that_shares_the_same_is_imported(
    sparse: BaseModel, sparse_folder: Path, tmp_path: Path
) -> None:
    folder = make_peft(
        sparse_folder, tmp_path, shared=True, r=2, lora_alpha=7, target_modules=["q_proj"],
        target_parameters=[*BOTH, "k_proj.weight"],
        rank_pattern={r".*\.down_proj": 5, r"k_proj\.weight": 3, "q_proj": 4}, alpha_pattern={"gate_up_proj": 3},
    )  # fmt: skip
    adapter = imported(sparse, folder)
    assert adapter.config.rank == 5
    torch.testing.assert_close(logprobs(sparse, adapter), peft_logprobs(sparse_folder, folder), rtol=1e-5, atol=2e-5)
    with pytest.raises(InvalidRequest, match="rank 5 is above 4"):
        imported(sparse, folder, max_rank=4)


def test_an_adapter_of_peft_that_cannot_be_said_here_is_refused_by_name(
    sparse: BaseModel, sparse_folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"r": 2, "target_modules": []}
    own = make_peft(sparse_folder, tmp_path / "own", shared=False, target_parameters=BOTH, **settings)
    with pytest.raises(InvalidRequest, match=r"layers\.0\.mlp\.experts.*experts differ in lora_A"):
        imported(sparse, own)
    # PEFT gives the name of a lone down projection's tensors to a lone gate and up projection's.
    one = make_peft(sparse_folder, tmp_path / "one", shared=False, target_parameters=BOTH[:1], **settings)
    with pytest.raises(InvalidRequest, match=r"experts\.lora_A\.weight' has shape \[8, 64\], not \[8, 32\]"):
        imported(sparse, one)
    # From the time when each expert was a module:
    split = {f"base_model.model.{EXPERTS}.0.up_proj.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    save_file(split, one / SAFE)
    with pytest.raises(InvalidRequest, match=r"no layer .*experts\.0\.up_proj' that can be adapted"):
        imported(sparse, one)


def test_an_adapter_without_experts_names_none(sparse: BaseModel, sparse_folder: Path, tmp_path: Path) -> None:
    adapter = Adapter.create(AdapterConfig(rank=2, train_mlp=False), sparse.targets, CPU)
    adapter.flat.normal_(0, 0.1)
    with warnings.catch_warnings(action="ignore"):  # that the head's own weight is stored too
        adapter.save_peft(tmp_path, base_model="tiny")
        assert "target_parameters" not in json.loads((tmp_path / "adapter_config.json").read_text())
        theirs = peft_logprobs(sparse_folder, tmp_path)
    torch.testing.assert_close(logprobs(sparse, adapter), theirs, rtol=1e-5, atol=2e-5)


def save_hosted(adapter: Adapter, folder: Path) -> dict[str, Tensor]:
    """The adapter's tensors in the hosted service's form, by their names without PEFT's prefix."""
    adapter.with_tinker_names().save_peft(folder, base_model="tiny")
    stored = load_file(folder / SAFE)
    return {name.removeprefix("base_model.model."): tensor for name, tensor in stored.items()}


@pytest.mark.parametrize("family", SPARSE)
def test_the_hosted_form_holds_the_gate_and_the_input_apart(family: str, tmp_path: Path) -> None:
    base = BaseModel.load(make_sparse_family(tmp_path / "base", family), device=CPU, dtype=torch.float32)
    adapter = Adapter.create(AdapterConfig(rank=4, train_unembed=False, seed=0), base.targets, CPU)
    adapter.flat.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    stored = save_hosted(adapter, tmp_path)
    up, down = [target for target in base.targets if target.num_experts is not None][:2]
    experts = up.name.rpartition(".")[0].replace("language_model.", "")
    assert not any("language_model" in name for name in stored)
    ours, low = adapter.weights[up.name], adapter.weights[down.name]
    gate, given = ours.b_O_R[:, :48], ours.b_O_R[:, 48:]
    if family == "GptOss":
        gate, given = ours.b_O_R[:, ::2], ours.b_O_R[:, 1::2]
    parts = {"w1": ours.b_O_R} if family == "NemotronH" else {"w1": gate, "w3": given}
    assert {name for name in stored if name.startswith(f"{experts}.")} == {
        f"{experts}.{part}.lora_{side}.weight" for part in [*parts, "w2"] for side in "AB"
    }
    for part, b in parts.items():
        assert torch.equal(stored[f"{experts}.{part}.lora_A.weight"], ours.a_R_I[None])
        assert stored[f"{experts}.{part}.lora_B.weight"].shape == (4, 48, 4)
        assert torch.equal(stored[f"{experts}.{part}.lora_B.weight"], b)
    assert torch.equal(stored[f"{experts}.w2.lora_A.weight"], low.a_R_I)
    assert torch.equal(stored[f"{experts}.w2.lora_B.weight"], low.b_O_R[None])
    assert torch.equal(imported(base, tmp_path).flat, adapter.flat)
    assert torch.equal(Adapter.load_peft(tmp_path, adapter.config, base.targets).flat, adapter.flat)


def test_stock_peft_says_that_it_does_not_know_the_hosted_form(
    sparse_folder: Path, adapter: Adapter, tmp_path: Path
) -> None:
    save_hosted(adapter, tmp_path)
    with pytest.warns(RuntimeWarning, match="target_parameters=.*experts.w3.* no parameter was matched"):
        peft_logprobs(sparse_folder, tmp_path)


def test_a_file_of_the_hosted_form_that_cannot_be_said_here_is_refused_by_name(
    sparse: BaseModel, adapter: Adapter, tmp_path: Path
) -> None:
    hosted = save_hosted(adapter, tmp_path)
    stored = {f"base_model.model.{name}": tensor for name, tensor in hosted.items()}
    gate, given = (f"base_model.model.{EXPERTS}.{part}.lora_A.weight" for part in ("w1", "w3"))
    save_file({**stored, given: stored[given] + 1e-3}, tmp_path / SAFE)
    for read in (imported, lambda base, folder: Adapter.load_peft(folder, adapter.config, base.targets)):
        with pytest.raises(InvalidRequest, match=r"w3\.lora_A\.weight' differs from .*w1\.lora_A") as caught:
            read(sparse, tmp_path)
        assert given in caught.value.message
    save_file({**stored, gate: stored[gate].repeat(4, 1, 1)}, tmp_path / SAFE)
    with pytest.raises(InvalidRequest, match=r"w1\.lora_A\.weight' has shape \[4, 4, 64\], not \[1, 4, 64\]"):
        imported(sparse, tmp_path)
    save_file({name: tensor for name, tensor in stored.items() if ".0.mlp.experts.w1" not in name}, tmp_path / SAFE)
    with pytest.raises(InvalidRequest, match=rf"{EXPERTS}\.w3.*no adapter of '{EXPERTS}\.w1'; here both are one layer"):
        imported(sparse, tmp_path)
    with pytest.raises(InvalidRequest, match=r"'.*w1\.lora_A\.weight' is on one side only"):
        Adapter.load_peft(tmp_path, adapter.config, sparse.targets)


@pytest.mark.parametrize(("key", "value"), [("rank_pattern", 2), ("alpha_pattern", 3)])
def test_patterns_apply_to_the_projections_of_the_hosted_form(
    sparse: BaseModel, adapter: Adapter, tmp_path: Path, key: str, value: int
) -> None:
    save_hosted(adapter, tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, key: {"w3": value}}))
    with pytest.raises(InvalidRequest, match=rf"{key} differs between '{EXPERTS}\.w1' and '{EXPERTS}\.w3'") as caught:
        imported(sparse, tmp_path)
    assert caught.value.metadata["field"] == key
    path.write_text(json.dumps({**config, "alpha_pattern": {"w[13]": 16}}))  # half of what save_peft wrote
    found = imported(sparse, tmp_path)
    up, down = (f"{EXPERTS}.{layer}" for layer in ("gate_up_proj", "down_proj"))
    assert torch.equal(found.weights[up].b_O_R, adapter.weights[up].b_O_R / 2)
    assert torch.equal(found.weights[down].b_O_R, adapter.weights[down].b_O_R)
