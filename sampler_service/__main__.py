"""python -m sampler_service: reads the settings, then serves until SIGTERM."""

from __future__ import annotations

from sampler_service.config import SamplerConfig
from tinsmith.allocator import exempt_imports
from tinsmith.rpc.settings import read_settings


def main() -> None:
    config = read_settings(SamplerConfig)
    # Settings are read before torch is imported, which takes seconds, so that a mistake in them is reported at once.
    with exempt_imports():
        from sampler_service.service import run

    run(config)


if __name__ == "__main__":
    main()
