"""Writing safetensors files from tensors as they lie in memory.

`safetensors.torch.save_file` copies every tensor into bytes first, and who wants the file's hash reads it once more: of
an adapter, both together take more than to write it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> str:
    """Writes a safetensors file, the tensors in this order, and returns its SHA-256 in hexadecimal.

    Tensors that are on the CPU and contiguous are not copied. Raises KeyError for a type that no weights have, OSError.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            digest.update(part)
            file.write(part)
        for tensor in tensors.values():
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            digest.update(data)
            file.write(data)
    return digest.hexdigest()
