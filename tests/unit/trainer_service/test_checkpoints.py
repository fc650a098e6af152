"""Checkpoints are there whole or not at all, and a damaged one is named: in a folder, and in a bucket."""

import errno
import hashlib
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import peft
import pyrage
import pytest
import safetensors.torch
import torch
from prometheus_client import CollectorRegistry
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.models import make_model, make_vision_model
from tests.support.stores import StoreLocation
from tinsmith.errors import (
    CheckpointExists,
    CheckpointNotFound,
    DataCorrupted,
    InvalidRequest,
    NotFound,
    OutOfCapacity,
    ServiceError,
)
from tinsmith.lora_config import config_to_proto
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.peft_import import import_peft
from tinsmith.rpc.times import duration, seconds_of
from tinsmith.v1 import types_pb2 as pb
from trainer_service.engine.engine import CapturedState, OptimizerState
from trainer_service.metrics import Metrics
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.encryption import parse_recipients
from trainer_service.storage.locations import Location

RUN = "s:train:0"
age: Any = pyrage  # it comes without types


def make_state(base: BaseModel, *, value: float = 0.5, optimizer: bool = True) -> CapturedState:
    config = AdapterConfig(rank=4, seed=3, train_unembed=False)
    adapter = Adapter.create(config, base.targets, base.device)
    adapter.flat.add_(value)
    moments = {"exp_avg": torch.full_like(adapter.flat, value), "exp_avg_sq": torch.ones_like(adapter.flat)}
    state = OptimizerState("adamw", {**moments, "num_steps": torch.tensor([3.0])}) if optimizer else None
    return CapturedState(config=config, adapter=adapter, step=3, optimizer=state)


def make_info(state: CapturedState, name: str = "one") -> pb.CheckpointInfo:
    kind, folder = pb.CHECKPOINT_KIND_TRAINING, "weights"
    if state.optimizer is None:
        kind, folder = pb.CHECKPOINT_KIND_SAMPLER, "sampler_weights"
    return pb.CheckpointInfo(
        location=f"{RUN}/{folder}/{name}",
        kind=kind,
        model_id=RUN,
        base_model="tiny",
        lora_config=config_to_proto(state.config),
        version_id=f"{RUN}@7",
        step=state.step,
        has_optimizer=state.optimizer is not None,
        ttl=duration(3600),
        user_metadata={"note": "first"},
    )


EXTERNAL = Location(RUN, "external_weights", "one")


def external_info(base: BaseModel) -> pb.CheckpointInfo:
    info = make_info(make_state(base, optimizer=False))
    info.location, info.kind = str(EXTERNAL), pb.CHECKPOINT_KIND_EXTERNAL
    return info


def content(store: CheckpointStore, name: str) -> bytes:
    with store.open_file(EXTERNAL, name) as file:
        return file.read()


def assert_same_in_peft(state: CapturedState, model_folder: Path, adapter_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    adapted = peft.PeftModel.from_pretrained(model, adapter_folder)
    loaded = {name.replace(".default", ""): tensor for name, tensor in adapted.named_parameters()}
    for (name, _), tensor in zip(state.adapter.specs(), state.adapter.tensors(), strict=True):
        assert torch.equal(loaded[name], tensor)


def local_store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "root", Metrics(CollectorRegistry()))


def at(name: str, kind: str = "weights") -> Location:
    return Location(RUN, kind, name)


def test_a_checkpoint_comes_back_bit_for_bit(store: CheckpointStore, base: BaseModel) -> None:
    state = make_state(base)
    saved = store.save(make_info(state), state, overwrite=False)
    info, loaded = store.load(at("one"), base, with_optimizer=True)
    assert info == saved == store.info(at("one"))
    assert info.size_bytes > 3 * state.adapter.num_bytes
    assert seconds_of(info.created_at) > 0
    assert loaded.config == state.config
    assert loaded.step == 3
    assert torch.equal(loaded.adapter.flat, state.adapter.flat)
    assert state.optimizer is not None
    assert loaded.optimizer is not None
    assert loaded.optimizer.kind == "adamw"
    tensors = state.optimizer.tensors
    assert all(torch.equal(loaded.optimizer.tensors[name], tensor) for name, tensor in tensors.items())


