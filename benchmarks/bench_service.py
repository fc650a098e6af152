"""Measures a running service through the official `tinker` SDK, from outside, as a user meets it.

    python benchmarks/bench_service.py --size small                  # makes a model, starts `tinsmith up`, stops it
    python benchmarks/bench_service.py --base-url URL --base-model NAME [--model-folder DIR]    # any Tinker service

Times depend on the machine and on what else runs there, so each figure is taken in rounds that alternate with a
baseline, and its ratio is the median over the rounds. README.md says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import httpx
import numpy as np
import tinker
from figure import Figure, Report, usable_cores
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import Baseline, Target, peak_rss_mb, started
from rounds import MIN_ROUNDS, alternate, ms, seconds
from tinker import types

from tinsmith.rpc.server import RAN
from tinsmith.rpc.tensors import from_numpy
from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc, types_pb2

RANK = 32
LATENCY_ROUNDS = 4
"""Rounds of a latency figure for each round of a throughput figure."""

Run = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Bench:
    """What every figure needs."""

    target: Target
    service: tinker.ServiceClient
    trainer: tinker.TrainingClient
    http: httpx.Client
    hf: Baseline | None
    vocab: int
    context: int
    trainer_threads: int
    sampler_threads: int
    repeats: int
    budget_s: float
    rng: np.random.Generator

    def rounds(self, *runs: Run, repeats: int) -> list[list[float]]:
        """The values of each run. A figure takes about `budget_s` seconds at most, but never fewer than MIN_ROUNDS."""
        return alternate(runs, repeats=repeats, budget_s=self.budget_s)

    def latencies(self, *runs: Run) -> list[list[float]]:
        return self.rounds(*runs, repeats=LATENCY_ROUNDS * self.repeats)

    def against_hf(
        self, name: str, unit: str, run: Run, theirs: Callable[[Baseline], float], *, loop: str = "a padded PEFT loop"
    ) -> Figure:
        """The service is idle while the loop computes, and the other way round."""
        if (hf := self.hf) is None:
            (values,) = self.rounds(run, repeats=self.repeats)
            return Figure(name, unit, values)
        base, values = self.rounds(lambda: theirs(hf), run, repeats=self.repeats)
        return Figure(name, unit, values, loop, base)

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(self.vocab, size=count).tolist()

    def prompt(self, length: int) -> types.ModelInput:
        return types.ModelInput.from_ints(self.tokens(length))

    def datum(self, length: int) -> types.Datum:
        targets = types.TensorData(data=self.tokens(length), dtype="int64", shape=[length])
        weights = types.TensorData(data=[1.0] * length, dtype="float32", shape=[length])
        return types.Datum(self.prompt(length), {"target_tokens": targets, "weights": weights})

    def batch(self, lengths: Sequence[int]) -> list[types.Datum]:
        return [self.datum(length) for length in lengths]

    def healthz_ms(self) -> float:
        return ms(lambda: self.http.get("/api/v1/healthz").raise_for_status())


def forward(trainer: tinker.TrainingClient, data: list[types.Datum]) -> None:
    trainer.forward(data, "cross_entropy").result()


def forward_backward(trainer: tinker.TrainingClient, data: list[types.Datum]) -> None:
    trainer.forward_backward(data, "cross_entropy").result()


def optim_step(trainer: tinker.TrainingClient) -> None:
    trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()


def train_step(trainer: tinker.TrainingClient, data: list[types.Datum]) -> None:
    """Both are submitted before either is waited for."""
    losses = trainer.forward_backward(data, "cross_entropy")
    step = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
    losses.result()
    step.result()


def results(futures: Sequence[Any]) -> None:
    for future in futures:
        future.result()


def publish(trainer: tinker.TrainingClient) -> tinker.SamplingClient:
    return trainer.save_weights_and_get_sampling_client().result()


def sample(sampler: tinker.SamplingClient, prompts: Sequence[types.ModelInput], *, samples: int, tokens: int) -> int:
    """Submits all prompts at once; returns the number of tokens that came."""
    params = types.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[])  # nothing ends a sequence early
    futures = [sampler.sample(prompt, samples, params) for prompt in prompts]
    return sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)


def first_requests(bench: Bench) -> Iterator[Figure]:
    """The first forward_backward and the first sample after the start, against the same ones later."""
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
        yield Figure(name, "ms", [first], "the same later", [median(later)], aim="no pause")


def request_overhead(bench: Bench) -> Iterator[Figure]:
    """Requests that compute next to nothing, from submission to result."""
    tiny = bench.batch([8])

    def optim_step_ms() -> float:
        forward_backward(bench.trainer, tiny)  # so that there is a gradient to apply
        return ms(lambda: optim_step(bench.trainer))

    def pipelined_ms() -> float:
        return ms(lambda: results([bench.trainer.forward_backward(tiny, "cross_entropy") for _ in range(100)]))

    http, trivial, gradient, step = bench.latencies(
        bench.healthz_ms,
        lambda: ms(lambda: forward(bench.trainer, tiny)),
        lambda: ms(lambda: forward_backward(bench.trainer, tiny)),
        optim_step_ms,
    )
    yield Figure("forward of 8 tokens", "ms", trivial, "HTTP GET healthz", http, aim="small: under 20 ms")
    yield Figure("forward_backward of 8 tokens", "ms", gradient, "HTTP GET healthz", http, aim="tiny: under 12 ms")
    yield Figure("optim_step", "ms", step, "HTTP GET healthz", http)
    one_by_one, together = bench.rounds(
        lambda: 100 * ms(lambda: forward_backward(bench.trainer, tiny)), pipelined_ms, repeats=bench.repeats
    )
    yield Figure("100 pipelined", "ms", together, "100 x one alone", one_by_one, aim="tiny: under 500 ms")
    if bench.target.grpc_address:
        with grpc.insecure_channel(bench.target.grpc_address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods are made at run time
            check = health_pb2.HealthCheckRequest()
            http, rpc = bench.latencies(bench.healthz_ms, lambda: ms(lambda: stub.Check(check)))
        yield Figure("bare gRPC health check", "ms", rpc, "HTTP GET healthz", http)


def compute_gaps(bench: Bench) -> Iterator[Figure]:
    """What the trainer's compute thread does between a batch and the step behind it, by its own account over gRPC."""
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


