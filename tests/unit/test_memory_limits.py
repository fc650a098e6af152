"""Memory of the machine that a process may use."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from gateway.config import GatewayConfig
from sampler_service.core.sizing import free_bytes_of
from tinsmith import memory
from tinsmith.memory import _cgroups, host_bytes, total_bytes
from trainer_service.engine.memory import available_bytes

GIB = 2**30


def test_the_room_of_a_cgroup_is_its_limit_less_what_cannot_be_reclaimed(tmp_path: Path) -> None:
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("500\n")
    (group / "memory.stat").write_text("anon 300\ninactive_file 150\n")
    for name, text in (("max", "1000"), ("current", "700"), ("stat", "inactive_file 200")):
        (group.parent / f"memory.{name}").write_text(text)
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    assert list(_cgroups(tmp_path, membership)) == [(1000, 500)]


def test_version_1_of_cgroups_is_read_too_and_none_is_no_limit(tmp_path: Path) -> None:
    group = tmp_path / "memory"  # as in a container: the path below it is the host's, and not there
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("1000")
    (group / "memory.usage_in_bytes").write_text("900")
    (group / "memory.stat").write_text("total_inactive_file 50")
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu:/\n4:memory:/docker/xyz\n")
    assert list(_cgroups(tmp_path, membership)) == [(1000, 850)]
    assert list(_cgroups(tmp_path, tmp_path / "absent")) == []


def test_every_service_sizes_itself_by_the_limit_of_its_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = psutil.virtual_memory()
    assert 0 < host_bytes() <= machine.total
    (tmp_path / "cgroup").write_text("0::/\n")
    for name, text in (("max", str(GIB)), ("current", str(GIB // 2)), ("stat", "inactive_file 0")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "cgroup")
    assert total_bytes() == min(GIB, machine.total)
    cpu = torch.device("cpu")
    assert host_bytes() == free_bytes_of(cpu) == available_bytes(cpu) <= GIB // 2
    assert GatewayConfig().max_held_body_bytes == min(GIB, machine.total) // 4
    (tmp_path / "memory.max").write_text(str(2**20))
    assert GatewayConfig().max_held_body_bytes == GatewayConfig().max_body_bytes  # one body at least
