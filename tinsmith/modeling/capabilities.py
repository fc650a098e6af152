"""Finds out what a loaded model can do here, by comparing it with its own forward pass.

A model may pack sequences, take adapters on a group of layers, take pictures, share the rows of a common beginning, and
continue from a cache.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from tinsmith.modeling.adaptation import hand_on_layout
from tinsmith.modeling.adapter import VISION
from tinsmith.modeling.attention import WithoutLayout
from tinsmith.modeling.parallel_tensor import CannotDivide
from tinsmith.modeling.pretrained import UnsupportedModel
from tinsmith.modeling.self_check import TOLERANCE, Gaps, Probe
from tinsmith.modeling.whole_layers import give_back

if TYPE_CHECKING:
    from tinsmith.modeling.base_model import BaseModel

logger = logging.getLogger(__name__)

_PACKABLE = {
    "full_attention", "sliding_attention", "linear_attention", "attention", "mamba", "conv", "hybrid", "moe", "mlp",
}  # fmt: skip
"""Kinds of layers, as in `layer_types` of a configuration, for which the check on short sequences is sufficient. Layers
of other kinds may compute something else from a certain length on, such as attention in chunks."""
MISFITS = (TypeError, AttributeError, LookupError, ValueError, RuntimeError)
"""Errors that a layer raises when it is called in a way that it does not support."""


def checked(base: BaseModel, probe: Probe) -> BaseModel:
    """Compares the model with the probe. Returns the model with its capabilities, and without the groups whose adapters
    are computed wrongly. Raises UnsupportedModel if the model's own logprobs are not finite, or if no way of computing
    packed or single sequences agrees with them.
    """
    logger.info("kernels of %s: %s", base.path, base.kernels)
    if not probe.is_finite:
        raise UnsupportedModel(
            f"{base.architecture}: the model's own logprobs are not finite (nan or inf) in {base.dtype}, even "
            "in its own forward: its weights are broken; fetch them again"
        )
    limit = TOLERANCE[base.dtype]
    reason = _unpackable(base.config)
    gaps = None if reason else _gaps(base, probe)
    if isinstance(gaps, WithoutLayout):
        hand_on_layout(base.decoder, base.active)
        gaps = _gaps(base, probe)
    if isinstance(gaps, Exception):  # a layer lacks an argument, or got one that it does not know
        logger.info("packed sequences in %s failed", base.path, exc_info=gaps)
        reason = "its layers do not take packed sequences: they fail on them, as the log shows at level INFO"
    elif gaps is not None and not gaps.base <= limit:
        reason = (
            f"packed, its logprobs differ by {gaps.base:.3g} (limit {limit:g}) from those of its own forward; "
            "sequences probably see each other through a layer that is no attention"
        )
    if reason:
        base = one_by_one(base, reason)
        gaps = _gaps(base, probe)
        if isinstance(gaps, Exception):
            raise gaps
    assert isinstance(gaps, Gaps)
    logger.info("self-check of %s: this and the plain forward differ by %s at most", base.path, gaps)
    if not gaps.base <= limit:
        raise UnsupportedModel(
            f"{base.architecture}: with layers that can take adapters, its logprobs differ by {gaps.base:.3g} "
            f"(limit {limit:g}) from those of its own forward"
        )
    refused = {**base.refused_groups, **gaps.refused(limit)}
    targets = [target for target in base.targets if target.group not in refused]
    base = _without_wrong_pictures(replace(base, targets=targets, refused_groups=refused), probe)
    base = _sharing(base, probe)
    return _continuing(base, probe)


def _sharing(base: BaseModel, probe: Probe) -> BaseModel:
    """The model with `why_not_shared`, after sequences that share the rows of a common beginning were tried."""
    if base.one_by_one or base.recurrent:
        reason = "it runs one sequence at a time" if base.one_by_one else "its layers carry a state"
        return replace(base, why_not_shared=reason)
    if base.device.type != "cpu":
        return replace(base, why_not_shared="attention to shared rows is computed on CPUs only")
    try:
        gap = probe.shared_gap(base)
    except torch.OutOfMemoryError:
        raise
    except MISFITS as error:
        return replace(base, why_not_shared=f"its layers fail on it ({type(error).__name__}: {error})")
    finally:
        if base.sharded is not None:
            base.sharded.reset()
    if gap <= TOLERANCE[base.dtype]:
        return base
    reason = f"with a common beginning, its logprobs differ by {gap:.3g} from those of its own forward"
    return replace(base, why_not_shared=reason)


def _continuing(base: BaseModel, probe: Probe) -> BaseModel:
    """The model with `token_by_token` and `why_not_cached`, after continuing from a cache was tried. Attention that
    does not go through attention.py, such as GPT-J's, does not read the cache here."""
    if base.why_not_cached or base.tensor_parallel is not None or base.sharded is not None:
        return base
    reasons = []
    for way in (base, replace(base, token_by_token=True)):
        try:
            gap = probe.continued_gap(way)
        except torch.OutOfMemoryError:
            raise
        except MISFITS as error:
            reasons.append(f"it cannot be computed in pieces ({type(error).__name__}: {error})")
            continue
        if gap <= TOLERANCE[base.dtype]:
            return way
        reasons.append(f"computed in pieces, its logprobs differ by {gap:.3g} from those of its own forward")
    return replace(base, why_not_cached=reasons[-1])


