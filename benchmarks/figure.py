"""A measured figure, and the report that figures make."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import psutil

_ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")
"""Instructions, by the kernel's names, on which the speed of matrix products depends."""
_PACKAGES = ("tinsmith", "tinker", "torch", "transformers", "peft", "grpcio")


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound that the median of a figure is to keep."""

    limit: float
    unit: str = "x"
    """x: the bound is on the ratio to the baseline, otherwise on the value."""
    at_most: bool = False
    model: str = ""
    """Size or shape of the model that it is for; empty for every model."""

    def __str__(self) -> str:
        return f"at {'most' if self.at_most else 'least'} {self.limit:g} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Figure:
    """Measured values with their baseline, round by round, both in `unit`."""

    name: str
    unit: str
    values: Sequence[float]
    baseline_name: str = ""
    baseline: Sequence[float] = ()
    aims: Sequence[Aim] = ()
    """At most one for each model."""
    load_average: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def ratios(self) -> list[float]:
        return [value / base for value, base in zip(self.values, self.baseline, strict=True)] if self.baseline else []

    @property
    def best_ratio(self) -> float | None:
        """Best value divided by the baseline's best. The best rate is the largest; the best time is the smallest."""
        if not self.baseline:
            return None
        best = max if self.unit.endswith("/s") else min
        return best(self.values) / best(self.baseline)

    def aim(self, model: str) -> Aim | None:
        """The aim for this model. A ratio needs a baseline."""
        aims = [aim for aim in self.aims if aim.model in ("", model) and (self.baseline or aim.unit != "x")]
        return aims[0] if aims else None

    def keeps(self, aim: Aim) -> bool:
        found = median(self.ratios if aim.unit == "x" else self.values)
        return found <= aim.limit if aim.at_most else found >= aim.limit

    def to_json(self, model: str) -> dict[str, Any]:
        aim = self.aim(model)
        return {
            "name": self.name,
            "unit": self.unit,
            "aim": str(aim or ""),
            "met": None if aim is None else self.keeps(aim),
            "load_average": self.load_average,
            "median": median(self.values),
            "values": list(self.values),
            "baseline_name": self.baseline_name,
            "baseline": list(self.baseline),
            "ratio": median(self.ratios) if self.ratios else None,
            "ratios": self.ratios,
            "best_ratio": self.best_ratio,
        }

    def to_row(self, model: str) -> str:
        aim = self.aim(model)
        wanted = "" if aim is None else f"{aim}: {'met' if self.keeps(aim) else 'missed'}"
        against = ""
        if self.best_ratio is not None:
            ratios = f"{spread(self.ratios)} x, best of each {_three_digits(self.best_ratio)} x"
            against = f"{ratios}: {self.baseline_name} ({spread(self.baseline)})"
        return f"| {self.name} | {spread(self.values)} {self.unit} | {len(self.values)} | {against} | {wanted} |"


def spread(values: Sequence[float]) -> str:
    """Median [min-max], in three digits."""
    middle, *ends = (_three_digits(value) for value in (median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} [{'-'.join(ends)}]"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(slots=True)
class Report:
    """The machine, the settings, and the figures, which are added one by one."""

    settings: dict[str, str]
    model: str = ""
    """Size or shape of the model, for which the figures' aims are."""
    started_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    load_before: tuple[float, float, float] = field(default_factory=os.getloadavg)
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())
    figures: list[Figure] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)
        print(figure.to_row(self.model), flush=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "started_at": self.started_at,
            "settings": self.settings,
            "model": self.model,
            "machine": self.machine,
            "load_average_before": self.load_before,
            "load_average_after": os.getloadavg(),
            "figures": [figure.to_json(self.model) for figure in self.figures],
        }

    @contextmanager
    def kept(self, file: Path | None) -> Iterator[None]:
        """Writes the report at the end of the block, also after a failure in it, and prints the table if there was
        none."""
        try:
            yield
        finally:
            if file is not None:
                file.write_text(json.dumps(self.to_json(), indent=2) + "\n")
        self.print_table()

    def print_table(self) -> None:
        print(
            f"\n{in_words(self.machine)}; load average {self.load_before[0]:.2f} before, "
            f"{os.getloadavg()[0]:.2f} after. Median [min-max].\n\n"
            "| figure | value | rounds | against a baseline, round by round | aim |\n|---|---|---|---|---|"
        )
        for figure in self.figures:
            print(figure.to_row(self.model))


def usable_cores() -> int:
    return len(psutil.Process().cpu_affinity()) if psutil.LINUX else os.cpu_count() or 1


def in_words(machine: dict[str, Any]) -> str:
    """The findings of `describe_machine`, in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']} ({machine['isa']}), {machine['cores']} cores, {machine['memory_gb']} GB; {versions}; "
        f"commit {machine['commit']}"
    )


def describe_machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    cpu = re.search(r"model name\s*:\s*(.*)", text)
    flags = re.search(r"flags\s*:\s*(.*)", text)
    isa = [name for name in _ISA if flags and name in flags[1].split()]
    installed = {one.name.lower(): one.version for one in metadata.distributions()}
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)  # noqa: S603
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "isa": " ".join(isa) or platform.machine(),
        "cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in _PACKAGES if name in installed},
        "commit": commit.stdout.strip() or "unknown",
    }
