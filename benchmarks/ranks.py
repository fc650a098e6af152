"""Measures how the trainer's engine scales over ranks: the same steps on one rank and on several, one CPU thread each.

    python -m benchmarks ranks --size small
    python -m benchmarks ranks --size small --ranks 4 --shard-base

Rounds alternate between the two, and one sleeps while the other computes. A step is a forward_backward and an
optim_step. Each rank needs a core of its own: results of ranks that share cores mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command_line import add_models, add_size
from benchmarks.figure import Aim, Figure, Report, usable_cores
from benchmarks.processes import model_folder
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.v1 import trainer_pb2, types_pb2
from tinsmith_cli.ports import free_ports
from tinsmith_cli.stack import torchrun
from trainer_service.config import TrainerConfig
from trainer_service.engine.batch import Output
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.optimizers import AdamParams
from trainer_service.ranks import process
from trainer_service.ranks.follower import Follower
from trainer_service.ranks.group import RankGroup
from trainer_service.ranks.leader import LeadingEngine
from trainer_service.ranks.place import Place
from trainer_service.requests import batch_of

MODEL = "bench:train:0"
ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0)
MAX_TOKENS = 4096
SHAPES = {
    "16x256": [256] * 16,
    "8x1024": [1024] * 8,
    "ragged": np.exp(np.random.default_rng(0).uniform(np.log(16), np.log(1024), 32)).astype(int).tolist(),
}
"""Lengths of the sequences of a step; ragged is log-uniform from 16 to 1024."""


class Ranks:
    """A trainer's engine on `count` ranks, which sleeps between steps."""

    def __init__(self, count: int, arguments: argparse.Namespace) -> None:
        flags = [f"--tensor-parallel={arguments.tensor_parallel}"] if count > 1 else []
        flags += ["--shard-base"] if arguments.shard_base and count > 1 else []
        (port,) = free_ports(1)
        self._process = subprocess.Popen(  # noqa: S603
            [
                *(sys.executable, "-m", *torchrun(count, port), "benchmarks", "ranks", "--one-rank"),
                *("--model", str(arguments.model), "--rank", str(arguments.rank), *flags),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()  # it has loaded

    def step(self, shape: str) -> dict[str, float]:
        assert self._process.stdin is not None
        print(shape, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # then rank 0 ends the others
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the ranks ended with exit status {self._process.wait()}; their log is above")
        return json.loads(line)


def one_rank(arguments: argparse.Namespace) -> None:
    """Main function of each rank, started by torchrun. Rank 0 does a step for each line that it reads."""
    torch.set_num_threads(1)
    settings = {"tensor_parallel": arguments.tensor_parallel, "shard_base": arguments.shard_base}
    place = Place.of(TrainerConfig(base_model=str(arguments.model), **settings))
    process.begin(place, log_level="WARNING")
    device = torch.device("cpu")
    group = None if place.alone else RankGroup.join(place, device, timeout_s=600)
    division = None if group is None else group.division()
    base = BaseModel.load(arguments.model, device=device, dtype=torch.float32, division=division)
    engine_settings: dict[str, Any] = {"max_tokens_per_microbatch": MAX_TOKENS}
    if group is not None and place.rank:
        process.follow(Follower(base, group, **engine_settings).work)
    engine = TrainingEngine(base, **engine_settings) if group is None else LeadingEngine(base, group, **engine_settings)
    engine.create_model(MODEL, AdapterConfig(rank=arguments.rank, seed=0), "adamw")
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        print(json.dumps(step(engine, SHAPES[line.strip()])), flush=True)
    if isinstance(engine, LeadingEngine):
        engine.stop()
    process.leave(0)


def step(engine: TrainingEngine, lengths: Sequence[int]) -> dict[str, float]:
    batch = batch_of(request(lengths, engine.limits.vocab_size), engine.limits)
    begin = time.perf_counter()
    (output,) = engine.forward_backward([(MODEL, batch)])
    between = time.perf_counter()
    if not isinstance(output, Output):
        raise output
    engine.optim_step(MODEL, ADAM)
    end = time.perf_counter()
    return {"seconds": end - begin, "optim_seconds": end - between, "loss": output.metrics["loss:sum"]}


def request(lengths: Sequence[int], vocab_size: int) -> trainer_pb2.ForwardBackwardRequest:
    """A batch of these lengths. Its data is equal at every call, so that losses can be compared."""
    rng = np.random.default_rng(1)
    data = []
    for length in lengths:
        tokens, targets = rng.integers(vocab_size, size=(2, length))
        chunk = types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=tokens.astype("<i4").tobytes()))
        tensor = types_pb2.Tensor(dense=targets.astype("<i8").tobytes(), dtype=types_pb2.DTYPE_INT64, shape=[length])
        data.append(types_pb2.Datum(model_input=[chunk], loss_fn_inputs={"target_tokens": tensor}))
    return trainer_pb2.ForwardBackwardRequest(model_id=MODEL, data=data, loss_fn="cross_entropy")


def measure(shape: str, one: Ranks, several: Ranks, arguments: argparse.Namespace, report: Report) -> None:
    aims = [Aim(1.6)] if (arguments.ranks, arguments.tensor_parallel) == (2, 1) else []
    name = f"{shape}, {arguments.ranks} ranks"
    rounds = [(several.step(shape), one.step(shape)) for _ in range(arguments.repeats + 1)]
    gaps = [abs(ours["loss"] - theirs["loss"]) / abs(theirs["loss"]) for ours, theirs in rounds]
    num_tokens = sum(SHAPES[shape])
    speeds = [[num_tokens / side["seconds"] for side in pair] for pair in rounds[1:]]  # the first warms up
    ours, theirs = ([pair[side] for pair in speeds] for side in (0, 1))
    report.add(Figure(name, "tokens/s", ours, "1 rank", theirs, aims))
    report.add(Figure(f"{name}: optim_step", "ms", [1e3 * pair[0]["optim_seconds"] for pair in rounds[1:]]))
    report.add(
        Figure(f"{name}: largest difference of a loss", "of it", [max(gaps)], aims=[Aim(1e-5, "of it", at_most=True)])
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="small")
    add_models(parser)
    parser.add_argument("--model", type=Path, help="folder of another model")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapter")
    parser.add_argument("--ranks", type=int, default=2, help="number of processes")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--shard-base", action="store_true")
    parser.add_argument(
        "--shapes", default="16x256,ragged", help=f"batches, from {', '.join(SHAPES)} (default %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds of a figure (%(default)s)")
    parser.add_argument("--one-rank", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace, report: Report) -> None:
    if arguments.one_rank:
        one_rank(arguments)
        return
    if arguments.ranks > usable_cores():
        raise SystemExit(
            f"--ranks: {arguments.ranks} ranks share {usable_cores()} cores; give at most one rank to a core"
        )
    if arguments.model is None:
        arguments.model = model_folder(arguments.size, arguments.models)
    with ExitStack() as stack:
        one, several = (stack.enter_context(closing(Ranks(count, arguments))) for count in (1, arguments.ranks))
        for shape in arguments.shapes.split(","):
            measure(shape, one, several, arguments, report)
