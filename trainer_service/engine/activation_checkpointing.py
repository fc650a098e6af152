"""Activation checkpointing: a decoder layer keeps only its input, and backward computes its activations again.

Training takes about a third longer (one more forward pass). A few kilobytes per token and layer are still kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from tinsmith.modeling.adapter_runs import ActiveRuns


@contextmanager
def checkpointed(layers: Sequence[nn.Module], active: ActiveRuns) -> Iterator[None]:
    """A context in which these layers keep only their inputs. Backward may run after the context has ended."""
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
    """Runs one layer with checkpointing.

    The state of the random generator is not saved: the model is in evaluation mode and draws no random numbers.
    """
    then = replace(active)

    def compute(*args: Any, **kwargs: Any) -> Any:
        # Backward runs after the forward pass has removed its adapters from the layers: they are put back meanwhile.
        with active.replaced_by(then):
            return inner(*args, **kwargs)

    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
