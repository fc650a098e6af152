"""Checkpoints of models that are trained in full are Hugging Face folders."""

from pathlib import Path
from typing import Any

import pyrage
import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from tests.support.models import make_model
from tinsmith.errors import DataCorrupted, InvalidRequest
from tinsmith.lora_config import config_from_proto, config_to_proto
from tinsmith.modeling import full_weights
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FULL, FullWeights
from tinsmith.v1 import types_pb2 as pb
from trainer_service.engine.engine import CapturedState, OptimizerState
from trainer_service.metrics import Metrics
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.encryption import parse_recipients
from trainer_service.storage.locations import KINDS, Location

RUN = "s:train:0"
TRAINING, SAMPLER = pb.CHECKPOINT_KIND_TRAINING, pb.CHECKPOINT_KIND_SAMPLER
EXTERNAL = pb.CHECKPOINT_KIND_EXTERNAL
age: Any = pyrage  # it comes without types


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "root", Metrics(CollectorRegistry()))


def make_state(base: BaseModel, *, optimizer: bool = False) -> CapturedState:
    numel = sum(parameter.numel() for parameter in base.parameters.values())
    weights = FullWeights(base, torch.randn(numel, generator=torch.Generator().manual_seed(5)))
    moments = {"exp_avg": torch.rand(numel), "exp_avg_sq": torch.rand(numel), "num_steps": torch.tensor([3.0])}
    return CapturedState(FULL, weights, 3, OptimizerState("adamw", moments) if optimizer else None)


def info_of(kind: pb.CheckpointKind, state: CapturedState, name: str = "one") -> pb.CheckpointInfo:
    return pb.CheckpointInfo(
        location=f"{RUN}/{KINDS[kind]}/{name}",
        kind=kind,
        model_id=RUN,
        base_model="tiny",
        lora_config=config_to_proto(state.config),
        version_id=f"{RUN}@7",
        step=state.step,
        has_optimizer=state.optimizer is not None,
    )


def at(kind: pb.CheckpointKind, name: str = "one") -> Location:
    return Location(RUN, KINDS[kind], name)


def assert_transformers_loads(folder: Path, state: CapturedState, *, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == dtype
    stored = dict(model.named_parameters())
    for (name, _), tensor in zip(state.adapter.specs(), state.adapter.tensors(), strict=True):
        assert torch.equal(stored[name], tensor.to(dtype)), name


@pytest.mark.parametrize("shard_size", ["5GB", "200KB"])
def test_a_full_checkpoint_comes_back_bit_for_bit_and_transformers_loads_it(
    store: CheckpointStore, base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: str
) -> None:
    monkeypatch.setattr(full_weights, "_SHARD_SIZE", shard_size)
    state = make_state(base, optimizer=True)
    saved = store.save(info_of(TRAINING, state), state, overwrite=False)
    assert saved.lora_config.rank == 0
    folder = tmp_path / "root" / RUN / "weights" / "one"
    assert len(list(folder.glob("model*.safetensors"))) == (1 if shard_size == "5GB" else 3)
    assert_transformers_loads(folder, state, dtype=torch.float32)
    _, loaded = store.load(at(TRAINING), base, with_optimizer=True)
    assert loaded.config == FULL
    assert torch.equal(loaded.adapter.flat, state.adapter.flat)
    assert state.optimizer is not None
    assert loaded.optimizer is not None
    for name, tensor in state.optimizer.tensors.items():
        assert torch.equal(loaded.optimizer.tensors[name], tensor)
    for path in folder.glob("model*.safetensors"):
        path.write_bytes(b"x")
    with pytest.raises(DataCorrupted, match=r"model.*safetensors is damaged"):
        store.load(at(TRAINING), base, with_optimizer=False)


def test_weights_alone_are_stored_in_the_type_that_the_model_computes_in(
    store: CheckpointStore, model_folder: Path, tmp_path: Path
) -> None:
    base = BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.bfloat16, trainable=True)
    state = make_state(base)
    store.save(info_of(SAMPLER, state), state, overwrite=False)
    assert_transformers_loads(tmp_path / "root" / RUN / "sampler_weights" / "one", state, dtype=torch.bfloat16)
    _, loaded = store.load(at(SAMPLER), base, with_optimizer=False)
    assert torch.equal(loaded.adapter.flat, state.adapter.flat.bfloat16().float())