def _without_wrong_pictures(base: BaseModel, probe: Probe) -> BaseModel:
    """The model without its tower if pictures are computed wrongly, else the model as it is."""
    if base.tower is None or probe.pictures is None:
        return base
    limit = TOLERANCE[base.dtype]
    usual = base.dtype != torch.float32 and any(target.num_experts is not None for target in base.targets)
    try:
        gap = probe.pictures.gap(base, usual=usual)
    except MISFITS as error:
        reason = f"its layers do not take pictures packed with text ({type(error).__name__}: {error})"
    else:
        logger.info("self-check of %s: with pictures, this and the plain forward differ by %.2g", base.path, gap)
        if gap <= limit:
            return _without_wrong_vision(base, probe.pictures.why_not_adapted(base, limit, usual=usual))
        reason = f"with pictures, its logprobs differ by {gap:.3g} (limit {limit:g}) from those of its own forward"
    logger.warning("%s (%s) takes no pictures: %s", base.path, base.architecture, reason)
    return replace(_without_wrong_vision(base, reason), tower=None, why_no_pictures=reason)


def _without_wrong_vision(base: BaseModel, reason: str) -> BaseModel:
    """The model without targets of the group VISION if there is a reason against them, else the model as it is."""
    if not reason:
        return base
    targets = [target for target in base.targets if target.group != VISION]
    return replace(base, targets=targets, refused_groups={**base.refused_groups, VISION: reason})


def _gaps(base: BaseModel, probe: Probe) -> Gaps | Exception:
    """The gaps between the model and the probe, or the error of a layer that was called in a way that it does not
    support."""
    try:
        return probe.gaps(base)
    except torch.OutOfMemoryError:
        raise
    except MISFITS as error:
        return error
    finally:
        if base.sharded is not None:
            base.sharded.reset()


def one_by_one(base: BaseModel, reason: str) -> BaseModel:
    """The model, computing one sequence at a time with its own attention. Raises CannotDivide if it is divided
    among ranks."""
    if base.tensor_parallel is not None or base.sharded is not None:
        raise CannotDivide(
            f"{base.architecture} runs one sequence at a time, and cannot be divided among ranks then; set "
            f"tensor_parallel_size to 1 and shard_base to false. The reason: {reason}"
        )
    logger.warning("%s (%s) runs one sequence at a time, which is slow: %s", base.path, base.architecture, reason)
    give_back(base.decoder, base.layers)
    base.decoder.set_attn_implementation("eager")  # type: ignore[operator]  # every decoder of transformers has it
    return replace(base, one_by_one=reason)


def _unpackable(config: PretrainedConfig) -> str:
    """The reason for which the check on short sequences is not sufficient for this model; empty if it is."""
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _PACKABLE)
    if not kinds:
        return ""
    return f"it has layers of the kinds {', '.join(kinds)}, which are not known to take packed sequences"
