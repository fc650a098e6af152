"""Measures the training engine in this process: no service, no wire. README.md says what each figure means.

    python benchmarks/bench_trainer.py --size small
    python benchmarks/bench_trainer.py --model FOLDER --rank 32 --shapes 8x1024,ragged
    python benchmarks/bench_trainer.py --model-shape qwen3-8b --device cuda --dtype bfloat16 --rank 32 --shapes 8x2048

Each figure is taken in rounds that alternate with what it is compared with: the machine's matrix products, and a plain
padded transformers + PEFT loop.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from figure import Figure, Report, usable_cores
from model_work import ModelWork, Peak, synchronize
from processes import TINSMITH, Baseline
from transformers import AutoModelForCausalLM, Qwen3Config

from tinsmith.allocator import give_back_freed_memory, keep_freed_memory
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from trainer_service.engine.batch import Batch, Datum, Output
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.optimizers import AdamParams
from trainer_service.objectives.losses import LOSS_FNS

MIN_ROUNDS = 3
ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    },
}
"""Qwen3 models as published (the tiny one is ours), filled with random weights on the device."""

Run = Callable[[], float]


@dataclass(slots=True)
class Bench:
    """What every figure needs."""

    engine: TrainingEngine
    rank: int
    shapes: dict[str, list[int]]
    """Lengths of the sequences of a batch, by the name of the shape."""
    num_adapters: int
    threads: int
    hf: Baseline | None
    work: ModelWork
    peak: Peak
    repeats: int
    budget_s: float
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def device(self) -> torch.device:
        return self.engine.base.device

    def rounds(self, *runs: Run) -> list[list[float]]:
        """The values of each run, one after the other in each round. About `budget_s` seconds, but MIN_ROUNDS at least;
        a round before them warms up."""
        for run in runs:
            run()
        begin, rows = time.perf_counter(), []
        while len(rows) < self.repeats and (len(rows) < MIN_ROUNDS or time.perf_counter() - begin < self.budget_s):
            rows.append([run() for run in runs])
        return [list(column) for column in zip(*rows, strict=True)]

    def create(self, model_id: str) -> str:
        self.engine.create_model(model_id, AdapterConfig(rank=self.rank, seed=len(model_id)), "adamw")
        return model_id

    def adapter(self) -> Adapter:
        """Like those that `create` makes."""
        return Adapter.create(AdapterConfig(rank=self.rank), self.engine.base.targets, self.device)

    def batch(self, lengths: Sequence[int]) -> Batch:
        """Random tokens and targets, all of which count."""
        loss, vocab = LOSS_FNS["cross_entropy"], self.engine.base.vocab_size
        return Batch(
            loss_fn="cross_entropy",
            loss=loss,
            loss_config=loss.config,
            forward_only=False,
            datums=[
                Datum(
                    tokens_N=self.rng.integers(vocab, size=length).astype(np.int32),
                    targets=self.rng.integers(vocab, size=length),
                    inputs={"weights": np.ones(length, np.float32)},
                )
                for length in lengths
            ],
        )

    def forward_backward(self, works: Sequence[tuple[str, Batch]]) -> None:
        for result in self.engine.forward_backward(works):
            if not isinstance(result, Output):
                raise result

    def seconds(self, work: Callable[[], object]) -> float:
        """Wall clock, to the end of what the device does."""
        synchronize(self.device)
        begin = time.perf_counter()
        work()
        synchronize(self.device)
        return time.perf_counter() - begin


def throughput(bench: Bench) -> Iterator[Figure]:
    """forward_backward of one adapter, in real tokens per second (padding does not count) and as a part of peak."""
    model_id = bench.create("throughput")
    for name, lengths in bench.shapes.items():
        works, num_tokens = [(model_id, bench.batch(lengths))], sum(lengths)
        reset_peak_memory(bench.device)
        runs: list[Run] = [bench.peak, lambda works=works: bench.seconds(lambda: bench.forward_backward(works))]
        if bench.hf is not None:
            runs.append(partial(bench.hf.seconds, do="train", lengths=lengths, threads=bench.threads))
        peak, ours, *theirs = bench.rounds(*runs)
        rates = [num_tokens / one for one in ours]
        loop = [num_tokens / one for one in theirs[0]] if theirs else []
        yield Figure(
            f"forward_backward, {name}",
            "tokens/s",
            rates,
            "a padded PEFT loop" if loop else "",
            loop,
            aim=_PEFT_AIMS.get(name, ""),
        )
        flop = bench.work.flop(lengths, rank=bench.rank)
        yield Figure(
            f"useful work, {name}",
            "GFLOP/s",
            [flop / one / 1e9 for one in ours],
            "matrix-product peak",
            [one / 1e9 for one in peak],
            aim="CUDA: over 0.45" if bench.device.type == "cuda" else "small 0.65, medium 0.8",
        )
        yield Figure(f"peak memory, {name}", "MB", [peak_memory_mb(bench.device)])
    bench.engine.delete_model(model_id)


_PEFT_AIMS = {"16x256": "small 1.25, medium 1.1", "ragged": "3"}


def co_batching(bench: Bench) -> Iterator[Figure]:
    """One sequence for each of many adapters in one call, against as many sequences of one adapter."""
    count = bench.num_adapters
    for lengths in bench.shapes.values():
        if len(set(lengths)) > 1:
            continue
        length = lengths[0]
        many = [(bench.create(f"many-{n}"), bench.batch([length])) for n in range(count)]
        one = [(bench.create("one"), bench.batch([length] * count))]
        alone, together = bench.rounds(
            lambda one=one: 1e3 * bench.seconds(lambda: bench.forward_backward(one)),
            lambda many=many: 1e3 * bench.seconds(lambda: bench.forward_backward(many)),
        )
        yield Figure(
            f"{count} adapters x 1 x {length}", "ms", together, f"1 adapter x {count} x {length}", alone, aim="1.15"
        )
        for model_id, _ in (*many, *one):
            bench.engine.delete_model(model_id)


def optimizer_step(bench: Bench) -> Iterator[Figure]:
    """optim_step (gradient clipping, AdamW and clearing the gradients), against stock AdamW on the same tensors."""
    model_id = bench.create("step")
    adapter = bench.adapter()
    parameters = [torch.nn.Parameter(tensor) for tensor in adapter.tensors()]
    stock = torch.optim.AdamW(parameters, lr=ADAM.learning_rate)

    def stock_step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, ADAM.grad_clip_norm)
        stock.step()
        torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    theirs, ours = bench.rounds(
        lambda: 1e3 * bench.seconds(stock_step),
        lambda: 1e3 * bench.seconds(lambda: bench.engine.optim_step(model_id, ADAM)),
    )
    size = f"{adapter.flat.numel() / 1e6:.3g} M parameters"
    yield Figure(f"optim_step, {size}", "ms", ours, "torch.optim.AdamW, tensor by tensor", theirs)
    bench.engine.delete_model(model_id)


def resident_adapters(bench: Bench) -> Iterator[Figure]:
    """Memory of 64 adapters that have each taken a step, against their parameters, two moments and gradients."""
    num_models, length = 64, min(64, *(min(lengths) for lengths in bench.shapes.values()))
    batch = bench.batch([length])
    warm = bench.create("warm")  # what the first call needs, it needs once
    bench.forward_backward([(warm, batch)])
    bench.engine.optim_step(warm, ADAM)
    own = 4 * num_models * bench.adapter().flat.nbytes / 1e6
    before = resident_mb(bench.device)
    for n in range(num_models):
        model_id = bench.create(f"resident-{n}")
        bench.forward_backward([(model_id, batch)])
        bench.engine.optim_step(model_id, ADAM)
        bench.forward_backward([(model_id, batch)])  # so that it has gradients too
    grown = resident_mb(bench.device) - before
    yield Figure(f"{num_models} adapters resident", "MB", [grown], "their own state", [own], aim="1.05")
    for n in range(num_models):
        bench.engine.delete_model(f"resident-{n}")
    bench.engine.delete_model(warm)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    measure.__name__: measure for measure in (resident_adapters, throughput, co_batching, optimizer_step)
}


def reset_peak_memory(device: torch.device) -> None:
    """Of a CPU process nothing: the peak is that of its life so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> float:
    """Most memory held: on CUDA in tensors, since reset_peak_memory; on a CPU by the process, ever."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def resident_mb(device: torch.device) -> float:
    """Memory held now."""
    if device.type == "cuda":
        synchronize(device)
        return torch.cuda.memory_allocated(device) / 1e6
    gc.collect()
    give_back_freed_memory()  # or new state would find room there and seem to cost nothing
    return psutil.Process().memory_info().rss / 1e6


def load(arguments: argparse.Namespace) -> tuple[BaseModel, Path | None]:
    """The base model, and its folder when there is one."""
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    if arguments.model_shape:
        config = Qwen3Config(head_dim=128, max_position_embeddings=40960, **MODEL_SHAPES[arguments.model_shape])
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        return BaseModel.of(model, path=arguments.model_shape, kernels=arguments.kernels), None
    folder = arguments.model
    if arguments.size:
        folder = arguments.models.expanduser() / arguments.size
        make = [*TINSMITH, "make-base-model", "--size", arguments.size, "--out", str(folder)]
        subprocess.run(make, check=True)  # noqa: S603
    return BaseModel.load(folder, device=device, dtype=dtype, kernels=arguments.kernels), folder


@contextmanager
def prepared(arguments: argparse.Namespace) -> Iterator[Bench]:
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cpu":
        keep_freed_memory()  # as the service does
    with ExitStack() as stack:
        base, folder = load(arguments)
        hf = None
        if folder is not None and arguments.baseline:
            hf = stack.enter_context(closing(Baseline(folder, rank=arguments.rank)))
        yield Bench(
            engine=TrainingEngine(base, max_tokens_per_microbatch=arguments.max_tokens),
            rank=arguments.rank,
            shapes=arguments.shapes,
            num_adapters=arguments.adapters,
            threads=arguments.threads,
            hf=hf,
            work=ModelWork.of(base),
            peak=Peak(base, rows=min(4096, arguments.max_tokens)),
            repeats=arguments.repeats,
            budget_s=arguments.budget_s,
        )


def parse_shapes(text: str) -> dict[str, list[int]]:
    """ "16x256,ragged" -> lengths by name; ragged is 16 sequences of 16..1024 tokens, log-uniformly."""
    shapes = {}
    for name in text.split(","):
        if name == "ragged":
            drawn = np.random.default_rng(0).uniform(np.log(16), np.log(1024), size=16)
            shapes[name] = np.exp(drawn).astype(int).tolist()
            continue
        count, _, length = name.partition("x")
        if not (count.isdigit() and length.isdigit() and int(count) and int(length)):
            raise argparse.ArgumentTypeError(f"{name!r} is neither COUNTxLENGTH, such as 16x256, nor ragged")
        shapes[name] = [int(length)] * int(count)
    return shapes


def parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--size", choices=("tiny", "small", "medium"), help="make such a model")
    model.add_argument("--model", type=Path, metavar="FOLDER", help="take these weights")
    model.add_argument("--model-shape", choices=MODEL_SHAPES, help="random weights of this shape, made on the device")
    parser.add_argument("--models", type=Path, default=Path("~/.cache/tinsmith-bench"), help="where (%(default)s)")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", help="(%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32", help="(%(default)s)")
    parser.add_argument(
        "--kernels",
        choices=("auto", "plain", "compiled", "liger"),
        default="auto",
        help="as the trainer's (%(default)s)",
    )
    parser.add_argument("--rank", type=int, default=16, help="of every adapter (%(default)s)")
    parser.add_argument(
        "--shapes", type=parse_shapes, default="16x256,8x1024,ragged", metavar="COUNTxLENGTH|ragged,...",
        help="batches (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--adapters", type=int, default=16, help="of co_batching (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a micro-batch (%(default)s)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="(%(default)s)")
    parser.add_argument(
        "--baseline", action=argparse.BooleanOptionalAction, default=True,
        help="compare with a padded PEFT loop; a --model-shape has none",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="rounds of a figure (%(default)s)")
    parser.add_argument(
        "--budget-s", type=float, default=60.0, help=f"its seconds, past {MIN_ROUNDS} rounds (%(default)s)"
    )
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), help="measure these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if "OMP_WAIT_POLICY" not in os.environ:  # OpenMP reads it when it is loaded; as `tinsmith up` sets it
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})  # noqa: S606
    report = Report({name: str(value) for name, value in vars(arguments).items()})
    with report.kept(arguments.json), prepared(arguments) as bench:
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


if __name__ == "__main__":
    sys.exit(main())
