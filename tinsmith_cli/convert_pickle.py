"""Converts adapter_model.bin to safetensors on the user's machine, because a server does not read pickles."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tinsmith_cli.base_models import UsageError


def to_safetensors(path: Path) -> bytes:
    """The tensors in a file of torch.save, as the content of a safetensors file. Nothing in the file is executed.
    Raises UsageError if the file holds anything but tensors."""
    try:
        import torch
        from safetensors.torch import save
    except ImportError:
        raise UsageError(
            f"{path}: is a pickle, which servers do not read; with torch here (pip install 'tinsmith[model]') this "
            "command converts it, or save it as adapter_model.safetensors yourself"
        ) from None
    if not _is_plain_zip(path):
        raise UsageError(f"{path}: is not a file of torch.save; convert it to adapter_model.safetensors")
    try:
        # torch's restricted reader accepts tensors and containers only. Moreover, it reads a file of the user on the
        # user's own machine.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile pickle can raise any error
        raise UsageError(f"{path}: cannot be read as tensors alone ({type(error).__name__})") from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str)
        and isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and not tensor.is_meta
        for name, tensor in content.items()
    ):
        raise UsageError(f"{path}: is not a dictionary of dense tensors")
    return save({name: tensor.detach().clone().contiguous() for name, tensor in content.items()})


def _is_plain_zip(path: Path) -> bool:
    """Whether the file is a ZIP without compression, as torch.save writes it. Such a file cannot grow when it is
    read."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError):
        return False
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    return stored and sum(member.file_size for member in members) <= path.stat().st_size