def test_sampler_weights_are_a_plain_peft_folder(
    store: CheckpointStore, place: StoreLocation, base: BaseModel, model_folder: Path, tmp_path: Path
) -> None:
    state = make_state(base, optimizer=False)
    store.save(make_info(state), state, overwrite=False)
    folder = place.fetch(store, at("one", "sampler_weights"), tmp_path / "fetched")
    assert_same_in_peft(state, model_folder, folder)


def test_external_weights_are_a_plain_peft_folder_too(
    store: CheckpointStore, place: StoreLocation, base: BaseModel, model_folder: Path, tmp_path: Path
) -> None:
    state, info = make_state(base, optimizer=False), external_info(base)
    saved = store.save(info, state, overwrite=False)
    files = store.manifest(EXTERNAL).files
    assert list(files) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads(content(store, "adapter_config.json"))
    assert config["lora_alpha"] == 32
    data = content(store, "adapter_model.safetensors")
    assert files["adapter_model.safetensors"].sha256 == hashlib.sha256(data).hexdigest()
    assert saved.size_bytes == sum(file.size_bytes for file in files.values())
    tensors = safetensors.torch.load(data)
    assert all(name.startswith("base_model.model.") for name in tensors)
    assert_same_in_peft(state, model_folder, place.fetch(store, EXTERNAL, tmp_path / "fetched"))
    assert torch.equal(store.load(EXTERNAL, base, with_optimizer=False)[1].adapter.flat, state.adapter.flat)


def test_external_weights_name_a_tied_head_as_the_hosted_service_does(
    store: CheckpointStore, place: StoreLocation, tmp_path: Path
) -> None:
    """The cookbook's merge finds no lm_head.weight in the base model's file, and stock PEFT no unembed_tokens."""
    folder = make_model(tmp_path / "tied", tie_word_embeddings=True)
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    config = AdapterConfig(rank=4, seed=3)
    adapter = Adapter.create(config, base.targets, base.device)
    adapter.flat.normal_()
    state = CapturedState(config=config, adapter=adapter, step=3, optimizer=None)
    info = external_info(base)
    info.lora_config.CopyFrom(config_to_proto(config))
    store.save(info, state, overwrite=False)
    names = set(safetensors.torch.load(content(store, "adapter_model.safetensors")))
    heads = {name for name in names if ".layers." not in name}
    assert heads == {f"base_model.model.model.unembed_tokens.lora_{side}.weight" for side in "AB"}
    assert "lm_head" not in json.loads(content(store, "adapter_config.json"))["target_modules"]
    folder = place.fetch(store, EXTERNAL, tmp_path / "fetched")
    imported = import_peft(folder, base.targets, {}, base_model="tiny", max_rank=4).adapter
    assert torch.equal(imported.flat, adapter.flat)
    assert set(imported.weights) == set(adapter.weights)
    assert torch.equal(store.load(EXTERNAL, base, with_optimizer=False)[1].adapter.flat, adapter.flat)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "tied", dtype=torch.float32)
    with pytest.warns(RuntimeWarning, match=r"alpha_pattern.*unembed_tokens"):
        peft.PeftModel.from_pretrained(plain, folder)


