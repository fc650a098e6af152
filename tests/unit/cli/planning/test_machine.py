"""GPUs as NVML reports them, and as the user chooses among them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tests.support.plans.nvml import MACHINES, RecordedNvml, machine_of
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.planning.machine import chosen, see


@pytest.mark.parametrize("name", MACHINES)
def test_each_recorded_machine_is_seen_and_nvml_is_closed(name: str) -> None:
    nvml = RecordedNvml(name)
    machine = see(nvml, {})
    assert not nvml.is_open
    devices = nvml.answers["devices"]
    instances = sum(len(device.get("instances", [])) for device in devices)
    assert len(machine.gpus) == (instances or len(devices))
    assert not machine.note


def test_mig_instances_take_the_place_of_their_gpu() -> None:
    first, second = machine_of("mig").gpus
    assert first.is_mig
    assert second.id == "MIG-00000001-5555-6666-7777-888888888888"
    assert first.total_bytes == 40448 * 1024**2


def test_memory_in_use_by_others_is_not_free() -> None:
    busy, idle = machine_of("in-use").gpus
    assert busy.free_bytes == busy.total_bytes - 62000 * 1024**2
    assert idle.free_bytes > 0.99 * idle.total_bytes


def test_a_machine_without_a_driver_has_no_gpus_and_one_with_a_broken_driver_says_so() -> None:
    assert machine_of("none").gpus == []
    broken: Any = SimpleNamespace(nvmlInit=_fail)
    machine = see(broken, {})
    assert machine.gpus == []
    assert machine.note.startswith("NVML does not start (")


def _fail() -> None:
    raise pynvml.NVMLError_LibRmVersionMismatch


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", []),
        ("1,0", ["1", "0"]),
        ("0,-1,1", ["0"]),
        ("0,9,1", ["0"]),
        ("GPU-00000001", ["1"]),
        ("GPU-0", []),  # ambiguous
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str, expected: list[str]) -> None:
    assert [gpu.id for gpu in machine_of("2x-h100", env={"CUDA_VISIBLE_DEVICES": visible}).gpus] == expected


def test_numbers_are_ambiguous_among_different_gpus() -> None:
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES: '0,1' is ambiguous"):
        machine_of("mixed", env={"CUDA_VISIBLE_DEVICES": "0,1"})
    env = {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [gpu.id for gpu in machine_of("mixed", env=env).gpus] == ["0", "1"]


def test_gpus_are_chosen_by_numbers_ranges_and_uuids() -> None:
    gpus = machine_of("8x-h100").gpus
    assert [gpu.id for gpu in chosen(gpus, "0,2-4", flag="--gpus")] == ["0", "2", "3", "4"]
    mig = machine_of("mig").gpus
    assert [gpu.id for gpu in chosen(mig, "MIG-00000001", flag="--gpus")] == [mig[1].id]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "--gpus: '8': '8' is no GPU that can be used here; there are 0, 1, 2, 3, 4, 5, 6, 7"),
        ("", "'' is no GPU"),
        ("0,x", "'x' is no GPU"),
        ("0-2,1", "--gpus: '0-2,1' names GPU 1 twice"),
        ("3-1", "--gpus: '3-1' names no GPU"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        chosen(machine_of("8x-h100").gpus, text, flag="--gpus")


def test_several_base_models_divide_the_gpus_or_the_memory_of_one() -> None:
    machine = machine_of("8x-h100")
    parts = [machine.part(number, of=3) for number in range(3)]
    assert [[gpu.id for gpu in part.gpus] for part in parts] == [["0", "1"], ["2", "3", "4"], ["5", "6", "7"]]
    one = machine_of("1x-h100")
    (gpu,) = one.part(1, of=2).gpus
    assert gpu.free_bytes == one.gpus[0].free_bytes // 2
    assert machine_of("none").part(0, of=2).gpus == []
