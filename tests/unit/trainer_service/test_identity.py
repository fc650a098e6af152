"""The identity of a trainer, by which a gateway knows it again and compares it with others."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tinsmith.modeling.base_model import BaseModel
from trainer_service.assembly import fingerprint, new_engine
from trainer_service.config import TrainerConfig
from trainer_service.metrics import Metrics
from trainer_service.storage.choice import trainer_id
from trainer_service.storage.protocol import StorageUnusable


def test_a_state_folder_keeps_its_id(tmp_path: Path) -> None:
    made = trainer_id(tmp_path / "one")
    assert trainer_id(tmp_path / "one") == made
    assert trainer_id(tmp_path / "two") != made


def test_an_id_whose_file_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "writer_id").touch()
    assert len(trainer_id(tmp_path)) == 32


def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageUnusable, match=f"state_dir: {tmp_path}/file cannot be used"):
        trainer_id(tmp_path / "file")


def fingerprint_of(base: BaseModel, **settings: object) -> dict[str, str]:
    config = TrainerConfig(base_model="tiny", device="cpu", **settings)  # type: ignore[arg-type]
    return fingerprint(config, new_engine(config, base, None, Metrics(CollectorRegistry())))


def test_the_fingerprint_names_what_changes_answers(base: BaseModel) -> None:
    found = fingerprint_of(base)
    assert found["base_weights"] == base.weights_sum
    assert found["dtype"] == "float32"
    assert fingerprint_of(base, num_threads=1) == found
    other = fingerprint_of(base, max_lora_rank=8)
    assert {name for name in found if found[name] != other[name]} == {"max_lora_rank"}


def test_a_deterministic_trainer_adds_what_changes_bits(base: BaseModel) -> None:
    one = fingerprint_of(base, deterministic=True, token_budget=64)
    other = fingerprint_of(base, deterministic=True, token_budget=128)
    assert {name for name in one if one[name] != other[name]} == {"token_budget"}
    assert one["picture_cost"] == "0.0"  # it decides how batches with pictures are divided
    assert fingerprint_of(base, token_budget=64) == fingerprint_of(base, token_budget=128)
