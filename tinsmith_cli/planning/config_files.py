"""Reads a base model's config.json, and the number of parameters in its files, for the planner."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith_cli.base_models import UsageError
from tinsmith_cli.planning.families import UnknownModel, of_config
from tinsmith_cli.planning.shape import Shape

STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}


def read(folder: Path, *, name: str) -> Shape:
    """The shape of the model in a folder. Raises UsageError. `name`: the model, for errors."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{name}: cannot read config.json: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{name}: config.json is not a JSON object")
    return of_config(config, name=name, stored=stored_parameters(folder))


def find(model: str, *, fetch: bool) -> Shape:
    """The shape of a model. `model`: absolute path of a folder, or a hub id. `fetch`: whether a config.json that is not
    in Hugging Face's cache is fetched from the hub. Raises UnknownModel if there is no config.json, and UsageError for
    one that cannot be used."""
    if Path(model).is_absolute():
        return read(Path(model), name=model)
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise UnknownModel(
            f"{model}: reading config.json from the hub needs huggingface_hub, which is not installed; name a folder"
        ) from None
    try:
        folder = snapshot_download(
            model, allow_patterns=["config.json", "model.safetensors.index.json"], local_files_only=not fetch
        )
    except Exception as error:  # it raises errors of many libraries
        raise UnknownModel(
            f"{model}: config.json cannot be read from the hub or its cache; check the name and the network, or name a "
            f"folder that holds it ({' '.join(str(error).split())})"
        ) from None
    return read(Path(folder), name=model)


def stored_parameters(folder: Path) -> int | None:
    """Number of parameters in the safetensors files, from their index or their headers; None without files. If the
    index has only the number of bytes, the widest type of numbers in the first file is taken for all."""
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    try:
        metadata = json.loads(index.read_text())["metadata"] if index.is_file() else {}
        if isinstance(metadata.get("total_parameters"), int):
            return metadata["total_parameters"]
        if isinstance(metadata.get("total_size"), int):
            width = _widest(_header(files[0])) if files else 2
            return metadata["total_size"] // width
        return sum(_elements(_header(file)) for file in files) if files else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _header(file: Path) -> Mapping[str, Any]:
    """The header of a safetensors file: its length in 8 bytes, little-endian, then JSON."""
    with file.open("rb") as stream:
        return json.loads(stream.read(int.from_bytes(stream.read(8), "little")))


def _elements(header: Mapping[str, Any]) -> int:
    count = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            first, last = tensor["data_offsets"]
            count += (last - first) // STORED_BYTES.get(tensor["dtype"], 2)
    return count


def _widest(header: Mapping[str, Any]) -> int:
    return max(STORED_BYTES.get(tensor["dtype"], 2) for name, tensor in header.items() if name != "__metadata__")
