"""An imported PEFT folder computes what stock PEFT computes with it, or is refused by the name of what is wrong."""

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.models import VOCAB_SIZE
from tinsmith.errors import InvalidRequest
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.modeling.peft_import import ImportedAdapter, import_peft

TOKENS = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(5))
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def make_peft(model_folder: Path, out: Path, *, train_steps: int = 0, **settings: Any) -> Path:
    """A folder that stock PEFT writes, with a B that is not zero."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with warnings.catch_warnings(action="ignore"):  # that the head's own weight is stored too
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        if train_steps:
            optimizer = torch.optim.AdamW(trained, lr=1e-2)
            for _ in range(train_steps):
                adapted(input_ids=TOKENS[None], labels=TOKENS[None]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            for parameter in trained:
                torch.nn.init.normal_(parameter.data, std=0.1)
        adapted.save_pretrained(str(out))
    return out


def peft_logprobs(model_folder: Path, adapter_folder: Path) -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(model, adapter_folder).eval()
    with torch.no_grad():
        table = model(TOKENS[None]).logits[0].log_softmax(-1)
    return table[:-1].gather(1, TOKENS[1:, None])[:, 0]


def our_logprobs(base: BaseModel, imported: ImportedAdapter | None) -> Tensor:
    runs = [Run(imported.adapter, slice(0, 39))] if imported is not None else []
    with torch.no_grad():
        hidden = base.hidden_states(TOKENS[:-1], positions_of([39], base.device), Packed([39]), runs)
        return target_logprobs(base.head, hidden, torch.arange(39), TOKENS[1:], runs)


def imported_from(base: BaseModel, folder: Path, *, max_rank: int = 32) -> ImportedAdapter:
    embedding: Any = base.decoder
    frozen = {"lm_head": base.head.weight_V_H, "embed_tokens": embedding.get_input_embeddings().weight}
    return import_peft(folder, base.targets, frozen, base_model="tiny", max_rank=max_rank)


CASES: Mapping[str, dict[str, Any]] = {
    "attention": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 4, "lora_alpha": 7, "target_modules": r".*\.(q_proj|o_proj|down_proj)",
        "rank_pattern": {"down_proj": 8, r"model.layers.(0|9).self_attn.q_proj": 2},
        "alpha_pattern": {r"layers.1.*_proj": 3.5},
    },
    "head": {"r": 4, "lora_alpha": 4, "target_modules": ["gate_proj", "lm_head"]},
    "one layer": {"r": 4, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1]},
    "trained": {"r": 8, "lora_alpha": 32, "target_modules": "all-linear", "train_steps": 5},
    "fan_in_fan_out": {"r": 4, "target_modules": ["up_proj"], "fan_in_fan_out": True},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_imported_adapter_computes_what_peft_computes(
    base: BaseModel, model_folder: Path, tmp_path: Path, case: str
) -> None:
    folder = make_peft(model_folder, tmp_path / "adapter", **CASES[case])
    ours, theirs = our_logprobs(base, imported_from(base, folder)), peft_logprobs(model_folder, folder)
    assert (ours - theirs).abs().max() < 1e-5
    assert (ours - our_logprobs(base, None)).abs().max() > 1e-2  # the adapter does something


def test_the_parts_that_are_not_in_the_adapter_can_be_trained(
    base: BaseModel, model_folder: Path, tmp_path: Path
) -> None:
    folder = make_peft(
        model_folder, tmp_path / "adapter", r=4, target_modules=["q_proj", "k_proj"], rank_pattern={"k_proj": 2}
    )
    imported = imported_from(base, folder)
    config = imported.adapter.config
    assert (config.rank, config.groups) == (4, {"attn"})
    padded = imported.adapter.weights["model.layers.0.self_attn.k_proj"]
    missing = imported.adapter.weights["model.layers.0.self_attn.v_proj"]
    assert (padded.a_R_I != 0).all()
    assert (padded.b_O_R[:, :2] != 0).all()
    assert not padded.b_O_R[:, 2:].any()
    assert (missing.a_R_I != 0).all()
    assert not missing.b_O_R.any()


def test_the_notes_name_what_was_changed(base: BaseModel, model_folder: Path, tmp_path: Path) -> None:
    folder = make_peft(
        model_folder, tmp_path / "adapter",
        r=4, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj", "k_proj"], rank_pattern={"k_proj": 2},
    )  # fmt: skip
    save_file({name: t.bfloat16() for name, t in load_file(folder / SAFE).items()}, folder / SAFE)
    assert imported_from(base, folder).notes == [
        "lora_dropout is not applied in training here",
        f"the adapter says that it was made for {str(model_folder)!r}; it was imported for 'tiny'",
        "model.layers.0.self_attn.v_proj, model.layers.0.self_attn.o_proj, model.layers.1.self_attn.v_proj, "
        "model.layers.1.self_attn.o_proj: not in the adapter; they start at zero, and are trained too",
        "model.layers.0.self_attn.k_proj, model.layers.1.self_attn.k_proj: padded to rank 4, which changes nothing "
        "that is computed",
        "lora_alpha is 32 here, with rank 4: B was scaled so that the function is the same",
        "bfloat16 was converted to float32",
    ]


SAFE = "adapter_model.safetensors"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_exactly(
    base: BaseModel, model_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = make_peft(model_folder, tmp_path / "adapter", r=4, lora_alpha=32, target_modules=["q_proj"])
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / SAFE).items()}
    save_file(tensors, folder / SAFE)
    weights = imported_from(base, folder).adapter.weights["model.layers.0.self_attn.q_proj"]
    assert torch.equal(weights.a_R_I, tensors[f"{Q0}.lora_A.weight"].float())
    assert torch.equal(weights.b_O_R, tensors[f"{Q0}.lora_B.weight"].float())


@pytest.fixture(scope="module")
def unspoilt(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_peft(model_folder, tmp_path_factory.mktemp("adapter"), r=4, target_modules=["q_proj"])


@pytest.fixture
def plain(unspoilt: Path, tmp_path: Path) -> Path:
    """A folder that can be imported, to be spoilt."""
    return shutil.copytree(unspoilt, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"), ("task_type", "SEQ_CLS"), ("bias", "all"), ("lora_bias", True), ("use_dora", True),
        ("modules_to_save", ["lm_head"]), ("init_lora_weights", "pissa"), ("layer_replication", [[0, 2], [1, 2]]),
        ("trainable_token_indices", [1]), ("target_parameters", [1]), ("use_qalora", True),
        ("alora_invocation_tokens", [1, 2]), ("something_new", {"a": 1}), ("r", 0), ("r", 10**30), ("r", "8"),
        ("lora_alpha", "16"), ("lora_alpha", float("nan")), ("lora_alpha", 10**400), ("use_rslora", "yes"),
        ("lora_dropout", -1), ("rank_pattern", [1]), ("rank_pattern", {"q_proj": 1.5}), ("rank_pattern", {"(": 4}),
        ("alpha_pattern", {"q_proj": None}), ("alpha_pattern", {r"(\w|\w\w|\w\w\w|\.|\w\.)+[!?]": 1}), ("r", 5),
    ],
)  # fmt: skip
def test_a_config_that_is_no_plain_lora_is_refused_by_its_key(
    base: BaseModel, plain: Path, key: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.modeling.peft_config._MATCHING_TIMEOUT_S", 0.3)
    config = json.loads((plain / "adapter_config.json").read_text())
    (plain / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(InvalidRequest) as caught:
        imported_from(base, plain)
    expected = "q_proj.lora_A.weight' has shape" if (key, value) == ("r", 5) else key
    assert expected in caught.value.message


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 512), "adapters of embeddings"),
        (f"{Q0}.lora_magnitude_vector", torch.ones(64), "DoRA"),
        (f"{Q0}.lora_B.bias", torch.ones(64), "lora_bias"),
        ("base_model.model.lm_head.modules_to_save.weight", torch.ones(512, 64), "modules_to_save"),
        ("base_model.model.lm_head.weight", torch.ones(512, 64), "differs from the base model's"),
        ("base_model.model.model.embed_tokens.weight", torch.ones(513, 64), "differs from the base model's"),
        (f"{Q0}.weight", torch.ones(64, 64), "not one of a LoRA adapter"),
        (Q0.replace("q_proj", "qkv_proj") + ".lora_A.weight", torch.ones(4, 64), "no layer .*qkv_proj"),
        (Q0.replace("q_proj", "k_proj") + ".lora_A.weight", torch.ones(4, 64), "one of a lora_A and a lora_B"),
        (f"{Q0}.lora_A.weight", torch.ones(4, 65), r"shape \[4, 65\], not \[4, 64\]"),
        (f"{Q0}.lora_A.weight", torch.tensor(1.0), r"shape \[\]"),
        (f"{Q0}.lora_B.weight", torch.ones(64, 4, dtype=torch.int32), "int32, which is no float"),
        (f"{Q0}.lora_B.weight", torch.full((64, 4), torch.inf), "not finite"),
        (f"{Q0}.lora_B.weight", torch.full((64, 4), 1e300, dtype=torch.float64), "not finite"),
    ],
)
def test_a_tensor_that_cannot_be_imported_is_named(
    base: BaseModel, plain: Path, name: str, tensor: Tensor, match: str
) -> None:
    save_file({**load_file(plain / SAFE), name: tensor}, plain / SAFE)
    with pytest.raises(InvalidRequest, match=match) as caught:
        imported_from(base, plain)
    assert name.rpartition(".lora_")[0] in caught.value.message


def test_a_rank_above_the_limit_is_refused(base: BaseModel, plain: Path) -> None:
    with pytest.raises(InvalidRequest, match="rank 4 is above 2"):
        imported_from(base, plain, max_rank=2)


def test_a_pickle_is_not_read(base: BaseModel, plain: Path) -> None:
    torch.save(load_file(plain / SAFE), plain / "adapter_model.bin")
    (plain / SAFE).unlink()
    with pytest.raises(InvalidRequest, match=r"adapter_model\.bin: is a pickle, which is not read here"):
        imported_from(base, plain)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"adapter_config.json": None}, "adapter_config.json is missing"),
        ({"adapter_config.json": b"{"}, "not JSON"),
        ({"adapter_config.json": b"[]"}, "must be a JSON object, not list"),
        ({"adapter_config.json": b"[" * 100_000}, "not JSON"),
        ({"adapter_config.json": b" " * 2**21}, "more than"),
        ({SAFE: None}, "safetensors is missing"),
        ({SAFE: b"\xff" * 100}, "safetensors is damaged"),
    ],
)
def test_damaged_files_are_named(base: BaseModel, plain: Path, files: dict[str, bytes | None], match: str) -> None:
    for name, content in files.items():
        if content is None:
            (plain / name).unlink()
        else:
            (plain / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=match):
        imported_from(base, plain)


def test_an_empty_adapter_is_refused(base: BaseModel, plain: Path) -> None:
    save_file({}, plain / SAFE)
    with pytest.raises(InvalidRequest, match="no tensor of a LoRA adapter"):
        imported_from(base, plain)
