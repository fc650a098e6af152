"""The trainer service, in which a batch with a poisoned datum ends the process that computes or packs it.

POISON="SIGKILL" (as for want of memory) or "fault" (as an illegal memory access) of POISON_RANK, which is 0 by default.
POISON="arrival": the process is killed while it packs the request for the journal.
POISON="append", "finish", "park", "delete", "copy" or "verify": the process is killed while the journal takes the third
operation of the run POISON_RUN or a result of it, while it parks or deletes that run, or while it copies or verifies
one of that run's checkpoints.
POISON_TIMES=file holds how often it still does so; without the file it always does.
POISON_SAVE_S: how long the writing of each checkpoint takes in addition.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_service import intake
from trainer_service.__main__ import main
from trainer_service.durability.journal import Journal
from trainer_service.engine.batch import Example
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.passes import Passes
from trainer_service.operation import Answer
from trainer_service.request_bytes import batch_bytes
from trainer_service.storage.checkpoints import CheckpointStore

TOKENS = (3, 1, 4, 1, 5)
"""A poisoned datum begins with these."""
HOW = os.environ.get("POISON", "")
SAVE_S = float(os.environ.get("POISON_SAVE_S", "0"))
TIMES = Path(os.environ.get("POISON_TIMES", "/nonexistent"))


def strike() -> None:
    if TIMES.exists():
        left = int(TIMES.read_text())
        if not left:
            return
        TIMES.write_text(str(left - 1))
    if HOW == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def install_at_arrival() -> None:
    def poisoned(request: Any, *options: Any) -> int:
        tokens = np.asarray(TOKENS, np.int32).tobytes()
        if any(chunk.encoded_text.tokens.startswith(tokens) for one in request.data for chunk in one.model_input):
            os.kill(os.getpid(), signal.SIGKILL)
        return batch_bytes(request, *options)

    intake.batch_bytes = poisoned  # type: ignore[assignment]


def install() -> None:
    compute: Any = Passes._compute

    def poisoned(self: Passes, items: Sequence[Example], **options: Any) -> Any:
        if any(tuple(item.datum.tokens_N[: len(TOKENS)]) == TOKENS for item in items):
            strike()
        return compute(self, items, **options)

    Passes._compute = poisoned  # type: ignore[method-assign]


def install_for_run(run: str) -> None:
    owner, method, is_poisoned = {
        "append": (Journal, "append", lambda _, *of, **__: of[:2] == (run, 3) and of[2].kind == "forward_backward"),
        "finish": (Journal, "finish", lambda _, *of, **__: of[:2] == (run, 3) and isinstance(of[2], Answer)),
        "park": (TrainingEngine, "capture", lambda _, model_id, **how: model_id == run and "with_accumulation" in how),
        "delete": (TrainingEngine, "delete_model", lambda _, model_id: model_id == run),
        "copy": (CheckpointStore, "copy", lambda _, source, *__, **___: source.run_id == run),
        "verify": (CheckpointStore, "verify", lambda _, location: location.run_id == run),
    }[HOW]
    plain: Any = getattr(owner, method)

    def poisoned(*arguments: Any, **options: Any) -> Any:
        if is_poisoned(*arguments, **options):
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **options)

    setattr(owner, method, poisoned)


def install_slow_saves() -> None:
    save: Any = CheckpointStore.save

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(SAVE_S)
        return save(*arguments, **options)

    CheckpointStore.save = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    if SAVE_S:
        install_slow_saves()
    if HOW and os.environ.get("RANK", "0") == os.environ.get("POISON_RANK", "0"):
        if "POISON_RUN" in os.environ:
            install_for_run(os.environ["POISON_RUN"])
        else:
            (install_at_arrival if HOW == "arrival" else install)()
    main()
