"""Measures the training engine in this process: no service, no wire. README.md says what each figure means.

    python -m benchmarks trainer --size small
    python -m benchmarks trainer --model FOLDER --rank 32 --shapes 8x1024,ragged
    python -m benchmarks trainer --model-shape qwen3_5-small --only throughput --shapes 16x256,ragged
    python -m benchmarks trainer --model-shape qwen3-8b --device cuda --dtype bfloat16 --rank 32 --shapes 8x2048

Each figure (they lie in `trainer/`) is taken in rounds that alternate with what it is compared with: the machine's
matrix products, and a plain padded transformers + PEFT loop.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.command_line import SIZES, add_models, add_only, add_rounds
from benchmarks.figure import Figure, Report, usable_cores
from benchmarks.model_work import ModelWork, Peak
from benchmarks.processes import Baseline, model_folder
from benchmarks.trainer.bench import TrainerBench
from benchmarks.trainer.bfloat16 import bfloat16
from benchmarks.trainer.passes import co_batching, throughput
from benchmarks.trainer.prefixes import shared_prefixes
from benchmarks.trainer.shapes import HYBRID_SHAPES, MODEL_SHAPES, parse_shapes, qwen3_config
from benchmarks.trainer.state import finite_check, optimizer_step, resident_adapters
from tinsmith.allocator import keep_freed_memory
from tinsmith.modeling.base_model import BaseModel
from trainer_service.engine.engine import TrainingEngine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

FIGURES: dict[str, Callable[[TrainerBench], Iterator[Figure]]] = {
    measure.__name__: measure
    for measure in (resident_adapters, throughput, co_batching, shared_prefixes, bfloat16, optimizer_step, finite_check)
}


def load(arguments: argparse.Namespace) -> tuple[BaseModel, Path | None]:
    """The base model, and its folder when there is one."""
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    if arguments.model_shape in MODEL_SHAPES:
        config = qwen3_config(arguments.model_shape)
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        return BaseModel.of(model, path=arguments.model_shape, kernels=arguments.kernels), None
    folder = arguments.model
    if name := arguments.model_shape or arguments.size:
        folder = model_folder(name, arguments.models)
    full = arguments.rank == 0
    return BaseModel.load(folder, device=device, dtype=dtype, kernels=arguments.kernels, trainable=full), folder


@contextmanager
def prepared(arguments: argparse.Namespace) -> Iterator[TrainerBench]:
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cpu":
        keep_freed_memory()  # as the service does
    with ExitStack() as stack:
        base, folder = load(arguments)
        hf = None
        if folder is not None and arguments.baseline:
            hf = stack.enter_context(closing(Baseline(folder, rank=arguments.rank)))
        yield TrainerBench(
            engine=TrainingEngine(base, max_tokens_per_microbatch=arguments.max_tokens),
            rank=arguments.rank,
            shapes=arguments.shapes,
            num_adapters=arguments.adapters,
            num_prompts=arguments.prompts,
            threads=arguments.threads,
            hf=hf,
            work=None if base.recurrent else ModelWork.of(base),
            peak=Peak(base, rows=min(4096, arguments.max_tokens)),
            repeats=arguments.repeats,
            budget_s=arguments.budget_s,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cuda = torch.cuda.is_available()
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--size", choices=SIZES, help="make such a model")
    model.add_argument("--model", type=Path, metavar="FOLDER", help="take these weights")
    model.add_argument(
        "--model-shape",
        choices=[*MODEL_SHAPES, *HYBRID_SHAPES],
        help="random weights of this shape; those of Qwen3 are made on the device",
    )
    add_models(parser)
    parser.add_argument("--device", default="cuda" if cuda else "cpu", help="(%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32", help="(%(default)s)")
    parser.add_argument(
        "--kernels",
        choices=("auto", "plain", "compiled", "liger"),
        default="auto",
        help="as the trainer's setting (%(default)s)",
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=16,
        help="rank of every adapter (%(default)s); 0 trains all parameters, which finite_check can do",
    )
    parser.add_argument(
        "--shapes", type=parse_shapes, default="16x256,8x1024,ragged", metavar="COUNTxLENGTH|ragged,...",
        help="batches (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--adapters", type=int, default=16, help="number of adapters in co_batching (%(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of shared_prefixes (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=4096, help="largest number of tokens in a micro-batch (%(default)s)"
    )
    parser.add_argument("--threads", type=int, default=usable_cores(), help="(%(default)s)")
    parser.add_argument(
        "--baseline", action=argparse.BooleanOptionalAction, default=True,
        help="compare with a padded PEFT loop; a --model-shape of Qwen3 has none",
    )  # fmt: skip
    add_rounds(parser, repeats=5, budget_s=60.0)
    add_only(parser, FIGURES)


def run(arguments: argparse.Namespace, report: Report) -> None:
    if "OMP_WAIT_POLICY" not in os.environ:  # OpenMP reads it when it is loaded; as `tinsmith up` sets it
        again = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})  # noqa: S606
    with prepared(arguments) as bench:
        (m, k, n), best = bench.peak.shape, bench.peak.rates[bench.peak.shape]
        report.settings["peak"] = f"{best / 1e9:.0f} GFLOP/s, torch.mm of [{m}, {k}] and [{k}, {n}]"
        report.settings["kernels"] = f"{arguments.kernels}: {bench.engine.base.kernels}"
        if bench.device.type == "cuda":
            report.settings["gpu"] = torch.cuda.get_device_name(bench.device)
        print(f"matrix-product peak: {report.settings['peak']}", flush=True)
        print(f"kernels: {report.settings['kernels']}", flush=True)
        for name in FIGURES:
            if name in arguments.only:
                for figure in FIGURES[name](bench):
                    report.add(figure)