def _pipelined_spans(stub: Any, bench: Bench, *, num_steps: int) -> list[tuple[float, float]]:
    """When each batch and each step began and ended, in their order; all are sent before the first is waited for."""
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


def training_throughput(bench: Bench) -> Iterator[Figure]:
    """forward_backward in real tokens per second: padding does not count."""
    ragged = np.exp(bench.rng.uniform(np.log(16), np.log(1024), size=16)).astype(int).clip(max=bench.context).tolist()
    for name, lengths in {"16x256": [256] * 16, "8x1024": [1024] * 8, "16 of 16..1024": ragged}.items():
        if max(lengths) > bench.context:
            print(f"forward_backward, {name}: skipped, the context is {bench.context} tokens", flush=True)
            continue
        yield _forward_backward_rate(bench, name, lengths)


def _forward_backward_rate(bench: Bench, name: str, lengths: list[int]) -> Figure:
    data, num_tokens = bench.batch(lengths), sum(lengths)
    return bench.against_hf(
        f"forward_backward, {name}",
        "tokens/s",
        lambda: num_tokens / seconds(lambda: forward_backward(bench.trainer, data)),
        lambda hf: num_tokens / hf.seconds(do="train", lengths=lengths, threads=bench.trainer_threads),
    )


def pipelined_step(bench: Bench) -> Iterator[Figure]:
    """forward_backward and optim_step submitted together, against one after the other."""
    data = bench.batch([256] * 4)
    losses, step, together = bench.rounds(
        lambda: ms(lambda: forward_backward(bench.trainer, data)),
        lambda: ms(lambda: optim_step(bench.trainer)),
        lambda: ms(lambda: train_step(bench.trainer, data)),
        repeats=2 * bench.repeats,
    )
    one_by_one = [first + second for first, second in zip(losses, step, strict=True)]
    yield Figure("pipelined step, 4x256", "ms", together, "one after the other", one_by_one)


