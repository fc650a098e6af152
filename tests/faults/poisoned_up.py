"""`tinsmith up`, whose trainer is that of poisoned_trainer.py.

PYTHONPATH=REPOSITORY POISON=SIGKILL python -m tests.faults.poisoned_up up FLAGS
"""

from __future__ import annotations

import sys
from typing import Any

from tinsmith_cli import main, stack

TRAINER = "tests.faults.poisoned_trainer"


def install() -> None:
    command = stack._command

    def poisoned(module: str, *arguments: Any, **options: Any) -> list[str]:
        return command(TRAINER if module == "trainer_service" else module, *arguments, **options)

    stack._command = poisoned


if __name__ == "__main__":
    install()
    sys.exit(main())
