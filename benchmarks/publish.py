"""Measures the time of a publish to a sampler, and its cost for sampling at the same time.

    python -m benchmarks publish --size small

It starts a sampler service; this process is the trainer's end of the weight channel (WeightSender). One publish
consists of the verbs: announcement, buckets, checksum, version visible. It measures:

- all weights of the model, by shared memory and by gloo, each against one broadcast of as many bytes from this process
  to another one by gloo, and nothing else. They take turns, round by round.
- an adapter (rank 32, every module), and the first token from it, against a token from the version before.
- tokens a second of --streams generations, with an adapter published every second, against the same without. Both ways
  take turns, --window-s seconds each.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from benchmarks.command_line import add_models, add_size
from benchmarks.figure import Aim, Figure, Report
from benchmarks.processes import model_folder
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import TrainedWeights
from tinsmith.rpc.channel import connect, wait_serving
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import types_pb2
from tinsmith.v1.sampler_pb2_grpc import SamplerServiceStub
from tinsmith.weight_channel.group import WeightGroup, join_store, open_store
from trainer_service.config import TrainerConfig
from trainer_service.metrics import Metrics
from trainer_service.weight_sync import Version, WeightSender
from trainer_service.weight_sync.choice import Channel

TIMEOUT_S = 60.0
WARM_UP = 2
RANK = 32
PERIOD_S = 1.0
CHANNELS: tuple[Channel, ...] = ("shm", "gloo")


def form(port: int, *, rank: int) -> WeightGroup:
    store = join_store("127.0.0.1", port, timeout_s=TIMEOUT_S)
    return WeightGroup.form(
        store, epoch=1, rank=rank, world_size=2, backend="gloo", host="127.0.0.1", timeout_s=TIMEOUT_S
    )


def receive_broadcasts(port: int, numel: int, rounds: int) -> None:
    """The other process of the baseline."""
    group, buffer = form(port, rank=1), torch.zeros(numel)
    for _ in range(rounds):
        group.broadcast(buffer)()


@contextmanager
def sampler(folder: Path, *, num_bytes: int) -> Iterator[str]:
    """Address of a sampler service with room for two full versions."""
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


class PublishBench:
    """One sampler, and a sender for each transport."""

    def __init__(self, folder: Path, address: str, stub: SamplerServiceStub, *, bucket_bytes: int) -> None:
        self.folder = folder
        self.stub = stub
        self.senders = {
            channel: WeightSender(
                TrainerConfig(
                    base_model="bench",
                    samplers=[address],
                    channel=channel,
                    channel_timeout_s=TIMEOUT_S,
                    channel_bucket_bytes=bucket_bytes,
                ),
                Metrics(CollectorRegistry()),
                trainer_id=channel,
            )
            for channel in CHANNELS
        }
        for sender in self.senders.values():
            sender.start()
        self._num_published = 0

    @classmethod
    @asynccontextmanager
    async def started(cls, folder: Path, *, num_bytes: int, bucket_bytes: int) -> AsyncIterator[PublishBench]:
        with sampler(folder, num_bytes=num_bytes) as address:
            async with connect(address) as channel:
                await wait_serving(channel, timeout_s=TIMEOUT_S)
                bench = cls(folder, address, SamplerServiceStub(channel), bucket_bytes=bucket_bytes)
                yield bench
                for sender in bench.senders.values():
                    await sender.close()

    async def publish(self, weights: Adapter | TrainedWeights, *, channel: Channel) -> str:
        self._num_published += 1
        version_id = f"m@{self._num_published}"
        sender = self.senders[channel]
        published = await sender.publish(Version(version_id, str(self.folder), weights))
        assert await sender.confirm(version_id, published.members) == published.members
        return version_id

    def request(self, version_id: str, *, tokens: int, seed: int) -> pb.SampleRequest:
        prompt = np.random.default_rng(seed).integers(1000, size=16).astype("<i4")
        return pb.SampleRequest(
            version_id=version_id,
            prompt=[types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=prompt.tobytes()))],
            num_samples=1,
            sampling_params=pb.SamplingParams(max_tokens=tokens, stop=pb.StopCondition()),
        )


async def seconds(work: object) -> float:
    begin = time.perf_counter()
    await work  # type: ignore[misc]
    return time.perf_counter() - begin


async def all_weights(bench: PublishBench, weights: TrainedWeights, *, rounds: int) -> list[Figure]:
    flat = weights.flat
    gigabytes = flat.nbytes / 1e9
    store = open_store("127.0.0.1", timeout_s=TIMEOUT_S)
    spawn = multiprocessing.get_context("spawn")
    arguments = (store.port, flat.numel(), rounds + WARM_UP)
    other = spawn.Process(target=receive_broadcasts, args=arguments, daemon=True)
    other.start()
    group = await asyncio.to_thread(form, store.port, rank=0)
    bare: list[float] = []
    published: dict[Channel, list[float]] = {channel: [] for channel in CHANNELS}
    for _ in range(rounds + WARM_UP):
        bare.append(gigabytes / await seconds(asyncio.to_thread(lambda: group.broadcast(flat)())))
        for channel in CHANNELS:
            published[channel].append(gigabytes / await seconds(bench.publish(weights, channel=channel)))
    other.join()
    print(f"{flat.numel() / 1e6:.1f} M parameters, {gigabytes:.3f} GB", flush=True)
    return [
        Figure(
            f"publish of all weights, {channel}",
            "GB/s",
            rates[WARM_UP:],
            "a bare gloo broadcast",
            bare[WARM_UP:],
            [Aim(0.6)],
        )
        for channel, rates in published.items()
    ]


async def first_token(bench: PublishBench, adapter: Adapter, *, rounds: int) -> list[Figure]:
    figures = []
    for channel in CHANNELS:
        known: list[float] = []
        new: list[float] = []
        version_id = await bench.publish(adapter, channel=channel)
        for n in range(rounds + WARM_UP):
            known.append(1e3 * await seconds(bench.stub.Sample(bench.request(version_id, tokens=1, seed=n))))
            begin = time.perf_counter()
            version_id = await bench.publish(adapter, channel=channel)
            await bench.stub.Sample(bench.request(version_id, tokens=1, seed=1000 + n))
            new.append(1e3 * (time.perf_counter() - begin))
        name = f"adapter of {adapter.num_bytes / 1e6:.1f} MB to first token, {channel}"
        figures.append(Figure(name, "ms", new[WARM_UP:], "a token of a known version", known[WARM_UP:]))
    return figures


async def while_publishing(
    bench: PublishBench, adapter: Adapter, *, rounds: int, window_s: float, streams: int
) -> list[Figure]:
    """Runs generations that use one version to their end, as a sampling client does."""
    version_id = await bench.publish(adapter, channel="shm")
    num_tokens = 0

    async def generate(seed: int) -> None:
        nonlocal num_tokens
        while True:
            seed += streams
            request = pb.StreamSampleRequest(request=bench.request(version_id, tokens=200, seed=seed))
            async for piece in bench.stub.StreamSample(request):
                num_tokens += len(piece.delta.tokens) // 4

    async def publish_on(channel: Channel) -> None:
        while True:
            await asyncio.gather(bench.publish(adapter, channel=channel), asyncio.sleep(PERIOD_S))

    async def rate(channel: Channel | None) -> float:
        publishing = asyncio.create_task(publish_on(channel)) if channel else None
        begin, before = time.perf_counter(), num_tokens
        await asyncio.sleep(window_s)
        found = (num_tokens - before) / (time.perf_counter() - begin)
        if publishing is not None:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
        return found

    generating = [asyncio.create_task(generate(seed)) for seed in range(streams)]
    await rate(None)
    figures = []
    for channel in CHANNELS:
        rates = [(await rate(channel), await rate(None)) for _ in range(rounds)]
        figures.append(
            Figure(
                f"{streams} generations, a publish by {channel} every second",
                "tokens/s",
                [disturbed for disturbed, _ in rates],
                "without",
                [quiet for _, quiet in rates],
                [Aim(0.9)],
            )
        )
    for task in generating:
        task.cancel()
    await asyncio.gather(*generating, return_exceptions=True)
    return figures


async def measure(folder: Path, report: Report, arguments: argparse.Namespace) -> None:
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32, trainable=True)
    adapter = Adapter.create(AdapterConfig(RANK), base.targets, torch.device("cpu"))
    weights = TrainedWeights.take(base)
    rounds = arguments.repeats
    options = {"num_bytes": weights.flat.nbytes + 8 * adapter.num_bytes, "bucket_bytes": arguments.bucket_mb * 1024**2}
    async with PublishBench.started(folder, **options) as bench:
        for figure in await all_weights(bench, weights, rounds=rounds):
            report.add(figure)
        for figure in await first_token(bench, adapter, rounds=rounds):
            report.add(figure)
        windows = {"window_s": arguments.window_s, "streams": arguments.streams}
        for figure in await while_publishing(bench, adapter, rounds=max(2, rounds // 2), **windows):
            report.add(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="small")
    add_models(parser)
    parser.add_argument("--repeats", type=int, default=10, help="rounds of a figure (%(default)s)")
    parser.add_argument("--bucket-mb", type=int, default=16, help="MiB of one bucket, for gloo")
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=8)


def run(arguments: argparse.Namespace, report: Report) -> None:
    folder = model_folder(arguments.size, arguments.models)
    torch.set_num_threads(1)
    asyncio.run(measure(folder, report, arguments))
