"""Files of tensors: what safetensors reads is what was written, and the sum is the file's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tinsmith.modeling.tensor_file import write_tensors


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "z of a name that sorts last": matrix,
        "transposed": matrix.T,
        "part of a buffer": torch.arange(100.0)[7:20],
        "half": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
        "one number": torch.tensor(4.0),
        "with a gradient": torch.ones(2, requires_grad=True),
        "nothing": torch.empty(0, 3),
        "ä": torch.tensor([float("nan"), float("inf")]),
    }
    path = tmp_path / "one.safetensors"
    digest = write_tensors(path, tensors, metadata={"format": "pt"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(found[name].nan_to_num(), tensor.nan_to_num())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_type_that_no_weights_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="int64"):
        write_tensors(tmp_path / "one.safetensors", {"a": torch.arange(3)}, metadata={})
