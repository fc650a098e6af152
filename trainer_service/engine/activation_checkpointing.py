"""Activation checkpointing: of a decoder layer only the input is kept, and backward computes the rest again.

It takes about a third more time (one more forward pass), and some kilobytes of memory per token and layer remain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from tinsmith.modeling.lora import ActiveRuns


@contextmanager
def checkpointed(layers: Sequence[nn.Module], active: ActiveRuns) -> Iterator[None]:
    """What these layers compute inside can be differentiated at any time later."""
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(_forward, layer.forward, active)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _forward(inner: Any, active: ActiveRuns, *args: Any, **kwargs: Any) -> Any:
    """The model draws no random numbers: it is in evaluation mode, so there is no generator to rewind."""
    then = _values(active)

    def compute(*args: Any, **kwargs: Any) -> Any:
        # Backward comes after the forward pass has taken its adapters out of the layers.
        now = _values(active)
        _set(active, then)
        try:
            return inner(*args, **kwargs)
        finally:
            _set(active, now)

    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _values(active: ActiveRuns) -> dict[str, Any]:
    return {field.name: getattr(active, field.name) for field in fields(active)}


def _set(active: ActiveRuns, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(active, name, value)