def test_a_full_checkpoint_has_the_tokenizer_of_its_base_model_and_can_be_encrypted(
    store: CheckpointStore, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", tie_word_embeddings=True)
    (folder / "tokenizer.json").write_text("{}")
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    state = make_state(base)
    store.save(info_of(EXTERNAL, state), state, overwrite=False)
    plain = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert list(store.manifest(at(EXTERNAL)).files) == plain
    identity = age.x25519.Identity.generate()
    recipients = parse_recipients([str(identity.to_public())], field="r")
    store.save(info_of(EXTERNAL, state, "two"), state, overwrite=False, recipients=recipients)
    out = tmp_path / "out"
    out.mkdir()
    for name in store.manifest(at(EXTERNAL, "two")).files:
        with store.open_file(at(EXTERNAL, "two"), name) as file:
            (out / name.removesuffix(".age")).write_bytes(age.decrypt(file.read(), [identity]))
    assert sorted(path.name for path in out.iterdir()) == plain
    assert_transformers_loads(out, state, dtype=torch.float32)


def test_a_copy_without_the_optimizer_loads(store: CheckpointStore, base: BaseModel) -> None:
    state = make_state(base, optimizer=True)
    store.save(info_of(TRAINING, state), state, overwrite=False)
    copied = store.copy(at(TRAINING), at(pb.CHECKPOINT_KIND_EPHEMERAL, "7"), ttl=None)
    assert not copied.has_optimizer
    _, loaded = store.load(at(pb.CHECKPOINT_KIND_EPHEMERAL, "7"), base, with_optimizer=False)
    assert torch.equal(loaded.adapter.flat, state.adapter.flat)


def test_parameters_of_another_base_model_are_refused_by_name(
    store: CheckpointStore, base: BaseModel, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", num_hidden_layers=3)
    other = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    state = make_state(other)
    store.save(info_of(SAMPLER, state), state, overwrite=False)
    with pytest.raises(InvalidRequest, match=r"do not fit this base model: \('model.layers.2"):
        store.load(at(SAMPLER), base, with_optimizer=False)


def test_a_trainer_of_either_kind_reads_checkpoints_of_both(
    store: CheckpointStore, base: BaseModel, model_folder: Path
) -> None:
    """So that it can publish them again; which of them it trains is the engine's matter."""
    trainable = BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.float32, trainable=True)
    config = AdapterConfig(rank=4, seed=3)
    lora = CapturedState(config, Adapter.create(config, base.targets, base.device), 1, None)
    full = make_state(base)
    store.save(info_of(SAMPLER, lora, "lora"), lora, overwrite=False)
    store.save(info_of(SAMPLER, full, "full"), full, overwrite=False)
    for reader in (base, trainable):
        for name, state in (("lora", lora), ("full", full)):
            _, loaded = store.load(at(SAMPLER, name), reader, with_optimizer=False)
            assert torch.equal(loaded.adapter.flat, state.adapter.flat)


@pytest.mark.parametrize("flag", ["train_attn", "train_mlp", "train_unembed"])
def test_rank_0_with_a_part_left_out_is_refused_by_name(flag: str) -> None:
    asked = config_to_proto(FULL)
    asked.seed = 3
    assert config_from_proto(asked, max_rank=8) == FULL
    setattr(asked, flag, False)
    with pytest.raises(InvalidRequest, match=rf"lora_config\.{flag}: false is not possible with rank 0"):
        config_from_proto(asked, max_rank=8)