def sampling(bench: Bench) -> Iterator[Figure]:
    """Generation from a published adapter, with new prompts each time, so that no prefix cache helps."""
    sampler = publish(bench.trainer)

    def tokens_per_s() -> float:
        prompts = [bench.prompt(64) for _ in range(8)]
        begin = time.perf_counter()
        return sample(sampler, prompts, samples=8, tokens=64) / (time.perf_counter() - begin)

    def latency_ms(prompt_length: int, tokens: int) -> float:
        prompt = bench.prompt(prompt_length)
        return ms(lambda: sample(sampler, [prompt], samples=1, tokens=tokens))

    def hf_seconds(hf: Baseline, **shape: int) -> float:
        return hf.seconds(do="generate", prompt_tokens=64, threads=bench.sampler_threads, **shape)

    yield bench.against_hf(
        "sample, 8 prompts x 8 samples, 64+64",
        "tokens/s",
        tokens_per_s,
        lambda hf: 8 * 8 * 64 / hf_seconds(hf, prompts=8, samples=8, new_tokens=64),
        loop="PEFT generate()",
    )
    yield bench.against_hf(
        "one sample, 64+32",
        "ms",
        lambda: latency_ms(64, 32),
        lambda hf: 1e3 * hf_seconds(hf, prompts=1, samples=1, new_tokens=32),
        loop="PEFT generate()",
    )
    http, first_token = bench.latencies(bench.healthz_ms, lambda: latency_ms(8, 1))
    yield Figure("one sample, 8+1", "ms", first_token, "HTTP GET healthz", http)


def publishing(bench: Bench) -> Iterator[Figure]:
    """From a finished optim_step to a new sampling client, and to a token from it."""
    tiny, prompt = bench.batch([8]), bench.prompt(8)

    def with_new_weights(work: Callable[[], object]) -> float:
        train_step(bench.trainer, tiny)
        return ms(work)

    trivial, alone, first_token = bench.rounds(
        lambda: ms(lambda: forward(bench.trainer, tiny)),
        lambda: with_new_weights(lambda: publish(bench.trainer)),
        lambda: with_new_weights(lambda: sample(publish(bench.trainer), [prompt], samples=1, tokens=1)),
        repeats=2 * bench.repeats,
    )
    yield Figure("publish", "ms", alone, "forward of 8 tokens", trivial)
    yield Figure("publish to first token", "ms", first_token, "forward of 8 tokens", trivial, aim="small: under 150 ms")


def four_adapters(bench: Bench) -> Iterator[Figure]:
    """Four clients at once, each with its own adapter, against one client that does all of it in sequence."""
    data, base_model = bench.batch([256] * 4), bench.target.base_model
    creating = [bench.service.create_lora_training_client(base_model, rank=rank) for rank in (8, 16, 32, 64)]
    trainers = [future.result() for future in creating]
    num_tokens = len(trainers) * 4 * 256

    def in_sequence() -> None:
        for _ in trainers:
            train_step(bench.trainer, data)

    with ThreadPoolExecutor(len(trainers)) as threads:
        alone, at_once = bench.rounds(
            lambda: num_tokens / seconds(in_sequence),
            lambda: (
                num_tokens / seconds(lambda: list(threads.map(lambda trainer: train_step(trainer, data), trainers)))
            ),
            repeats=bench.repeats,
        )
    yield Figure("four adapters at once, 4x256 each", "tokens/s", at_once, "one adapter in sequence", alone)


