"""The baseline without Tinsmith: a plain transformers + PEFT loop, one padded batch at a time.

`processes.Baseline` keeps it as a subprocess. It prints {} once the model is loaded; from then on each line of stdin is
a JSON request, and each line of stdout its answer:

    {"do": "train", "lengths": [256, 256], "threads": 1}                                          -> {"seconds": 0.8}
    {"do": "generate", "prompts": 8, "samples": 8, "prompt_tokens": 64, "new_tokens": 64, "threads": 1} -> the same
    {"do": "serve", "load": [[0.5, 32, 16], ...], "threads": 1} -> and the latency of each (arrival, prompt, output)
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.utils import logging

IGNORED = -100
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)  # as the services choose by default


def load(folder: str, *, rank: int) -> Any:
    """The base model with a new adapter on every linear layer, the output layer included: the SDK's default. Without
    one for rank 0."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).to(DEVICE)  # type: ignore[arg-type]
    if rank == 0:
        return base.eval()
    linear = {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    if base.config.model_type == "nemotron_h":
        linear.remove("out_proj")  # PEFT refuses it, as Tinsmith does
    config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules=sorted(linear), task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")  # the adapter of a tied output is its own
        return peft.get_peft_model(base, config)


MAX_BATCH = 64
"""Number of sequences that generate at once: the services' default."""
MAX_TOKENS = 32768 if CUDA else 4096
"""Most padded tokens at once. A larger batch is cut into pieces with equal padding, so that it fits into memory."""


def train(model: Any, *, lengths: list[int]) -> None:
    """Forward and backward over sequences padded to the longest."""
    longest = max(lengths)
    rows = max(1, MAX_TOKENS // longest)
    for first in range(0, len(lengths), rows):
        _accumulate(model, lengths[first : first + rows], longest)
    model.zero_grad()


def _accumulate(model: Any, lengths: list[int], longest: int) -> None:
    shape = len(lengths), longest
    tokens = torch.randint(model.config.vocab_size, shape, device=DEVICE)
    mask = torch.arange(shape[1], device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    targets = torch.randint(model.config.vocab_size, shape, device=DEVICE).masked_fill(~mask, IGNORED)
    logits = model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits
    cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum").backward()


def generate(model: Any, *, prompts: int, samples: int, prompt_tokens: int, new_tokens: int) -> None:
    tokens = torch.randint(model.config.vocab_size, (prompts, prompt_tokens), device=DEVICE)
    made = _generate(model, tokens, torch.ones_like(tokens), samples=samples, new_tokens=new_tokens)
    if made.shape != (prompts * samples, prompt_tokens + new_tokens):
        raise RuntimeError(f"generate gave {tuple(made.shape)}, not {prompts * samples} x {prompt_tokens + new_tokens}")


def serve(model: Any, *, load: list[tuple[float, int, int]]) -> list[float]:
    """Generates for batches of the requests that have arrived, with prompts padded to the longest. A batch ends with
    its last sequence."""
    begin, latencies = time.perf_counter(), []
    while len(latencies) < len(load):
        first = len(latencies)
        time.sleep(max(0.0, begin + load[first][0] - time.perf_counter()))
        elapsed = time.perf_counter() - begin
        batch = [one for one in load[first : first + MAX_BATCH] if one[0] <= elapsed]
        lengths = torch.tensor([prompt for _, prompt, _ in batch], device=DEVICE)
        longest = int(lengths.max())
        tokens = torch.randint(model.config.vocab_size, (len(batch), longest), device=DEVICE)
        mask = torch.arange(longest, device=DEVICE) >= longest - lengths[:, None]
        _generate(model, tokens, mask.long(), samples=1, new_tokens=max(new for _, _, new in batch))
        latencies += [time.perf_counter() - begin - at_s for at_s, _, _ in batch]
    return latencies


@torch.inference_mode()
def _generate(model: Any, tokens: torch.Tensor, mask: torch.Tensor, *, samples: int, new_tokens: int) -> torch.Tensor:
    """Samples at temperature 1; no sequence ends early."""
    return model.generate(
        input_ids=tokens,
        attention_mask=mask,
        num_return_sequences=samples,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )


WORK: dict[str, Callable[..., list[float] | None]] = {"train": train, "generate": generate, "serve": serve}


def answer(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    work = WORK[request.pop("do")]
    torch.set_num_threads(request.pop("threads"))
    begin = time.perf_counter()
    latencies = work(model, **request)
    if CUDA:
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - begin, "latencies": latencies}


def main() -> None:
    folder, rank = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    logging.disable_progress_bar()
    model = load(folder, rank=int(rank))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
