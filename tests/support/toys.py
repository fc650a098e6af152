"""Base models that have learnt a little. Making one takes seconds of a core, so .cache keeps it until its recipe, the
recipe's code or a library is another one."""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

import tokenizers
import torch
import transformers

from tinsmith.toy import model

_CACHE = Path(__file__).parents[2] / ".cache/toy"


def toy_model(*, pretrain_steps: int) -> Path:
    """Folder of a tiny model, in which nobody may write."""
    recipe = model.Recipe("tiny", pretrain_steps=pretrain_steps)
    versions = [library.__version__ for library in (tokenizers, torch, transformers)]
    made_by = hashlib.sha256(f"{recipe} {versions}".encode())
    for source in sorted(Path(model.__file__).parent.glob("*.py")):
        made_by.update(source.read_bytes())
    folder = _CACHE / made_by.hexdigest()[:16]
    _CACHE.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        model.make(recipe, folder, report=print)  # does nothing where it lies already
    return folder
