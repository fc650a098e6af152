"""The sampler service, which kills itself while it computes a request whose prompt begins with MARK.

    python poisoned_sampler.py <flags of sampler_service>

The second token of such a prompt says when: with its prompt, or with so many tokens of its output. The sampler prints
the third token of each that it computes.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from torch import Tensor

from sampler_service.__main__ import main
from sampler_service.torch_engine.runner import Batch, Runner

MARK = 101


def install() -> None:
    logits = Runner.logits
    printed: set[int] = set()

    def poisoned(self: Any, batch: Batch) -> Tensor:
        sequences = [*batch.running, *(sequence for piece in batch.pieces for sequence in piece.job.sequences)]
        for sequence in sequences:
            prompt = sequence.group.request.prompt
            if len(prompt) > 1 and prompt[0] == MARK:
                if prompt[2] not in printed:
                    printed.add(prompt[2])
                    print(f"sampler {os.getpid()} computes {prompt[2]}", flush=True)
                if len(sequence.tokens) >= prompt[1]:
                    os.kill(os.getpid(), signal.SIGKILL)
        return logits(self, batch)

    Runner.logits = poisoned  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    install()
    main()
