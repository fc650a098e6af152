"""How fast all weights of a model come to a sampler, and what share that is of a bare broadcast's bandwidth.

    python benchmarks/bench_publish.py --size small

A sampler service is started; this process is the trainer's end of the weight channel (WeightSender). One publish is the
four verbs: announce, buckets, checksum, the version visible. The baseline is one broadcast of as many bytes from this
process to another one by gloo, and nothing else. The two take turns, round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from figure import Figure, Report
from prometheus_client import CollectorRegistry

from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import TrainedWeights
from tinsmith.rpc.channel import connect, wait_serving
from tinsmith.toy.model import SHAPES, Recipe, make
from tinsmith.weight_channel.group import WeightGroup, join_store, open_store
from trainer_service.metrics import Metrics
from trainer_service.weight_sync import Version, WeightSender

TIMEOUT_S = 60.0


def form(port: int, *, rank: int) -> WeightGroup:
    store = join_store("127.0.0.1", port, timeout_s=TIMEOUT_S)
    return WeightGroup.form(
        store, epoch=1, rank=rank, world_size=2, backend="gloo", host="127.0.0.1", timeout_s=TIMEOUT_S
    )


def receive_broadcasts(port: int, numel: int, rounds: int) -> None:
    """The other process of the baseline."""
    group, buffer = form(port, rank=1), torch.zeros(numel)
    for _ in range(rounds):
        group.broadcast(buffer)


@contextmanager
def sampler(folder: Path, *, num_bytes: int) -> Iterator[str]:
    """Address of a sampler service with room for two versions."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = {"base-model": str(folder), "listen": address, "num-threads": "1"}
    flags["adapter-memory-bytes"] = str(2 * num_bytes)
    command = [sys.executable, "-m", "sampler_service", *(f"--{name}={value}" for name, value in flags.items())]
    process = subprocess.Popen([*command, "--log-level=WARNING"])  # noqa: S603
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


async def measure(folder: Path, *, rounds: int, bucket_bytes: int) -> list[Figure]:
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32, trainable=True)
    weights = TrainedWeights.take(base)
    flat = weights.flat
    gigabytes = flat.nbytes / 1e9
    store = open_store("127.0.0.1", timeout_s=TIMEOUT_S)
    warm = 2
    spawn = multiprocessing.get_context("spawn")
    other = spawn.Process(target=receive_broadcasts, args=(store.port, flat.numel(), rounds + warm), daemon=True)
    other.start()
    group = await asyncio.to_thread(form, store.port, rank=0)
    with sampler(folder, num_bytes=flat.nbytes) as address:
        async with connect(address) as channel:
            await wait_serving(channel, timeout_s=TIMEOUT_S)
        sender = WeightSender(
            [address],
            trainer_id="bench",
            host="127.0.0.1",
            channel="gloo",
            timeout_s=TIMEOUT_S,
            bucket_bytes=bucket_bytes,
            metrics=Metrics(CollectorRegistry()),
        )
        sender.start()
        bare, published = [], []
        for n in range(rounds + warm):
            begin = time.perf_counter()
            await asyncio.to_thread(group.broadcast, flat)
            bare.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            published_to = await sender.publish(Version(f"m@{n}", str(folder), weights))
            assert len(published_to.members) == 1
            published.append(time.perf_counter() - begin)
        await sender.close()
    other.join()
    print(f"{flat.numel() / 1e6:.1f} M parameters, {gigabytes:.3f} GB", flush=True)
    rates = [[gigabytes / seconds for seconds in times[warm:]] for times in (published, bare)]
    return [
        Figure("publish of all weights", "ms", [1e3 * seconds for seconds in published[warm:]]),
        Figure("publish of all weights", "GB/s", rates[0], "a bare gloo broadcast", rates[1], aim="at least 0.6 x"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--models", type=Path, default=Path("~/.cache/tinsmith-bench"), help="where the model is kept")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--bucket-mb", type=int, default=16, help="MiB of one bucket")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep everything that was measured")
    arguments = parser.parse_args()
    folder = arguments.models.expanduser() / arguments.size
    make(Recipe(arguments.size), folder, report=print)  # does nothing when the model is there
    torch.set_num_threads(1)
    report = Report({name: str(value) for name, value in vars(arguments).items()})
    for figure in asyncio.run(measure(folder, rounds=arguments.rounds, bucket_bytes=arguments.bucket_mb * 1024**2)):
        report.add(figure)
    report.print_table()
    if arguments.json:
        report.write_json(arguments.json)


if __name__ == "__main__":
    main()
