"""Packages that `pip install tinsmith` brings along."""

from __future__ import annotations

import pytest

from tests.packaging.requirements import required

HEAVY = {"torch", "transformers", "safetensors", "triton", "vllm", "peft", "accelerate"}


@pytest.mark.parametrize("extras", [(), ("gateway",), ("gateway", "postgres", "tls", "otel")], ids=",".join)
def test_the_command_line_and_the_gateway_need_no_torch(extras: tuple[str, ...]) -> None:
    found = required(extras)
    assert {"grpcio", "protobuf"} <= found
    assert found & HEAVY == set()
    cuda = {name for name in found if name.startswith(("nvidia-", "cuda-"))}
    assert cuda == {"nvidia-ml-py"}, "Python alone, which reads the driver's library"


@pytest.mark.parametrize("extra", ["trainer", "sampler", "all"])
def test_what_computes_needs_torch(extra: str) -> None:
    assert {"torch", "transformers"} <= required([extra])
