"""The tensors of an untrusted PEFT folder, one at a time. Nothing in it is ever executed."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinsmith.rpc.errors import InvalidRequest

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"


class TensorFile(Protocol):
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


class _Pickle:
    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path = path
        self._tensors = tensors

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFile]:
    """adapter_model.safetensors, else adapter_model.bin. Raises InvalidRequest for what is neither, or damaged."""
    path = folder / SAFETENSORS
    if not path.exists():
        yield _load_pickle(folder / PICKLE)
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield _Safetensors(path, file)
    except SafetensorError as error:
        raise InvalidRequest(f"{SAFETENSORS} is damaged: {error}", field=SAFETENSORS) from None


def _load_pickle(path: Path) -> _Pickle:
    if not path.exists():
        raise InvalidRequest(f"{SAFETENSORS} is missing, and so is {PICKLE}", field=SAFETENSORS)
    if not _is_plain_zip(path):
        raise InvalidRequest(f"{PICKLE} is not a file of torch.save; convert it to {SAFETENSORS}", field=PICKLE)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a hostile pickle makes of it
        raise InvalidRequest(
            f"{PICKLE} cannot be read as tensors alone ({type(error).__name__}); convert it to {SAFETENSORS}",
            field=PICKLE,
        ) from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        for name, tensor in content.items()
    ):
        raise InvalidRequest(f"{PICKLE} is not a dictionary of dense tensors", field=PICKLE)
    return _Pickle(path, content)


def _is_plain_zip(path: Path) -> bool:
    """Without compression, as torch.save writes it: so it cannot become larger than it is."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError):
        return False
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    return stored and sum(member.file_size for member in members) <= path.stat().st_size
