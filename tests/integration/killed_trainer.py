"""Runs a client of examples/grpc twice: undisturbed, and with the trainer killed after its second step."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack

NUM_RESULTS = 7
"""Lines that a client prints: a loss for each of six steps, and what it sampled."""
PAUSE_MS = 300
"""Pause of the client after each step, so that the trainer is killed before the third."""


def check_that_a_killed_trainer_changes_nothing(
    client: Sequence[str], *, base_model: Path, state_dir: Path, cwd: Path, env: Mapping[str, str] | None = None
) -> None:
    """`client`: its command, to which the addresses of trainer and sampler are added. `base_model`: a folder."""
    with Stack(state_dir, base_models=[f"{BASE_MODEL}={base_model}"]) as stack:

        def start(pause_ms: int) -> subprocess.Popen[str]:
            command = [*client, stack.trainers[0], stack.samplers[0]]
            settings = os.environ | dict(env or {}) | {"TINSMITH_PAUSE_MS": str(pause_ms)}
            return subprocess.Popen(
                command, cwd=cwd, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

        undisturbed, _ = start(0).communicate(timeout=120)
        lines = []
        with start(PAUSE_MS) as running:
            assert running.stdout is not None
            for line in running.stdout:
                lines.append(line)
                if line.startswith("step 2"):
                    (trainer,) = stack.processes("trainer_service")
                    trainer.kill()
        assert running.returncode == 0, "".join(lines)
    disturbed = "".join(lines)
    assert "once more" in disturbed
    results = [re.findall(r"^(?:step|sampled) .*$", text, re.MULTILINE) for text in (undisturbed, disturbed)]
    assert len(results[0]) == NUM_RESULTS, undisturbed
    assert results[0] == results[1]
