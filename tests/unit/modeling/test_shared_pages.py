"""Services of one machine share the pages of the base model's weights."""

import ctypes
import errno
import fcntl
import json
import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from tests.support.models import make_model
from tinsmith.modeling import shared_pages
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.kernels import prepacked

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files of memory are Linux's")


@pytest.fixture
def file() -> Iterator[int]:
    file = os.memfd_create("base-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield file
    os.close(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with matrices of 512 kB."""
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=256, intermediate_size=512)


def load(folder: Path, file: int | None, *, prepack: bool = False, trainable: bool = False) -> BaseModel:
    path = "" if file is None else f"/proc/self/fd/{file}"
    return BaseModel.load(folder, device=CPU, dtype=torch.float32, prepack=prepack, trainable=trainable, pages=path)


def num_blocks(base: BaseModel) -> int:
    return len(list(shared_pages._blocks(base)))


def size_of(file: int) -> int:
    return os.fstat(file).st_size


def values(base: BaseModel) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in base.parameters.items()}


def digest(base: BaseModel) -> str:
    """Hash of the logits of four random vectors, computed with the prepacked copy where there is one."""
    x_n_H = torch.randn(4, base.head.weight_V_H.shape[1], generator=torch.Generator().manual_seed(0))
    packed = base.head.prepacked
    logits_n_V = x_n_H @ base.head.weight_V_H.T if packed is None else packed.together(x_n_H)
    return sha256(logits_n_V.detach().numpy().tobytes()).hexdigest()


SERVICE = """
import json, os, sys
from pathlib import Path
from tests.unit.modeling.test_shared_pages import digest, load
from tinsmith.modeling import shared_pages

folder, file, prepack = Path(sys.argv[1]), os.open(sys.argv[2], os.O_RDWR), sys.argv[3] == "True"
base = load(folder, file, prepack=prepack)
blocks = [block.num_bytes for block in shared_pages._blocks(base)]
print(json.dumps([sum(blocks), len(blocks), digest(base)]), flush=True)
sys.stdin.read()
"""


class Service:
    """A process that has loaded the model, with its own heap."""

    def __init__(self, folder: Path, file: int, *, prepack: bool) -> None:
        path = f"/proc/{os.getpid()}/fd/{file}"
        self._inode = os.fstat(file).st_ino
        command = [sys.executable, "-c", SERVICE, str(folder), path, str(prepack)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def loaded(self) -> None:
        """Waits for the end of the load."""
        assert self.process.stdout is not None
        self.num_bytes, self.num_blocks, self.computed = json.loads(self.process.stdout.readline())

    @property
    def bytes_shared(self) -> int:
        """Resident bytes of its mappings of the file that other processes map, too."""
        found, within = 0, False
        for line in Path(f"/proc/{self.process.pid}/smaps").read_text().splitlines():
            name, _, rest = line.partition(":")
            if "-" in name.split(" ")[0]:
                within = f" {self._inode} " in line and "memfd:" in line
            elif within and name in ("Shared_Clean", "Shared_Dirty"):
                found += 1024 * int(rest.split()[0])
        return found

    def close(self) -> None:
        self.process.communicate()


def test_services_have_the_weights_in_memory_once(folder: Path, file: int) -> None:
    prepack = prepacked.works(torch.float32, CPU)
    first, second = services = [Service(folder, file, prepack=prepack) for _ in range(2)]
    try:
        for service in services:
            service.loaded()
        assert first.bytes_shared == second.bytes_shared == first.num_bytes == second.num_bytes > 0
        assert first.num_bytes < size_of(file) < 1.1 * first.num_bytes
        plain = load(folder, None, prepack=prepack)
        weights = num_blocks(load(folder, None))
        assert first.num_blocks == num_blocks(plain) > weights if prepack else first.num_blocks == weights
        assert first.computed == second.computed == digest(plain)
    finally:
        for service in services:
            service.close()


def test_a_service_that_writes_to_a_weight_changes_it_for_itself_alone(folder: Path, file: int) -> None:
    first, second = load(folder, file), load(folder, file)
    before = values(first)
    with torch.no_grad():
        for weight in second.parameters.values():
            weight.zero_()
    for name, weight in first.parameters.items():
        assert torch.equal(weight, before[name])


def test_a_weight_with_other_bytes_keeps_its_own_pages(folder: Path, file: int) -> None:
    load(folder, file)
    other = load(folder, None)
    name, weight = max(other.parameters.items(), key=lambda one: one[1].numel())
    with torch.no_grad():
        weight.add_(1)
    changed = values(other)
    shared = shared_pages.share_base(other, f"/proc/self/fd/{file}")
    assert shared < sum(block.num_bytes for block in shared_pages._blocks(other))
    for name, weight in other.parameters.items():
        assert torch.equal(weight, changed[name])


def test_a_model_whose_parameters_are_trained_shares_nothing(folder: Path, file: int) -> None:
    base = load(folder, file, trainable=True)
    assert base.trainable
    assert size_of(file) == 0


def test_memory_that_is_full_leaves_the_weights_where_they_are(
    folder: Path, file: int, caplog: pytest.LogCaptureFixture
) -> None:
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with caplog.at_level(logging.WARNING):
        base = load(folder, file)
    assert "are not all shared with other services" in caplog.text
    assert size_of(file) == 0
    for name, weight in load(folder, None).parameters.items():
        assert torch.equal(weight, base.parameters[name])


def test_a_record_of_a_service_that_was_killed_while_it_wrote_is_cut_off(folder: Path, file: int) -> None:
    load(folder, file)
    size = size_of(file)
    os.pwrite(file, b"x" * 100_000, size + mmap.PAGESIZE)
    base = load(folder, file)
    records = dict(shared_pages._places(file))
    assert {block.key for block in shared_pages._blocks(base)} <= set(records)
    assert size_of(file) % mmap.PAGESIZE == 0


def test_a_path_without_a_file_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = load(folder, None)
    with caplog.at_level(logging.WARNING):
        assert shared_pages.share_base(base, "/proc/self/fd/999999") == 0
    assert "/proc/self/fd/999999" in caplog.text


def test_a_file_on_disk_is_not_overwritten(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "other"
    path.write_bytes(bytes(5000))
    base = load(folder, None)
    with caplog.at_level(logging.WARNING):
        assert shared_pages.share_base(base, str(path)) == 0
    assert "is no file of memory" in caplog.text
    assert path.read_bytes() == bytes(5000)


@pytest.mark.parametrize("call", ["mprotect", "mremap"])
def test_a_mapping_that_fails_leaves_the_weights_in_their_own_pages(
    folder: Path, file: int, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    libc = shared_pages._libc()

    def fails(*_: object) -> int | None:
        ctypes.set_errno(errno.ENOMEM)
        return shared_pages._FAILED if call == "mremap" else -1

    class Failing:
        def __getattr__(self, name: str) -> object:
            return fails if name == call else getattr(libc, name)

    monkeypatch.setattr(shared_pages, "_libc", Failing)
    with caplog.at_level(logging.WARNING):
        base = load(folder, file)
    assert "Cannot allocate memory" in caplog.text
    with torch.no_grad():
        for weight in base.parameters.values():
            weight.add_(0)
    for name, weight in load(folder, None).parameters.items():
        assert torch.equal(weight, base.parameters[name])


@pytest.mark.parametrize(
    ("path", "device", "trainable", "divided"),
    [("", "cpu", False, False), ("/f", "cuda", False, False), ("/f", "cpu", True, False), ("/f", "cpu", False, True)],
)
def test_models_that_cannot_share_are_left_alone(path: str, device: str, trainable: bool, divided: bool) -> None:
    assert not shared_pages.can_share(path, torch.device(device), trainable=trainable, divided=divided)
    assert shared_pages.can_share("/f", CPU, trainable=False, divided=False)


def test_a_service_that_keeps_the_lock_is_not_waited_for_without_end(
    folder: Path, file: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_pages, "_LOCK_S", 0.2)
    other = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    load(folder, file)
    assert size_of(file) == 0
    assert "base_pages: another service has used the file for 0.2 s" in caplog.text
    os.close(other)
    load(folder, file)
    assert size_of(file) > 0
