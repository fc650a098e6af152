"""Measures the first token of a publish to four samplers of which one is full, one is dead and one hangs, against that
of a publish which all four take.

    python -m benchmarks left_out_samplers

Each round saves the weights of a run through the SDK and samples one token of them: once while all four samplers serve;
once just after one sampler was killed and one was stopped, while a third one generates with a version that leaves no
room for another; and once more, when the trainer knows all this. The processes and their faults are those of
tests/faults/test_left_out_samplers.py, which asserts what does not depend on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import tinker

from benchmarks.command_line import add_models, add_size
from benchmarks.figure import Aim, Figure, Report
from benchmarks.processes import model_folder
from tests.faults.cluster import Cluster
from tests.faults.full_sampler import full
from tests.support.examples import PROMPT, batch, new_model, sample, train

_RANK = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="tiny")
    add_models(parser)
    parser.add_argument("--homes", type=int, default=4, help="samplers that a version goes to (%(default)s)")
    parser.add_argument("--full-training", action="store_true", help="all parameters of the model, to every sampler")
    parser.add_argument("--rounds", type=int, default=6, help="rounds (%(default)s)")


def first_token_s(run: tinker.TrainingClient) -> float:
    """Time of a save and of the first token of the saved weights, in seconds."""
    train(run, batch(1), steps=1)
    began = time.perf_counter()
    sample(run.save_weights_and_get_sampling_client().result(), PROMPT, max_tokens=1)
    return time.perf_counter() - began


def run(arguments: argparse.Namespace, report: Report) -> None:
    rank = 0 if arguments.full_training else _RANK
    env = {"TRAINER_VERSION_HOMES": str(arguments.homes), "TRAINER_FULL_TRAINING": str(arguments.full_training)}
    model = model_folder(arguments.size, arguments.models)
    calm_s, at_once_s, known_s = list[float](), list[float](), list[float]()
    with (
        tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as folder,
        Cluster(Path(folder), model, num_samplers=4, trainer_env=env) as cluster,
        tinker.ServiceClient(base_url=cluster.url, api_key="tml-bench") as service,
    ):
        crowded, dead, hanging, _ = cluster.samplers
        measured = new_model(service, rank)
        first_token_s(measured)
        for _ in range(arguments.rounds):
            with full(cluster, service, crowded, rank=rank):
                dead.kill()
                hanging.pause()
                at_once_s.append(first_token_s(measured))
                known_s.append(first_token_s(measured))
            cluster.heal()
            time.sleep(2)  # until the trainer sends versions to all of them again
            calm_s.append(first_token_s(measured))
    without = "all four serve"
    report.add(Figure("first token of a publish, just after the faults", "s", at_once_s, without, calm_s))
    report.add(Figure("first token of the next publish", "s", known_s, without, calm_s))
    later_s = [with_faults - calm for with_faults, calm in zip(at_once_s, calm_s, strict=True)]
    report.add(Figure("later than without faults", "s", later_s, aims=[Aim(1, "s", at_most=True)]))
