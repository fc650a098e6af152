"""Starts the stack several times, each with a new state folder: how long a start takes, and what size of micro-batches
the trainer has chosen after some work.

    python benchmarks/bench_starts.py --size small --starts 10
"""

from __future__ import annotations

import argparse
from pathlib import Path

import grpc
import numpy as np
import tinker
from figure import Figure, Report
from processes import started
from service.bench import datum, forward_backward

from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc

_BATCHES = 4
"""Batches of 16x256 tokens that are trained on before the trainer is asked."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "small", "medium"), required=True)
    parser.add_argument(
        "--models", type=Path, default=Path("~/.cache/tinsmith-bench"), help="folder of the models (%(default)s)"
    )
    parser.add_argument("--starts", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    arguments = parser.parse_args()
    report = Report({name: str(value) for name, value in vars(arguments).items()})
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1000, size=256).tolist() for _ in range(16)]
    data = [datum(one, one) for one in tokens]
    start_s, sizes, speeds = [], [], []
    with report.kept(arguments.json):
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
        report.add(Figure("cold start", "s", start_s, aim="under 6 s"))
        report.add(Figure("tokens of a micro-batch, at most", "tokens", sizes, aim="within a factor of 2"))
        report.add(Figure("measured speed", "tokens/s", speeds))


if __name__ == "__main__":
    main()
