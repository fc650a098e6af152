"""However the ranks divide the work, the results are one rank's: real processes, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import json_format
from safetensors.torch import load_file

from tests.ranks import scenario
from tinsmith.modeling.base_model import BaseModel
from tinsmith.v1 import types_pb2
from tinsmith_cli.ports import free_ports
from tinsmith_cli.stack import torchrun
from trainer_service.engine.engine import TrainingEngine
from trainer_service.storage.manifest import NAME, Manifest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(base: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The record of one rank, and the folder of its checkpoints."""
    root = tmp_path_factory.mktemp("alone")
    seen = scenario.play(TrainingEngine(base, max_tokens_per_microbatch=scenario.BUDGET), root)
    going_on = {name.replace("saved", "of others"): value for name, value in seen.items() if name.startswith("saved")}
    return {**seen, **going_on}, root


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        (2, ("data", "tensor", "sharded", "full", "data-starved", "sharded-starved")),
        (4, ("data", "tensor", "sharded", "sharded-tensor")),
    ],
)
def test_every_layout_gives_the_losses_weights_and_checkpoints_of_one_rank(
    num_ranks: int,
    layouts: Sequence[str],
    model_folder: Path,
    alone: tuple[dict[str, Any], Path],
    tmp_path: Path,
) -> None:
    expected, checkpoints = alone
    start(num_ranks, "--model", model_folder, "--out", tmp_path, "--others", checkpoints, *layouts)
    for layout in layouts:
        seen = scenario.read(tmp_path / layout)
        if layout.endswith("starved"):
            assert int((tmp_path / f"{layout}-failures-1").read_text()) >= 3
            assert seen.pop("token budget") < 2 * scenario.BUDGET  # it fell on rank 0, where there was no failure
            theirs = {name: value for name, value in expected.items() if name in seen}
        elif layout == "full":
            theirs = scenario.play_full(full_engine(model_folder))
        else:
            theirs = expected
            compare_checkpoints(tmp_path / layout / "checkpoints", checkpoints)
        assert len(theirs) >= 10
        assert scenario.differences(seen, theirs, limit=1e-5) == [], layout


def full_engine(model_folder: Path) -> TrainingEngine:
    base = BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.float32, trainable=True)
    return TrainingEngine(base, max_tokens_per_microbatch=scenario.BUDGET)


def start(num_ranks: int, *arguments: object) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", *torchrun(num_ranks, port), "tests.ranks.rank", *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def compare_checkpoints(ours: Path, theirs: Path) -> None:
    """Asserts that both have equal tensors, with equal metadata."""
    for model_id in ("all:train:0", "attn:train:0"):
        mine, other = (root / model_id / "weights" / "one" for root in (ours, theirs))
        assert sorted(path.name for path in mine.iterdir()) == sorted(path.name for path in other.iterdir())
        for name in ("adapter_model.safetensors", "optimizer.safetensors"):
            tensors, expected = load_file(mine / name), load_file(other / name)
            assert list(tensors) == list(expected)
            for key, tensor in tensors.items():
                torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-5)
        assert (mine / "adapter_config.json").read_text() == (other / "adapter_config.json").read_text()
        assert checkpoint_info(mine) == checkpoint_info(other)


def checkpoint_info(folder: Path) -> dict[str, Any]:
    info = types_pb2.CheckpointInfo()
    info.CopyFrom(Manifest.parse((folder / NAME).read_bytes(), location=str(folder)).checkpoint)
    info.ClearField("created_at")
    return json_format.MessageToDict(info)
