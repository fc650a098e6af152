"""python -m trainer_service: reads the settings, then serves until SIGTERM."""

from __future__ import annotations

from tinsmith.rpc.settings import read_settings
from trainer_service.config import TrainerConfig


def main() -> None:
    config = read_settings(TrainerConfig)
    # Importing torch takes seconds, so a mistake in the settings is told before.
    from trainer_service.service import run

    run(config)


if __name__ == "__main__":
    main()
