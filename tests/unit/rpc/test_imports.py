"""The gateway and the shared rpc package stay light: no torch, no transformers, no vllm."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "vllm", "peft", "safetensors"}


@pytest.mark.parametrize(
    "module",
    [
        "tinsmith_cli",
        "tinsmith.rpc.channel",
        "tinsmith.rpc.errors",
        "tinsmith.rpc.logs",
        "tinsmith.rpc.metrics",
        "tinsmith.rpc.paths",
        "tinsmith.rpc.server",
        "tinsmith.rpc.tensors",
        "gateway.http.app",
        "trainer_service.durability.journal",
    ],
)
def test_module_leaves_no_heavy_library_loaded(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


@pytest.mark.parametrize("service", ["trainer_service", "sampler_service"])
def test_a_service_tells_a_mistake_in_its_settings_before_it_loads_a_heavy_library(service: str) -> None:
    code = (
        f"import sys; from {service}.__main__ import main\n"
        "try: main()\n"
        f"except SystemExit as told: print(told, *sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, "--listen", "1"], capture_output=True, text=True, check=True)
    assert "--base-model" in done.stdout
    assert HEAVY & set(done.stdout.split()) == set()
