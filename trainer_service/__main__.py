"""python -m trainer_service: reads the settings, then serves until SIGTERM."""

from __future__ import annotations

import os

from tinsmith.child import die_with_parent


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        die_with_parent(os.getppid())  # torchrun may be killed during the imports below, which take seconds
    from tinsmith.allocator import exempt_imports
    from tinsmith.rpc.settings import read_settings
    from trainer_service.config import TrainerConfig

    config = read_settings(TrainerConfig)
    # Settings are read before torch is imported, which takes seconds, so that a mistake in them is reported at once.
    with exempt_imports():
        from trainer_service.service import run

    run(config)


if __name__ == "__main__":
    main()
