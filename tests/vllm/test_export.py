"""Stock vLLM serves the exports of Tinsmith unchanged. `make test-vllm` makes the environment that this needs."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from tinsmith.lora_config import config_to_proto
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.v1 import types_pb2
from trainer_service.engine.engine import CapturedState
from trainer_service.metrics import Metrics
from trainer_service.storage.checkpoints import CheckpointStore

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # its first request would need a C++ compiler
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
RANK = 8
LOCATION = "s:train:0/sampler_weights/one"


@pytest.fixture(scope="module")
def model_folder(toy: Path) -> Path:
    return toy


@pytest.fixture(scope="module")
def base(model_folder: Path) -> BaseModel:
    return BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def adapter(base: BaseModel) -> Adapter:
    """An adapter of all layers with large weights, as after a long training."""
    adapter = Adapter.create(AdapterConfig(rank=RANK, seed=0), base.targets, base.device)
    generator = torch.Generator().manual_seed(1)
    for weights in adapter.weights.values():
        weights.b_O_R.normal_(std=0.02, generator=generator)
    return adapter


@pytest.fixture(scope="module")
def exported(adapter: Adapter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint of kind SAMPLER."""
    root = tmp_path_factory.mktemp("checkpoints")
    info = types_pb2.CheckpointInfo(
        location=LOCATION,
        kind=types_pb2.CHECKPOINT_KIND_SAMPLER,
        model_id="s:train:0",
        base_model="tests/tiny",
        lora_config=config_to_proto(adapter.config),
    )
    store = CheckpointStore(root, Metrics(CollectorRegistry()))
    store.save(info, CapturedState(config=adapter.config, adapter=adapter, step=1, optimizer=None), overwrite=False)
    store.close()
    return root / LOCATION


def ours(base: BaseModel, tokens: torch.Tensor, runs: list[Run]) -> np.ndarray:
    """log P of each token but the first."""
    length = len(tokens) - 1
    with torch.no_grad():
        hidden = base.hidden_states(tokens[:-1], positions_of([length], base.device), Packed([length]), runs)
        return target_logprobs(base.head, hidden, torch.arange(length), tokens[1:], runs).numpy()


def test_stock_vllm_gives_the_logprobs_of_an_exported_adapter(
    base: BaseModel, adapter: Adapter, exported: Path, model_folder: Path
) -> None:
    tokens = torch.randint(2000, (64,), generator=torch.Generator().manual_seed(2))
    assert PYTHON.exists(), "make test-vllm makes it"
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("score.py"), model_folder, exported, str(RANK)],
        input=json.dumps(tokens.tolist()), env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    theirs = {name: np.array(values) for name, values in json.loads(done.stdout.splitlines()[-1]).items()}
    with_adapter = ours(base, tokens, [Run(adapter, slice(0, 63))])
    np.testing.assert_allclose(theirs["base"], ours(base, tokens, []), atol=1e-3)
    np.testing.assert_allclose(theirs["adapter"], with_adapter, atol=1e-3)
    assert np.abs(with_adapter - theirs["base"]).max() > 0.5
