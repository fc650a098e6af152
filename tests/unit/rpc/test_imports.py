"""The gateway and the shared rpc package stay light: no torch, no transformers, no vllm, and no OpenTelemetry unless it
is on."""

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


def test_the_services_import_nothing_of_opentelemetry_while_tracing_is_off() -> None:
    modules = "gateway.http.app, tinsmith.rpc.server, tinsmith.rpc.channel, trainer_service.operation"
    checks = "tracing.current() is tracing.call('/x') is tracing.serve('/x', None) is None"
    uses = "tracing.span('a', b=1).__enter__(); tracing.record('a', None, start=0, end=1); tracing.shutdown()"
    code = (
        f"import sys; sys.modules['opentelemetry'] = None; import {modules}; from tinsmith.rpc import tracing; "
        f"assert {checks}; {uses}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
