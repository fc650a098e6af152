from pathlib import Path

import pytest
import torch

from tests.models import make_model
from tinsmith.modeling.base_model import BaseModel

torch.set_num_threads(1)  # the models are tiny, and several processes of one test share the cores


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def base(model_folder: Path) -> BaseModel:
    return BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.float32)
