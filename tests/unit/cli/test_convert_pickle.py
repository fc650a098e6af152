"""adapter_model.bin becomes safetensors before it leaves its owner's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from tinsmith_cli.base_models import UsageError
from tinsmith_cli.convert_pickle import to_safetensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_the_same_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    shared = torch.randn(3, 4).to(dtype)
    tensors = {"a": shared, "b": shared, "transposed": shared.T, "parameter": torch.nn.Parameter(shared)}
    torch.save(tensors, tmp_path / "adapter_model.bin")
    read = load(to_safetensors(tmp_path / "adapter_model.bin"))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


class _Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("/tmp/tinsmith-executed"),)


def _legacy(path: Path) -> None:
    torch.save({"x": torch.ones(1)}, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"x": _Command()}, "cannot be read as tensors alone"),
        ([torch.ones(1)], "not a dictionary of dense tensors"),
        ({"x": torch.eye(4).to_sparse()}, "not a dictionary of dense tensors"),
        (_legacy, "not a file of torch.save"),
        (b"", "not a file of torch.save"),
    ],
)
def test_a_pickle_that_is_more_than_tensors_is_refused(tmp_path: Path, content: Any, match: str) -> None:
    path = tmp_path / "adapter_model.bin"
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UsageError, match=match):
        to_safetensors(path)
    assert not Path("/tmp/tinsmith-executed").exists()
