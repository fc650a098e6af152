"""One rank that loads its part of a base model, and writes how much host memory that took: until its weights were read,
and until they were divided, after the model's own forward pass. It also writes what the model computes.

Pages of the model's files are not counted: all processes of a machine share them, and the kernel may drop them.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.ranks.rank import CPU, LAYOUTS
from tests.unit.modeling.test_parallel_tensor import step
from tinsmith.modeling import base_model
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.capabilities import checked
from tinsmith.modeling.self_check import Probe
from tinsmith.modeling.weight_parts import move
from trainer_service.config import TrainerConfig
from trainer_service.ranks import process
from trainer_service.ranks.group import RankGroup
from trainer_service.ranks.place import Place


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("loads", nargs="+", metavar="FOLDER=LAYOUT", help="what is found is written to the folder, too")
    loads = [load.rsplit("=", 1) for load in parser.parse_args().loads]
    torch.set_num_threads(1)
    first = Place.of(TrainerConfig(base_model=loads[0][0]))
    process.begin(first, log_level="WARNING")
    group = RankGroup.join(first, CPU, timeout_s=60)
    for folder, name in loads:
        place = Place.of(TrainerConfig(base_model=folder, **LAYOUTS[name]))
        mesh = init_device_mesh("cpu", (place.num_rows, place.tensor_parallel), mesh_dim_names=("data", "tensor"))
        division = replace(group, place=place, mesh=mesh).division()
        gc.collect()  # the model before
        peak = _Peak()
        with (
            patch.object(base_model, "checked", partial(_ending, peak)),
            patch.object(base_model, "move", partial(_marking, peak)),
        ):
            base = BaseModel.load(folder, device=CPU, dtype=torch.float32, division=division)
        share = sum(_local(parameter).nbytes for parameter in [*base.decoder.parameters(), base.head.weight_V_H])
        found = {"peak": peak.bytes, "read": peak.marked, "share": share, "weights_sum": base.weights_sum}
        (Path(folder) / f"{name}-{place.rank}").write_text(json.dumps(found))
        torch.save(step(base), Path(folder) / f"{name}-{place.rank}.pt")
        del base
    process.leave(0)


def _ending(peak: _Peak, base: BaseModel, probe: Probe) -> BaseModel:
    peak.end()
    return checked(base, probe)


def _marking(peak: _Peak, model: torch.nn.Module, device: torch.device) -> None:
    move(model, device)
    peak.marked = peak.now()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Peak:
    """The largest growth of this process's own memory, in bytes, until the end."""

    def __init__(self) -> None:
        self.bytes = 0
        self.marked: int | None = None
        self._before = _anonymous_bytes()
        self._ended = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.now()

    def now(self) -> int:
        self.bytes = max(self.bytes, _anonymous_bytes() - self._before)
        return self.bytes

    def end(self) -> None:
        self._ended.set()
        self._watching.join()
        self.now()


def _anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


if __name__ == "__main__":
    main()
