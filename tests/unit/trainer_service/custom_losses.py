"""Custom losses as the SDK sends them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from tinker.lib.public_interfaces.custom_loss import LossHandle, PerDatumLossFn, encode_graph, trace_loss

from tinsmith.v1 import trainer_pb2 as pb


def traced(fn: PerDatumLossFn, **ranks: Literal[0, 1, 2]) -> LossHandle:
    return trace_loss(fn, {"logprobs": 1, **ranks}, "session")


def sent(handle: LossHandle) -> pb.CustomLoss:
    """The message that the gateway makes from the SDK's create_custom_loss."""
    inputs = {one.name: one.rank for one in handle.inputs}
    return custom_loss(encode_graph(handle).model_dump(), inputs, name=handle.name)


def custom_loss(graph: Any, inputs: Mapping[str, int], *, name: str = "mine") -> pb.CustomLoss:
    text = graph if isinstance(graph, str) else json.dumps(graph)
    declared = [pb.CustomLossInput(name=key, rank=rank) for key, rank in inputs.items()]
    return pb.CustomLoss(name=name, inputs=declared, graph=text)


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def graph(*calls: dict[str, Any], loss: str, metrics: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One of logprobs alone, with these calls."""
    output = {"tuple": [ref(loss), {"dict": dict(metrics or {})}]}
    nodes = [node("placeholder", "logprobs", "logprobs"), *calls, node("output", "output", "output", output)]
    return {"format": 1, "nodes": nodes}