def test_external_weights_name_layers_beside_a_tower_as_the_hosted_service_does(
    store: CheckpointStore, place: StoreLocation, tmp_path: Path
) -> None:
    """The cookbook's merge puts `language_model` before `layers` by itself, where the base model's file has it."""
    base = BaseModel.load(make_vision_model(tmp_path / "seeing"), device=torch.device("cpu"), dtype=torch.float32)
    config = AdapterConfig(rank=4, seed=3)
    adapter = Adapter.create(config, base.targets, base.device)
    adapter.flat.normal_()
    info = external_info(base)
    info.lora_config.CopyFrom(config_to_proto(config))
    store.save(info, CapturedState(config=config, adapter=adapter, step=3, optimizer=None), overwrite=False)
    layers = [name for name in safetensors.torch.load(content(store, "adapter_model.safetensors")) if "layers" in name]
    assert layers
    assert all(name.startswith("base_model.model.model.layers.") for name in layers)
    folder = place.fetch(store, EXTERNAL, tmp_path / "fetched")
    imported = import_peft(folder, base.targets, {}, base_model="tiny", max_rank=4).adapter
    assert torch.equal(imported.flat, adapter.flat)
    assert set(imported.weights) == set(adapter.weights)
    assert torch.equal(store.load(EXTERNAL, base, with_optimizer=False)[1].adapter.flat, adapter.flat)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "seeing", dtype=torch.float32)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        peft.PeftModel.from_pretrained(plain, folder)


def test_a_damaged_ephemeral_checkpoint_is_found_by_a_faster_digest(
    store: CheckpointStore, place: StoreLocation, base: BaseModel
) -> None:
    state, location = make_state(base, optimizer=False), at("one", "ephemeral")
    info = make_info(state)
    info.location, info.kind = str(location), pb.CHECKPOINT_KIND_EPHEMERAL
    store.save(info, state, overwrite=False)
    file = store.manifest(location).files["adapter_model.safetensors"]
    assert (file.sha256, len(file.xxh3_128)) == ("", 32)
    assert torch.equal(store.load(location, base, with_optimizer=False)[1].adapter.flat, state.adapter.flat)
    place.flip(store, location, file.name)
    with pytest.raises(DataCorrupted, match=rf"{file.name} is damaged: its XXH3-128 is \w+, the manifest says \w+"):
        store.load(location, base, with_optimizer=False)


