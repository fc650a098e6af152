"""Training and decoding on a quantised base, in relation to the same base unquantised, in alternating rounds.

    python benchmarks/bench_quantized.py --hidden 1024 --layers 4

Prints, for int8 and nf4, the median over rounds of time / time with unquantised weights: a training pass of a sequence
(forward and backward with an adapter of rank 32), and passes of few tokens without gradient, which cost what decode
steps cost beside attention; and the bytes of the base weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.modeling.self_check import random_adapter
from tinsmith.quantization import QUANTIZATIONS, Quantization

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    with tempfile.TemporaryDirectory() as folder:
        _make(Path(folder), hidden=arguments.hidden, layers=arguments.layers)
        forms: tuple[Quantization | None, ...] = (None, *QUANTIZATIONS)
        bases: dict[Quantization | None, BaseModel] = {}
        for form in forms:
            bases[form] = BaseModel.load(folder, device=CPU, dtype=dtype, quantize=form)
    isa = torch.backends.cpu.get_cpu_capability()
    print(f"{isa}, {arguments.threads} threads, {arguments.dtype}, hidden {arguments.hidden}")
    for form in QUANTIZATIONS:
        part = _bytes(bases[form]) / _bytes(bases[None])
        print(f"{form}: {part:.3f} of the bytes, embedding and output layer included")
    _compare(
        f"training, {arguments.tokens} tokens", bases, lambda base: _train(base, arguments.tokens), arguments.rounds
    )
    for tokens in (1, 8, 64):
        _compare(f"{tokens} tokens without gradient", bases, lambda base, n=tokens: _pass(base, n), arguments.rounds)


def _make(folder: Path, *, hidden: int, layers: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _bytes(base: BaseModel) -> int:
    return sum(parameter.nbytes for parameter in base.parameters.values())


def _train(base: BaseModel, num_tokens: int) -> None:
    adapter = random_adapter(AdapterConfig(rank=32, seed=0), base.targets, CPU)
    tensors = [tensor.requires_grad_() for tensor in adapter.tensors()]
    runs = [Run(adapter, slice(0, num_tokens))]
    tokens = torch.arange(num_tokens) % 512
    hidden = base.hidden_states(tokens, positions_of([num_tokens], CPU), Packed([num_tokens]), runs)
    logprobs = target_logprobs(base.head, hidden, torch.arange(num_tokens), tokens, runs)
    torch.autograd.grad(logprobs.sum(), tensors)


@torch.no_grad()
def _pass(base: BaseModel, num_tokens: int) -> None:
    tokens = torch.arange(num_tokens)
    base.hidden_states(tokens, positions_of([num_tokens], CPU), Packed([num_tokens]), [])


def _compare(
    name: str, bases: dict[Quantization | None, BaseModel], call: Callable[[BaseModel], None], rounds: int
) -> None:
    times: dict[Quantization | None, list[float]] = {form: [] for form in bases}
    for _ in range(rounds + 1):  # the first one warms up
        for form, base in bases.items():
            begun = time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
            call(base)
            ended = time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
            times[form].append(ended - begun)
    for form in QUANTIZATIONS:
        ratio = statistics.median(a / b for a, b in zip(times[form][1:], times[None][1:], strict=True))
        print(f"{name}: {form} takes {ratio:.2f} of the time")


if __name__ == "__main__":
    main()
