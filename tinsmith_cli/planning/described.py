"""Parses the user's description of a machine, so that a plan can be made for a machine on which the command does not
run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tinsmith_cli.base_models import UsageError
from tinsmith_cli.planning.machine import Gpu, Machine

CARDS = {
    "RTX-4090": ("NVIDIA GeForce RTX 4090", 25_757_220_864, 25_316_818_944),
    "L40S": ("NVIDIA L40S", 48_305_799_168, 47_760_539_648),
    "A100-80GB": ("NVIDIA A100-SXM4-80GB", 85_899_345_920, 85_312_143_360),
    "H100": ("NVIDIA H100 80GB HBM3", 85_520_809_984, 84_893_761_536),
    "H200": ("NVIDIA H200", 150_754_820_096, 150_110_994_432),
}
"""Known cards by their names here: NVML's name, total memory and free memory, in bytes."""
FORM = (
    "GPUs as COUNTxCARD, with a card of "
    f"{', '.join(CARDS)}, or its memory in GB (10^9 bytes) such as 48GB; cores=N; memory=NGB, of the host"
)
_USED_BYTES = 700_000_000
"""Bytes of an idle card's memory that the driver takes."""
_CORES_OF_GPU = 16
"""Assumed number of cores for each GPU, unless the description gives a number."""
_HOST_OF_GPU = 2
"""Assumed bytes of host memory for each byte of GPU memory, unless the description gives a number."""
_KEYS = {name.replace("-", "").lower(): name for name in CARDS}
_GPUS = re.compile(r"(?:(\d{1,3})x)?(.+)")
_GB = re.compile(r"(\d+(?:\.\d+)?)gb")


def described(text: str) -> Machine:
    """The machine in a text such as 8xH100,cores=96,memory=1500GB, or in a file written by `tinsmith plan --json`.
    Raises UsageError."""
    if Path(text).is_file():
        return _recorded(Path(text))
    gpus: list[Gpu] = []
    cores = host_bytes = 0
    for part in text.split(","):
        word = part.lower().replace("-", "").replace(" ", "")
        name, _, value = word.partition("=")
        if name == "cores" and value.isdecimal():
            cores = int(value)
        elif name == "memory" and (size := _GB.fullmatch(value)):
            host_bytes = int(1e9 * float(size[1]))
        elif (found := _GPUS.fullmatch(word)) and (card := _card(found[2])):
            gpus += [Gpu(str(len(gpus) + number), *card) for number in range(int(found[1] or 1))]
        else:
            raise UsageError(f"--machine: {text!r}: {part!r} is no file and no part of a machine; give {FORM}")
    cores = cores or _CORES_OF_GPU * len(gpus)
    host_bytes = host_bytes or _HOST_OF_GPU * sum(gpu.total_bytes for gpu in gpus)
    if not cores or not host_bytes:
        raise UsageError(f"--machine: {text!r}: a machine without GPUs needs cores=N and memory=NGB")
    return Machine(gpus, cores, host_bytes)


def _card(word: str) -> tuple[str, int, int] | None:
    """NVML's name, total memory and free memory of a card, in bytes; None for an unknown card. `word`: a known card, or
    the memory of another one, such as 48gb."""
    if word in _KEYS:
        return CARDS[_KEYS[word]]
    if size := _GB.fullmatch(word):
        total = int(1e9 * float(size[1]))
        return f"GPU of {size[1]} GB", total, max(0, total - _USED_BYTES)
    return None


def _recorded(file: Path) -> Machine:
    """The machine in a file written by `tinsmith plan --json`. Raises UsageError."""
    try:
        machine = json.loads(file.read_text())["machine"]
        gpus = [
            Gpu(one["id"], one["name"], int(one["total_bytes"]), int(one["free_bytes"]), one["uuid"], one["is_mig"])
            for one in machine["gpus"]
        ]
        return Machine(gpus, int(machine["cores"]), int(machine["host_bytes"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--machine: {file} is not what `tinsmith plan MODEL --json` writes there ({type(error).__name__}: {error})"
        ) from None
