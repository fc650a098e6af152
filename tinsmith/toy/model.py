"""Makes a Qwen3 model with random or briefly trained weights, and its tokenizer, in one folder."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from tinsmith.toy.text import documents
from tinsmith.toy.tokenizer import END_OF_TEXT, END_OF_TURN, write_tokenizer

RECIPE_FILE = "tinsmith_toy.json"
"""File that says how a folder was made. It is written last, so a folder that has it is complete."""

_RECIPE_VERSION = 1  # to be raised by a change after which the same recipe gives other weights


@dataclass(frozen=True, slots=True)
class ToyShape:
    """Sizes of a toy model, and the learning rate of its pre-training."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    lr: float


SHAPES = {
    "tiny": ToyShape(2048, 128, 384, 4, 4, 2, 32, lr=3e-3),  # 1 M parameters
    "small": ToyShape(8192, 384, 1024, 8, 6, 2, 64, lr=1.5e-3),  # 16 M
    "medium": ToyShape(8192, 768, 3072, 12, 12, 4, 64, lr=6e-4),  # 110 M
}

_BATCH_TOKENS = {"tiny": 2048, "small": 512, "medium": 512}
"""Tokens of each step of pre-training, by the size of the model."""
_SEQUENCE_TOKENS = 128
"""Tokens of each sequence of pre-training."""
_REPORT_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides which model is made.

    `pretrain_seconds`: time of training, in seconds; the weights then depend on the machine's speed. `pretrain_steps`:
    number of steps of training; the weights then do not depend on it.
    """

    size: str
    seed: int = 0
    pretrain_seconds: float = 0.0
    pretrain_steps: int = 0
    version: int = _RECIPE_VERSION


def make(recipe: Recipe, out: Path, *, report: Callable[[str], None]) -> bool:
    """Writes the model to `out`. Returns False if `out` already holds exactly this model.

    Raises FileExistsError if `out` holds anything else. The folder appears complete or not at all.
    """
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if _made_by(out) == asdict(recipe):
            return False
        raise FileExistsError(
            f"--out: {out} is not empty and does not hold a model of these settings; name another folder or remove it"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        part.chmod(0o755)
        _write(recipe, part, report=report)
        (part / RECIPE_FILE).write_text(json.dumps(asdict(recipe), indent=2))
        for file in part.iterdir():
            file.chmod(0o644)  # safetensors writes 0600, which a service under another user could not read
        part.rename(out)  # replaces `out` when that is an empty folder
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return True


def _made_by(folder: Path) -> object:
    try:
        return json.loads((folder / RECIPE_FILE).read_text())
    except (OSError, json.JSONDecodeError):
        return None


def _write(recipe: Recipe, folder: Path, *, report: Callable[[str], None]) -> None:
    shape = SHAPES[recipe.size]
    report("training the tokenizer on generated text")
    tokenizer = write_tokenizer(folder, vocab_size=shape.vocab_size, seed=recipe.seed)
    token_ids = tokenizer.get_vocab()
    end_of_text, end_of_turn = token_ids[END_OF_TEXT], token_ids[END_OF_TURN]
    config = Qwen3Config(
        # Rounded up for the matrix kernels. The tokenizer never returns ids above its own size.
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
        dtype="float32",
    )
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    report(f"{recipe.size}: {size / 1e6:.1f} M parameters, {len(tokenizer)} tokens in the vocabulary")
    if recipe.pretrain_seconds or recipe.pretrain_steps:
        _pretrain(model, tokenizer, recipe, report=report)
    model.generation_config.update(
        do_sample=True, temperature=1.0, bos_token_id=end_of_text, eos_token_id=[end_of_turn, end_of_text],
        pad_token_id=end_of_text,
    )  # fmt: skip
    model.save_pretrained(folder)


def _pretrain(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, *, report: Callable[[str], None]
) -> None:
    """Trains the model to predict the next token. The learning rate falls to a twentieth over the recipe's steps or
    seconds."""
    shape = SHAPES[recipe.size]
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.lr, betas=(0.9, 0.95), weight_decay=0.01)
    batches = _batches(tokenizer, rows=_BATCH_TOKENS[recipe.size] // _SEQUENCE_TOKENS, seed=recipe.seed + 1)
    model.train()
    started = reported = time.monotonic()
    step, done = 0, 0.0
    while done < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = shape.lr * min(1.0, (step + 1) / 20) * (1.0 - 0.95 * done)
        tokens_B_T = next(batches)
        loss = model(input_ids=tokens_B_T, labels=tokens_B_T).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        now = time.monotonic()
        done = step / recipe.pretrain_steps if recipe.pretrain_steps else (now - started) / recipe.pretrain_seconds
        if now - reported > _REPORT_INTERVAL_S or done >= 1.0:
            reported = now
            report(f"pre-training {min(done, 1.0):4.0%}: step {step}, loss {loss.item():.3f}")
    model.eval()


def _batches(tokenizer: PreTrainedTokenizerBase, *, rows: int, seed: int) -> Iterator[torch.Tensor]:
    """Token ids of documents laid end to end, as tensors of [rows, _SEQUENCE_TOKENS]."""
    stream = _token_stream(tokenizer, seed=seed)
    while True:
        flat = [next(stream) for _ in range(rows * _SEQUENCE_TOKENS)]
        yield torch.tensor(flat).view(rows, _SEQUENCE_TOKENS)


def _token_stream(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> Iterator[int]:
    for document in documents(seed):
        if isinstance(document, str):
            text = document
        else:
            messages = [{"role": role, "content": content} for role, content in document]
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        yield from tokenizer.encode(text + END_OF_TEXT)
