"""Settings that tracing refuses. tests/tracing has it on; its absence while it is off is in test_imports.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tinsmith.rpc import tracing

_BLOCK = "import sys; sys.modules['opentelemetry'] = None; "


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)


def test_without_its_packages_tracing_is_refused_with_the_name_of_the_extra() -> None:
    ended = run(_BLOCK + "from tinsmith.rpc import tracing; tracing.setup('gateway')")
    assert ended.returncode == 1
    assert "tracing: needs packages that are not installed" in ended.stderr
    assert "pip install 'tinsmith[otel]'" in ended.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER: 'zipkin' is not supported"),
        (
            "OTEL_EXPORTER_OTLP_PROTOCOL",
            "http/json",
            "OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json' is not one of grpc, http",
        ),
    ],
)
def test_a_variable_that_asks_for_something_else_is_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match=f"^tracing: {message}"):
        tracing.setup("gateway")


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"])
@pytest.mark.parametrize(
    "value", ["hunter2", "authorization: Bearer hunter2", "a=b,hunter2", "a=hunter2%0Ab", "a=hunter2ü", "a!=hunter2"]
)
def test_headers_that_cannot_be_sent_are_refused_and_not_shown(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match=f"^tracing: {variable}: is not name=value,name=value") as ended:
        tracing.setup("gateway")
    assert "hunter2" not in str(ended.value)


def test_headers_of_any_allowed_form_are_taken() -> None:
    value = "Authorization=Bearer hunter2, x-a=b%3Dc%2Cd ,x_b=,"
    ended = run("from tinsmith.rpc import tracing; tracing.setup('gateway')", OTEL_EXPORTER_OTLP_HEADERS=value)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_not_there_holds_up_no_stop(protocol: str) -> None:
    code = (
        "import time; from tinsmith.rpc import tracing; tracing.setup('gateway'); "
        "span = tracing.answer('x', {}); tracing.end(span); begun = time.monotonic(); tracing.shutdown(); "
        "print(time.monotonic() - begun); import os; os._exit(0)"
    )
    env = {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert run(code, **env).returncode == 0
