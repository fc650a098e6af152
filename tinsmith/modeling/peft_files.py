"""Reads the tensors of an untrusted PEFT folder, one at a time. Nothing in the folder is ever executed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinsmith.errors import InvalidRequest

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"


class TensorFile(Protocol):
    """A file of named tensors, which are read one at a time."""

    path: Path

    @property
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> Tensor: ...


class _Safetensors:
    def __init__(self, path: Path, file: Any) -> None:
        self.path = path
        self._file = file

    @property
    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self._file.get_slice(name)[:0].dtype if self.shape(name) else self.read(name).dtype

    def read(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFile]:
    """Opens adapter_model.safetensors. Raises InvalidRequest if the file is missing or damaged. A pickle in its place
    is not read."""
    path = folder / SAFETENSORS
    if not path.exists():
        pickled = (folder / PICKLE).exists()
        raise InvalidRequest(
            f"{PICKLE}: is a pickle, which is not read here; `tinsmith checkpoints import FOLDER` converts it, or save "
            f"it as {SAFETENSORS}"
            if pickled
            else f"{SAFETENSORS} is missing",
            field=PICKLE if pickled else SAFETENSORS,
        )
    try:
        with safe_open(path, framework="pt") as file:
            yield _Safetensors(path, file)
    except SafetensorError as error:
        raise InvalidRequest(f"{SAFETENSORS} is damaged: {error}", field=SAFETENSORS) from None