def test_encrypted_weights_can_be_read_by_each_recipient_and_not_by_the_trainer(
    store: CheckpointStore, base: BaseModel, model_folder: Path, tmp_path: Path
) -> None:
    identities = [age.x25519.Identity.generate() for _ in range(2)]
    recipients = parse_recipients([str(identity.to_public()) for identity in identities], field="r")
    state = make_state(base, optimizer=False)
    saved = store.save(external_info(base), state, overwrite=False, recipients=recipients)
    assert saved.encrypted
    files = store.manifest(EXTERNAL).files
    assert list(files) == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    for identity in identities:
        for name, file in files.items():
            data = content(store, name)
            assert (file.size_bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
            (tmp_path / name.removesuffix(".age")).write_bytes(age.decrypt(data, [identity]))
        assert_same_in_peft(state, model_folder, tmp_path)
    with pytest.raises(InvalidRequest, match="external_weights/one is encrypted with age"):
        store.load(EXTERNAL, base, with_optimizer=False)


def test_recipients_may_be_ssh_keys_and_a_malformed_one_is_named() -> None:
    ssh = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN alice@rust"
    good = str(age.x25519.Identity.generate().to_public())
    assert len(parse_recipients([good, ssh], field="age_recipients")) == 2
    for bad in ("age1xyz", "", "ssh-ed25519 AAAA", good[:-1] + "é"):
        with pytest.raises(InvalidRequest, match=r"age_recipients\[1\]") as caught:
            parse_recipients([good, bad], field="age_recipients")
        assert repr(bad) in caught.value.message
    with pytest.raises(InvalidRequest, match="11 recipients; at most 10"):
        parse_recipients([good] * 11, field="age_recipients")


def test_a_copy_shares_the_bytes_and_outlives_its_source(
    store: CheckpointStore, place: StoreLocation, base: BaseModel
) -> None:
    state, other = make_state(base, value=0.1), make_state(base, value=0.2)
    saved = store.save(make_info(state), state, overwrite=False)
    copied = store.copy(at("one"), Location("t:train:0", "weights", "two"), ttl=duration(7200))
    kept = store.copy(at("one"), at("7", "ephemeral"), ttl=None)
    if not place.in_objects:
        paths = [place.path(store, one, "adapter_model.safetensors") for one in (at("one"), at("7", "ephemeral"))]
        assert os.path.samestat(*(os.stat(path) for path in paths))
    store.save(make_info(other), other, overwrite=True)
    store.delete(at("one"))

    info, loaded = store.load(Location("t:train:0", "weights", "two"), base, with_optimizer=True)
    assert torch.equal(loaded.adapter.flat, state.adapter.flat)
    assert info == copied
    assert (copied.location, copied.ttl.seconds) == ("t:train:0/weights/two", 7200)
    assert seconds_of(copied.created_at) > seconds_of(saved.created_at)
    for field in ("model_id", "version_id", "step", "user_metadata", "lora_config", "optimizer", "size_bytes"):
        assert getattr(copied, field) == getattr(saved, field)

    info, loaded = store.load(at("7", "ephemeral"), base, with_optimizer=False)
    assert torch.equal(loaded.adapter.flat, state.adapter.flat)
    assert info == kept
    assert (kept.kind, kept.has_optimizer, kept.HasField("ttl")) == (pb.CHECKPOINT_KIND_EPHEMERAL, False, False)
    assert kept.size_bytes < copied.size_bytes  # without the optimizer


def test_a_copy_works_where_the_file_system_has_no_links(
    tmp_path: Path, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local_store(tmp_path)

    def link(source: Path, destination: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    state = make_state(base)
    store.save(make_info(state), state, overwrite=False)
    monkeypatch.setattr(os, "link", link)
    store.copy(at("one"), at("two"), ttl=None)
    assert torch.equal(store.load(at("two"), base, with_optimizer=True)[1].adapter.flat, state.adapter.flat)


def test_a_copy_is_refused_by_name(store: CheckpointStore, place: StoreLocation, base: BaseModel) -> None:
    state = make_state(base)
    store.save(make_info(state), state, overwrite=False)
    store.copy(at("one"), at("two"), ttl=None)
    with pytest.raises(CheckpointExists, match="weights/two"):
        store.copy(at("one"), at("two"), ttl=None)
    with pytest.raises(InvalidRequest, match=r"'sampler_weights' .* is not that of the source"):
        store.copy(at("one"), at("three", "sampler_weights"), ttl=None)
    with pytest.raises(CheckpointNotFound, match="weights/none"):
        store.copy(at("none"), at("three"), ttl=None)
    place.remove(store, at("one"), "optimizer.safetensors")
    with pytest.raises(DataCorrupted, match=r"optimizer\.safetensors .* missing"):
        store.copy(at("one"), at("three"), ttl=None)
    assert not store.exists(at("three"))


@pytest.mark.parametrize("name", ["manifest.json", "../one/adapter_config.json", "/etc/passwd", "", "none"])
def test_only_a_checkpoints_own_files_can_be_opened(store: CheckpointStore, base: BaseModel, name: str) -> None:
    state = make_state(base)
    store.save(make_info(state), state, overwrite=False)
    with pytest.raises(NotFound, match="has no file"):
        store.open_file(at("one"), name)


def test_the_optimizer_is_refused_by_name_when_there_is_none(store: CheckpointStore, base: BaseModel) -> None:
    state = make_state(base, optimizer=False)
    store.save(make_info(state), state, overwrite=False)
    with pytest.raises(InvalidRequest, match="sampler_weights/one holds no optimizer"):
        store.load(at("one", "sampler_weights"), base, with_optimizer=True)


def test_an_existing_name_needs_overwrite(store: CheckpointStore, place: StoreLocation, base: BaseModel) -> None:
    first, second = make_state(base, value=0.1), make_state(base, value=0.2)
    store.save(make_info(first), first, overwrite=False)
    with pytest.raises(CheckpointExists, match="weights/one"):
        store.save(make_info(second), second, overwrite=False)
    assert torch.equal(store.load(at("one"), base, with_optimizer=True)[1].adapter.flat, first.adapter.flat)
    store.save(make_info(second), second, overwrite=True)
    assert torch.equal(store.load(at("one"), base, with_optimizer=True)[1].adapter.flat, second.adapter.flat)
    assert place.leftovers() == []
    assert len(place.objects()) == 4


def test_a_reader_sees_the_old_or_the_new_while_it_is_overwritten(store: CheckpointStore, base: BaseModel) -> None:
    states = [make_state(base, value=value) for value in (0.1, 0.2)]
    store.save(make_info(states[0]), states[0], overwrite=False)

    def overwrite() -> None:
        for n in range(8):
            store.save(make_info(states[n % 2]), states[n % 2], overwrite=True)

    writer = threading.Thread(target=overwrite)
    writer.start()
    while writer.is_alive():
        flat = store.load(at("one"), base, with_optimizer=True)[1].adapter.flat
        assert any(torch.equal(flat, state.adapter.flat) for state in states)
    writer.join()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"])
def test_one_flipped_byte_is_found_and_its_file_named(
    store: CheckpointStore, place: StoreLocation, base: BaseModel, name: str
) -> None:
    state = make_state(base)
    store.save(make_info(state), state, overwrite=False)
    assert store.verify(at("one")) == (list(store.manifest(at("one")).files.values()), {})
    place.flip(store, at("one"), name)
    assert_damage_is_found(store, base, name, "SHA-256")
    data = place.read(store, at("one"), name)
    place.write(store, at("one"), name, data[:-1])
    assert_damage_is_found(store, base, name, f"has {len(data) - 1} bytes, the manifest says {len(data)}")
    place.remove(store, at("one"), name)
    assert_damage_is_found(store, base, name, "missing")


def assert_damage_is_found(store: CheckpointStore, base: BaseModel, name: str, how: str) -> None:
    with pytest.raises(DataCorrupted, match=f"weights/one/{name}.*{how}"):
        store.load(at("one"), base, with_optimizer=True)
    with pytest.raises(DataCorrupted, match=f"weights/one/{name}.*{how}"):
        store.open_file(at("one"), name)
    _, problems = store.verify(at("one"))
    assert list(problems) == [name]
    assert how in problems[name]


@pytest.mark.parametrize("damage", ["change", "truncate"])
def test_a_damaged_manifest_is_named_and_its_checkpoint_can_be_deleted(
    store: CheckpointStore, place: StoreLocation, base: BaseModel, damage: str
) -> None:
    state = make_state(base)
    store.save(make_info(state), state, overwrite=False)
    data = place.read(store, at("one"), "manifest.json")
    if damage == "truncate":
        data = data[:100]
    else:
        manifest = json.loads(data)
        manifest["checkpoint"]["step"] = "4"
        data = json.dumps(manifest).encode()
    place.write(store, at("one"), "manifest.json", data)
    for read in (store.info, store.verify, store.certificate):
        with pytest.raises(DataCorrupted, match=r"weights/one/manifest\.json"):
            read(at("one"))
    store.delete(at("one"))
    assert place.objects() == []


@pytest.mark.parametrize(
    "text",
    ["../weights/one", f"{RUN}/weights/..", f"{RUN}/weights/../x", f"{RUN}/weights", f"/{RUN}/weights/one", "", "a/b/c",
     f"{RUN}/weights/one/", "~tmp/weights/one", f"{RUN}/weights/.", f"{RUN}/~tmp/one"],
)  # fmt: skip
def test_a_location_that_could_leave_the_root_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="location"):
        Location.parse(text, field="location")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OutOfCapacity, "no space left under"),
        (SafetensorError("IoError: ... (os error 28)"), OutOfCapacity, "no space left under"),
        (OSError(errno.EROFS, "Read-only file system"), ServiceError, r"\[Errno 30\] Read-only file system"),
        (SafetensorError("IoError: ... (os error 5)"), ServiceError, "os error 5"),
    ],
)
def test_a_disk_that_is_full_or_fails_is_said_and_nothing_is_left(
    store: CheckpointStore,
    place: StoreLocation,
    base: BaseModel,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[ServiceError],
    said: str,
) -> None:
    state = make_state(base)

    def half(self: Adapter, folder: Path, *, base_model: str) -> None:
        (folder / "adapter_model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(Adapter, "save_peft", half)
    with pytest.raises(kind, match=f"weights/one was not saved: .*{said}") as caught:
        store.save(make_info(state), state, overwrite=False)
    assert type(caught.value) is kind
    assert place.objects() == []
    with pytest.raises(CheckpointNotFound):
        store.info(at("one"))


def test_a_failed_overwrite_leaves_the_old_checkpoint(
    tmp_path: Path, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local_store(tmp_path)
    old, new = make_state(base, value=0.1), make_state(base, value=0.2)
    store.save(make_info(old), old, overwrite=False)
    rename = Path.rename

    def fail_to_install(self: Path, target: Path) -> Path:
        if target.name == "one" and not self.name.startswith("replaced-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_to_install)
    with pytest.raises(OutOfCapacity):
        store.save(make_info(new), new, overwrite=True)
    assert torch.equal(store.load(at("one"), base, with_optimizer=True)[1].adapter.flat, old.adapter.flat)


def test_leftovers_of_a_dead_process_are_cleaned_or_put_back(base: BaseModel, tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = CheckpointStore(root, Metrics(CollectorRegistry()))
    state = make_state(base)
    store.save(make_info(state), state, overwrite=False)
    (root / RUN / "weights" / "one").rename(root / "~tmp" / "replaced-abc")  # died between the two renames
    (root / "~tmp" / "half").mkdir()
    (root / "~tmp" / "half" / "adapter_model.safetensors").write_bytes(b"half")
    CheckpointStore(root, Metrics(CollectorRegistry())).close()
    assert (root / "~tmp" / "half").exists()  # another trainer lives, and may be writing it
    store.close()
    store = CheckpointStore(root, Metrics(CollectorRegistry()))
    store.load(at("one"), base, with_optimizer=True)
    assert list((root / "~tmp").iterdir()) == []


def test_deleting(store: CheckpointStore, place: StoreLocation, base: BaseModel) -> None:
    state = make_state(base)
    store.save(make_info(state), state, overwrite=False)
    store.delete(at("one"))
    store.delete(at("one"))
    with pytest.raises(CheckpointNotFound, match="weights/one"):
        store.info(at("one"))
    ephemeral = pb.CheckpointInfo()
    ephemeral.CopyFrom(make_info(state))
    ephemeral.location = f"{RUN}/ephemeral/7"
    store.save(ephemeral, state, overwrite=False)
    store.delete_ephemeral(RUN)
    store.delete_ephemeral(RUN)
    with pytest.raises(CheckpointNotFound):
        store.info(at("7", "ephemeral"))
    assert place.objects() == []


def test_all_trainers_with_one_store_read_the_same_id_and_other_stores_have_others(
    place: StoreLocation, tmp_path: Path
) -> None:
    first, second = place.open(), place.open(state_dir=tmp_path / "other")
    assert first.storage.store_id == second.storage.store_id
    other = StoreLocation.of(f"{place.root}-other", place.state_dir).open()
    assert other.storage.store_id != first.storage.store_id
    assert all(re.fullmatch("[0-9a-f]{32}", store.storage.store_id) for store in (first, other))
    for store in (first, second, other):
        store.close()