def peak_memory(bench: Bench) -> Iterator[Figure]:
    """Peak RSS of each service process, after everything above."""
    loop = [peak_rss_mb(bench.hf.pid)] if bench.hf else []
    for name, pid in bench.target.service_pids().items():
        yield Figure(f"peak RSS, {name}", "MB", [peak_rss_mb(pid)], "the PEFT loop", loop)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    measure.__name__: measure
    for measure in (
        first_requests,  # first, or they are not the first
        request_overhead,
        compute_gaps,
        training_throughput,
        pipelined_step,
        sampling,
        publishing,
        four_adapters,
        peak_memory,  # last: the peak of all the others
    )
}


@contextmanager
def prepared(arguments: argparse.Namespace) -> Iterator[Bench]:
    """The service to measure, clients for it, and the loop to compare it with."""
    with ExitStack() as stack:
        if arguments.size:
            threads = {"trainer_threads": arguments.trainer_threads, "sampler_threads": arguments.sampler_threads}
            target = stack.enter_context(started(arguments.size, models=arguments.models, **threads))
        else:
            target = Target(arguments.base_url, arguments.base_model, arguments.model_folder)
        folder = target.model_folder
        hf = stack.enter_context(closing(Baseline(folder, rank=RANK))) if folder else None
        login = {"base_url": target.url, "api_key": arguments.api_key}
        service, rest = tinker.ServiceClient(**login), tinker.RestClient(**login)
        capabilities = rest.get_server_capabilities().result()
        contexts = {one.model_name: one.max_context_length for one in capabilities.supported_models}
        if target.base_model not in contexts:
            raise SystemExit(f"--base-model: {target.base_model!r} is not served there; these are: {list(contexts)}")
        yield Bench(
            target=target,
            service=service,
            trainer=service.create_lora_training_client(target.base_model, rank=RANK).result(),
            http=stack.enter_context(httpx.Client(base_url=target.url, headers={"x-api-key": arguments.api_key})),
            hf=hf,
            vocab=arguments.vocab
            or (json.loads((folder / "config.json").read_text())["vocab_size"] if folder else 2000),
            context=contexts[target.base_model] or 2048,
            trainer_threads=arguments.trainer_threads,
            sampler_threads=arguments.sampler_threads,
            repeats=arguments.repeats,
            budget_s=arguments.budget_s,
            rng=np.random.default_rng(0),
        )


def parse_arguments() -> argparse.Namespace:
    cores = usable_cores()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "small", "medium"), help="make such a model and serve it")
    parser.add_argument("--models", type=Path, default=Path("~/.cache/tinsmith-bench"), help="where (%(default)s)")
    parser.add_argument("--base-url", help="measure this server instead")
    parser.add_argument("--base-model", help="the model's name there")
    parser.add_argument("--model-folder", type=Path, help="its weights here, for the baseline")
    parser.add_argument("--api-key", default="tml-bench")
    parser.add_argument("--vocab", type=int, help="token ids are below this (the model folder's, or 2000)")
    parser.add_argument("--trainer-threads", type=int, default=max(1, cores // 2), help="(%(default)s)")
    parser.add_argument("--sampler-threads", type=int, default=max(1, cores - cores // 2), help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="rounds of a figure (%(default)s)")
    parser.add_argument(
        "--budget-s", type=float, default=60.0, help=f"its seconds, past {MIN_ROUNDS} rounds (%(default)s)"
    )
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), help="measure these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    arguments = parser.parse_args()
    if bool(arguments.size) == bool(arguments.base_url) or bool(arguments.base_url) != bool(arguments.base_model):
        parser.error("give either --size, or --base-url and --base-model")
    return arguments


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    arguments = parse_arguments()
    report = Report({name: str(value) for name, value in vars(arguments).items() if name != "api_key"})
    with report.kept(arguments.json), prepared(arguments) as bench:
        for name in FIGURES:
            if name in arguments.only:
                for figure in FIGURES[name](bench):
                    report.add(figure)


if __name__ == "__main__":
    main()
