"""The GPUs, cores and memory of this machine, without torch: NVML, and tinsmith.memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from tinsmith.cores import usable_cores
from tinsmith.memory import host_bytes
from tinsmith_cli.base_models import UsageError


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG instance of one."""

    id: str
    """Entry of CUDA_VISIBLE_DEVICES: the number that nvidia-smi shows, or the UUID of a MIG instance."""
    name: str
    total_bytes: int
    free_bytes: int
    uuid: str = ""
    is_mig: bool = False
    """Whether this is a MIG instance. NCCL does not connect MIG instances, so they cannot divide a model."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The usable resources of a machine."""

    gpus: Sequence[Gpu]
    cores: int
    host_bytes: int
    """Free host memory, in bytes."""
    note: str = ""
    """The reason for which GPUs are not seen; empty if NVML works or there is no driver."""

    def part(self, number: int, *, of: int) -> Machine:
        """The part of this machine for base model `number` of `of` base models: some GPUs, or a share of one GPU."""
        host = self.host_bytes // of
        if len(self.gpus) >= of or not self.gpus:
            first, last = (len(self.gpus) * n // of for n in (number, number + 1))
            return replace(self, gpus=self.gpus[first:last], host_bytes=host)
        index = number % len(self.gpus)
        sharing = len(range(index, of, len(self.gpus)))
        gpu = self.gpus[index]
        return replace(self, gpus=[replace(gpu, free_bytes=gpu.free_bytes // sharing)], host_bytes=host)


def see(nvml: Any = pynvml, env: Mapping[str, str] = os.environ) -> Machine:
    """This machine, with the GPUs that CUDA_VISIBLE_DEVICES names, or all GPUs without that variable. Raises UsageError
    if the variable is ambiguous."""
    gpus, note = _gpus(nvml)
    return Machine(_visible(gpus, env), usable_cores(), host_bytes(), note)


def _gpus(nvml: Any) -> tuple[list[Gpu], str]:
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError as error:
        if _code(error) == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:  # no driver, so no GPU
            return [], ""
        return [], f"NVML does not start ({error}), so no GPU is used"
    try:
        gpus: list[Gpu] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            gpus += _of_one(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index)
        return gpus, ""
    except pynvml.NVMLError as error:
        return [], f"NVML does not answer ({error}), so no GPU is used"
    finally:
        nvml.nvmlShutdown()


def _of_one(nvml: Any, handle: Any, index: int) -> list[Gpu]:
    """The GPU `index` itself, or its MIG instances."""
    name = nvml.nvmlDeviceGetName(handle)
    if not _has_mig(nvml, handle):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return [Gpu(str(index), name, memory.total, memory.free, nvml.nvmlDeviceGetUUID(handle))]
    instances = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except pynvml.NVMLError as error:
            if _code(error) != pynvml.NVML_ERROR_NOT_FOUND:
                raise
            continue
        memory, uuid = nvml.nvmlDeviceGetMemoryInfo(instance), nvml.nvmlDeviceGetUUID(instance)
        instances.append(Gpu(uuid, nvml.nvmlDeviceGetName(instance), memory.total, memory.free, uuid, is_mig=True))
    return instances


def _has_mig(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError as error:
        if _code(error) != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return False
    return current == pynvml.NVML_DEVICE_MIG_ENABLE


def _code(error: Any) -> int:
    """NVML's number of the error, which pynvml does not declare."""
    return error.value


def _visible(gpus: Sequence[Gpu], env: Mapping[str, str]) -> list[Gpu]:
    """The GPUs in CUDA_VISIBLE_DEVICES, in the order of its entries. As in CUDA, the list ends at the first entry that
    names no GPU."""
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(gpus)
    entries = [entry.strip() for entry in listed.split(",")]
    numbered = any(entry.isdecimal() for entry in entries)
    if numbered and len({gpu.name for gpu in gpus}) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES: {listed!r} is ambiguous on a machine with different GPUs, which CUDA numbers in "
            "another order than nvidia-smi: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by UUID"
        )
    visible: list[Gpu] = []
    for entry in entries:
        found = _find(gpus, entry)
        if found is None or found in visible:
            break
        visible.append(found)
    return visible


def _find(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.id == str(int(entry))), None)
    matching = [gpu for gpu in gpus if entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def chosen(gpus: Sequence[Gpu], text: str, *, flag: str) -> list[Gpu]:
    """The GPUs that a flag names: numbers, ranges of them, and UUIDs, separated by commas. Raises UsageError."""
    found: list[Gpu] = []
    for entry in text.split(","):
        first, dash, last = entry.partition("-")
        names = [entry]
        if dash and first.isdecimal() and last.isdecimal():
            names = [str(number) for number in range(int(first), int(last) + 1)]
        for name in names:
            gpu = _find(gpus, name.strip())
            if gpu is None:
                there = ", ".join(one.id for one in gpus) or "none"
                raise UsageError(
                    f"{flag}: {text!r}: {name or entry!r} is no GPU that can be used here; there are {there}"
                )
            if gpu in found:
                raise UsageError(f"{flag}: {text!r} names GPU {gpu.id} twice")
            found.append(gpu)
    if not found:
        raise UsageError(f"{flag}: {text!r} names no GPU")
    return found
