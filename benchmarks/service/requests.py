"""Single requests: the first ones, those that compute next to nothing, and the gaps between them."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.figure import Aim, Figure
from benchmarks.rounds import ms
from benchmarks.service.bench import (
    RANK,
    Run,
    ServiceBench,
    forward,
    forward_backward,
    optim_step,
    pipelined,
    results,
    sample,
)
from tinsmith.rpc.server import RAN
from tinsmith.rpc.tensors import from_numpy
from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc, types_pb2


def first_requests(bench: ServiceBench) -> Iterator[Figure]:
    """The first forward_backward and the first sample after the start, compared with later ones."""
    if bench.target.up is None:
        print("first_requests: skipped, the server was already running", flush=True)
        return
    data, prompt = bench.batch([64] * 4), bench.prompt(64)
    sampler = bench.service.create_sampling_client(base_model=bench.target.base_model).result()
    runs: dict[str, Run] = {
        "first forward_backward, 4x64": lambda: ms(lambda: forward_backward(bench.trainer, data)),
        "first sample, 64+8": lambda: ms(lambda: sample(sampler, [prompt], samples=1, tokens=8)),
    }
    for name, run in runs.items():
        first = run()
        (later,) = bench.latencies(run)
        yield Figure(name, "ms", [first], "the same later", [median(later)])


def request_overhead(bench: ServiceBench) -> Iterator[Figure]:
    """Requests that compute next to nothing, from submission to result."""
    tiny = bench.batch([8])

    def optim_step_ms() -> float:
        forward_backward(bench.trainer, tiny)  # so that there is a gradient to apply
        return ms(lambda: optim_step(bench.trainer))

    http, trivial, gradient, step = bench.latencies(
        bench.healthz_ms,
        lambda: ms(lambda: forward(bench.trainer, tiny)),
        lambda: ms(lambda: forward_backward(bench.trainer, tiny)),
        optim_step_ms,
    )
    yield Figure("forward of 8 tokens", "ms", trivial, "HTTP GET healthz", http)
    yield Figure(
        "forward_backward of 8 tokens",
        "ms",
        gradient,
        "HTTP GET healthz",
        http,
        aims=[Aim(12, "ms", at_most=True, model="tiny"), Aim(30, "ms", at_most=True, model="small")],
    )
    yield Figure("optim_step", "ms", step, "HTTP GET healthz", http)
    one_by_one, together = bench.rounds(
        lambda: 100 * ms(lambda: forward_backward(bench.trainer, tiny)),
        lambda: ms(lambda: pipelined(bench.trainer, tiny, count=100)),
        repeats=bench.repeats,
    )
    yield Figure(
        "100 pipelined",
        "ms",
        together,
        "100 x one alone",
        one_by_one,
        aims=[Aim(500, "ms", at_most=True, model="tiny")],
    )
    if bench.target.grpc_address:
        with grpc.insecure_channel(bench.target.grpc_address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods are made at run time
            check = health_pb2.HealthCheckRequest()
            http, rpc = bench.latencies(bench.healthz_ms, lambda: ms(lambda: stub.Check(check)))
        yield Figure("bare gRPC health check", "ms", rpc, "HTTP GET healthz", http)


def compute_gaps(bench: ServiceBench) -> Iterator[Figure]:
    """Time of the trainer's compute thread between a batch and the step after it, as the trainer reports it over
    gRPC."""
    if not bench.target.grpc_address:
        print("compute_gaps: skipped, the trainer is reached through the gateway only", flush=True)
        return
    num_steps = 100
    with grpc.insecure_channel(bench.target.grpc_address) as channel:
        spans = _pipelined_spans(trainer_pb2_grpc.TrainerServiceStub(channel), bench, num_steps=num_steps)
    batches, steps = spans[::2], spans[1::2]
    yield Figure(
        "from a batch of 8 tokens to its step",
        "ms",
        [1e3 * (step[0] - batch[1]) for batch, step in zip(batches, steps, strict=True)],
        "the step",
        [1e3 * (end - start) for start, end in steps],
    )
    busy_s = sum(end - start for start, end in spans)
    yield Figure(f"idle in {num_steps} pipelined steps", "%", [100 * (1 - busy_s / (spans[-1][1] - spans[0][0]))])


def _pipelined_spans(stub: Any, bench: ServiceBench, *, num_steps: int) -> list[tuple[float, float]]:
    """Begin and end of each batch and each step, in order. All are sent before the first is waited for."""
    model_id = "bench:train:0"
    lora = types_pb2.LoraConfig(rank=RANK, train_unembed=True, train_mlp=True, train_attn=True)
    stub.CreateModel(
        trainer_pb2.CreateModelRequest(model_id=model_id, base_model=bench.target.base_model, lora_config=lora)
    )
    chunk = types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=np.array(bench.tokens(8), "<i4").tobytes()))
    targets = {"target_tokens": from_numpy(np.array(bench.tokens(8)))}
    batch = types_pb2.Datum(model_input=[chunk], loss_fn_inputs=targets)
    adam = trainer_pb2.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
    calls = []
    for seq_id in range(1, 2 * num_steps, 2):
        ids = {"model_id": model_id, "seq_id": seq_id}
        request = trainer_pb2.ForwardBackwardRequest(**ids, data=[batch], loss_fn="cross_entropy")
        calls.append(stub.ForwardBackward.future(request))
        calls.append(
            stub.OptimStep.future(trainer_pb2.OptimStepRequest(**{**ids, "seq_id": seq_id + 1}, adam_params=adam))
        )
    results(calls)
    stub.DeleteModel(trainer_pb2.DeleteModelRequest(model_id=model_id))
    ran = [dict(call.trailing_metadata())[RAN].split(":") for call in calls]
    return [(float(start), float(end)) for start, end in ran]
