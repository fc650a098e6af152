"""Measures a running service through the official `tinker` SDK, from outside, as a user meets it.

    python -m benchmarks service --size small                  # makes a model, starts `tinsmith up`, stops it
    python -m benchmarks service --base-url URL --base-model NAME [--model-folder DIR]    # any Tinker service

The stack is as `tinsmith up` starts it by default, and the loop that it is compared with has all cores. Times depend on
the machine and on what else runs there, so each figure is taken in rounds that alternate with a baseline. README.md
says what each figure means.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import numpy as np
import tinker

from benchmarks.command_line import SIZES, add_models, add_only, add_rounds
from benchmarks.figure import Figure, Report, usable_cores
from benchmarks.processes import Baseline, MeasuredService, peak_rss_mb, started
from benchmarks.service.bench import RANK, ServiceBench
from benchmarks.service.many import many_samples, many_sessions
from benchmarks.service.requests import compute_gaps, first_requests, request_overhead
from benchmarks.service.rl import async_rl_iteration, rl_iteration
from benchmarks.service.sampling import publishing, sampling
from benchmarks.service.training import four_adapters, pipelined_step, training_throughput
from benchmarks.trainer.shapes import MODEL_SHAPES


def peak_memory(bench: ServiceBench) -> Iterator[Figure]:
    """Peak RSS of each service process, after all other figures."""
    loop = [peak_rss_mb(bench.hf.pid)] if bench.hf else []
    for name, pid in bench.target.service_pids().items():
        yield Figure(f"peak RSS, {name}", "MB", [peak_rss_mb(pid)], "the PEFT loop", loop)


FIGURES: dict[str, Callable[[ServiceBench], Iterator[Figure]]] = {
    measure.__name__: measure
    for measure in (
        first_requests,  # first, or they are not the first
        request_overhead,
        compute_gaps,
        training_throughput,
        pipelined_step,
        sampling,
        publishing,
        rl_iteration,
        async_rl_iteration,
        four_adapters,
        many_samples,
        many_sessions,
        peak_memory,  # last: the peak of all the others
    )
}


@contextmanager
def prepared(arguments: argparse.Namespace) -> Iterator[ServiceBench]:
    """The service to measure, clients for it, and the loop to compare it with."""
    with ExitStack() as stack:
        if arguments.size:
            threads = {"trainer_threads": arguments.trainer_threads, "sampler_threads": arguments.sampler_threads}
            target = stack.enter_context(started(arguments.size, models=arguments.models, **threads))
        else:
            target = MeasuredService(arguments.base_url, arguments.base_model, arguments.model_folder)
        folder = target.model_folder
        hf = stack.enter_context(closing(Baseline(folder, rank=RANK))) if folder and arguments.baseline else None
        login = {"base_url": target.url, "api_key": arguments.api_key}
        service, rest = tinker.ServiceClient(**login), tinker.RestClient(**login)
        capabilities = rest.get_server_capabilities().result()
        contexts = {one.model_name: one.max_context_length for one in capabilities.supported_models}
        if target.base_model not in contexts:
            raise SystemExit(f"--base-model: {target.base_model!r} is not served there; these are: {list(contexts)}")
        yield ServiceBench(
            target=target,
            service=service,
            trainer=service.create_lora_training_client(target.base_model, rank=RANK).result(),
            http=stack.enter_context(httpx.Client(base_url=target.url, headers={"x-api-key": arguments.api_key})),
            hf=hf,
            vocab=arguments.vocab
            or (json.loads((folder / "config.json").read_text())["vocab_size"] if folder else 2000),
            context=contexts[target.base_model] or 2048,
            api_key=arguments.api_key,
            loop_threads=arguments.loop_threads,
            repeats=arguments.repeats,
            budget_s=arguments.budget_s,
            rng=np.random.default_rng(0),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--size", choices=(*SIZES, *MODEL_SHAPES), help="make such a model and serve it")
    server.add_argument("--base-url", help="measure this server instead, which serves --base-model")
    add_models(parser)
    parser.add_argument("--base-model", help="name of the model on that server")
    parser.add_argument("--model-folder", type=Path, help="folder with that model's weights, for the baseline")
    parser.add_argument("--api-key", default="tml-bench")
    parser.add_argument("--vocab", type=int, help="limit of token ids (default: that of the model folder, or 2000)")
    parser.add_argument("--trainer-threads", type=int, help="(left to tinsmith up)")
    parser.add_argument("--sampler-threads", type=int, help="(left to tinsmith up)")
    parser.add_argument(
        "--loop-threads", type=int, default=usable_cores(), help="threads of the baseline loop (%(default)s)"
    )
    parser.add_argument(
        "--baseline", action=argparse.BooleanOptionalAction, default=True,
        help="compare with a padded PEFT loop, which needs its own memory beside the service's",
    )  # fmt: skip
    add_rounds(parser, repeats=10, budget_s=60.0)
    add_only(parser, FIGURES)


def run(arguments: argparse.Namespace, report: Report) -> None:
    if bool(arguments.base_url) != bool(arguments.base_model):
        raise SystemExit("--base-url and --base-model: give both or neither")
    with prepared(arguments) as bench:
        for name in FIGURES:
            if name in arguments.only:
                for figure in FIGURES[name](bench):
                    report.add(figure)
