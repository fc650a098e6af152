"""Starts the stack several times, each with a new state folder: how long a start takes, and what size of micro-batches
the trainer has chosen after some work.

    python -m benchmarks starts --size small --starts 10
"""

from __future__ import annotations

import argparse

import grpc
import numpy as np
import tinker

from benchmarks.command_line import add_models, add_size
from benchmarks.figure import Aim, Figure, Report
from benchmarks.processes import started
from benchmarks.service.bench import datum, forward_backward
from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc

_BATCHES = 4
"""Batches of 16x256 tokens that are trained on before the trainer is asked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="small")
    add_models(parser)
    parser.add_argument("--starts", type=int, default=10, help="(%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1000, size=256).tolist() for _ in range(16)]
    data = [datum(one, one) for one in tokens]
    start_s, sizes, speeds = [], [], []
    for _ in range(arguments.starts):
        with started(arguments.size, models=arguments.models) as target:
            start_s.append(target.start_s)
            client = tinker.ServiceClient(base_url=target.url, api_key="tml-bench")
            trainer = client.create_lora_training_client(target.base_model, rank=16).result()
            for _ in range(_BATCHES):
                forward_backward(trainer, data)
            with grpc.insecure_channel(target.grpc_address) as channel:
                stub = trainer_pb2_grpc.TrainerServiceStub(channel)
                info = stub.GetTrainerInfo(trainer_pb2.GetTrainerInfoRequest())
            sizes.append(float(info.micro_batch_tokens))
            speeds.append(info.tokens_per_second)
    report.add(Figure("cold start", "s", start_s, aims=[Aim(6, "s", at_most=True)]))
    report.add(Figure("tokens of a micro-batch, at most", "tokens", sizes))
    report.add(Figure("largest of them", "tokens", [max(sizes)], "the smallest", [min(sizes)], [Aim(2, at_most=True)]))
    report.add(Figure("measured speed", "tokens/s", speeds))
