"""Base weights of one name and shape are told apart, and the same ones are not, whatever their type."""

from pathlib import Path

import pytest
import torch

from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.base_weights import sum_of


def loaded(folder: Path, *, dtype: torch.dtype = torch.float32, trainable: bool = False) -> BaseModel:
    return BaseModel.load(folder, device=torch.device("cpu"), dtype=dtype, trainable=trainable)


def test_the_sum_is_of_the_weights_and_not_of_how_they_were_loaded(model_folder: Path) -> None:
    sums = {
        loaded(model_folder).weights_sum,
        loaded(model_folder, dtype=torch.bfloat16).weights_sum,
        loaded(model_folder, trainable=True).weights_sum,
    }
    assert len(sums) == 1
    assert len(sums.pop()) == 32


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4096), (4096, 3), (5, 300, 300)])
def test_any_small_change_of_one_parameter_is_another_sum(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    parameters = [torch.randn(10), torch.randn(shape)]
    before = sum_of(parameters)
    assert sum_of([parameters[0], parameters[1] * 1.01]) != before
    assert sum_of([parameters[1].clone(), parameters[0]]) == before, "in another order they are the same"
