"""The reference: plain transformers with eager attention, one sequence at a time, with adapters as W + scaling * B A.

The reference does not use PEFT. If PEFT is installed, a separate check computes logprobs with PEFT and the saved files.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinsmith.formatting import size_text
from tinsmith.modeling.adaptation import quantizable
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.pretrained import load_causal_lm
from tinsmith.modeling.quantized import LoadingConfig, num_weights
from tinsmith.modeling.reference import adapted
from tinsmith_cli.doctor.subject import BASE, Example, Logprobs, Subject, free, loading
from trainer_service.engine.memory import available_bytes

GRADIENT_TOKENS = 80
"""Most tokens over which gradients are taken. Autograd keeps every activation of the plain model, which needs
memory."""


@dataclass(slots=True)
class Truth:
    """Reference values of the base model and of each adapter, by name."""

    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradient of each adapter in the order of the adapter's buffer, float32 [numel], in host memory."""


@dataclass(slots=True)
class OracleFindings:
    """The reference values, and properties of the plain model."""

    truth: Truth
    """Values in the type of the subject."""
    wide: Truth | None
    """Values computed in float32, whose rounding is negligible. None if the subject's type is float32, and if memory is
    short."""
    why_not_wide: str
    """The reason for which `wide` is None; empty if the subject's type is float32."""
    missing: Sequence[str]
    """Names of parameters that the files lack, and that transformers drew at random."""
    peft: Logprobs | None
    """Logprobs with the saved adapter, loaded by stock PEFT; None if PEFT was not used."""
    why_no_peft: str
    """The reason for which `peft` is None."""
    why_no_gradients: str
    """The reason for which there are no gradients; empty if there are."""
    num_parameters: int
    unquantised: Logprobs | None = None
    """Logprobs of the base model without quantisation; None if the subject is not quantised."""


def examine(
    subject: Subject, sequences: Sequence[Example], adapters: Mapping[str, Adapter], saved: Path | None
) -> OracleFindings:
    """Computes the reference. `adapters`: adapters in host memory, by name. `saved`: PEFT folder of one of them; None
    if there is none. Raises Unloadable."""
    model, missing = _load(subject)
    placed = {name: adapter.like(adapter.flat.to(subject.device)) for name, adapter in adapters.items()}
    why_no_gradients = _why_no_gradients(subject, list(adapters.values()))
    with_gradients = not why_no_gradients
    try:
        truth = _truth(model, sequences, placed, with_gradients=with_gradients)
        wide, why_not_wide = None, ""
        if subject.quantize is not None:
            why_not_wide = "quantised weights are compared in the type in which they are used"
        elif subject.dtype != torch.float32:
            needed, free_bytes = 2 * _num_bytes(model), available_bytes(subject.device)
            if needed <= free_bytes:
                model.to(torch.float32)  # type: ignore[arg-type]  # transformers' decorated signature
                wide = _truth(model, sequences, placed, with_gradients=with_gradients)
                model.to(subject.dtype)  # type: ignore[arg-type]
            else:
                why_not_wide = f"float32 weights would take {size_text(needed)}, {size_text(free_bytes)} are free"
        num_parameters = num_weights(model)  # before PEFT adds its own
        peft, why_no_peft = None, "there is no adapter"
        if subject.quantize is not None:
            why_no_peft = "stock PEFT would be compared on other weights, unquantised ones"
        elif saved is not None:
            peft, why_no_peft = _peft(model, sequences, saved)
    finally:
        del model
        free(subject.device)
    unquantised = _unquantised(subject, sequences)
    return OracleFindings(
        truth, wide, why_not_wide, missing, peft, why_no_peft, why_no_gradients, num_parameters, unquantised
    )


def _unquantised(subject: Subject, sequences: Sequence[Example]) -> Logprobs | None:
    if subject.quantize is None:
        return None
    model, _ = _load(replace(subject, quantize=None))
    try:
        return _logprobs(model, sequences)
    finally:
        del model
        free(subject.device)


def gradient_sequences(sequences: Sequence[Example]) -> list[Example]:
    """The sequences, taken in order, that fit into GRADIENT_TOKENS tokens together."""
    chosen: list[Example] = []
    for sequence in sequences:
        if sum(one.tokens_N.size for one in chosen) + sequence.tokens_N.size <= GRADIENT_TOKENS:
            chosen.append(sequence)
    return chosen


def _load(subject: Subject) -> tuple[PreTrainedModel, Sequence[str]]:
    quantize, dtype = subject.quantize, subject.dtype
    quantization = None if quantize is None else LoadingConfig(quantize, dtype, quantizable)
    model, missing = loading(
        subject.path,
        lambda: load_causal_lm(
            subject.path, config=subject.config, dtype=dtype, quantization=quantization, attn_implementation="eager"
        ),
    )
    model.to(subject.device)  # type: ignore[arg-type]  # transformers' decorated signature
    return model.eval().requires_grad_(False), missing


def _truth(
    model: PreTrainedModel,
    sequences: Sequence[Example],
    adapters: Mapping[str, Adapter],
    *,
    with_gradients: bool,
) -> Truth:
    found = Truth()
    found.logprobs[BASE] = _logprobs(model, sequences)
    for name, adapter in adapters.items():
        with adapted(model, adapter):
            found.logprobs[name] = _logprobs(model, sequences)
        if with_gradients:
            found.gradients[name] = _gradient(model, gradient_sequences(sequences), adapter)
    return found


@torch.no_grad()
def _logprobs(model: PreTrainedModel, sequences: Sequence[Example]) -> Logprobs:
    return [_score(model, sequence).cpu().numpy().astype(np.float32) for sequence in sequences]


def _gradient(model: PreTrainedModel, sequences: Sequence[Example], adapter: Adapter) -> Tensor:
    """Gradient of the sum of -weight * logprob by autograd, float32 [numel], in the order of the adapter's buffer."""
    leaf = adapter.like(adapter.flat.detach().clone())
    for tensor in leaf.tensors():
        tensor.requires_grad_(True)
    total = [torch.zeros_like(tensor) for tensor in leaf.tensors()]
    for sequence in sequences:
        with adapted(model, leaf):
            loss = -(_score(model, sequence) * torch.from_numpy(sequence.weights_N).to(model.device)).sum()
            grads = torch.autograd.grad(loss, leaf.tensors(), materialize_grads=True)
        torch._foreach_add_(total, grads)
    return torch.cat([tensor.flatten() for tensor in total]).cpu()


def _score(model: PreTrainedModel, sequence: Example) -> Tensor:
    tokens_N, targets_N = (torch.from_numpy(x).to(model.device) for x in (sequence.tokens_N, sequence.targets_N))
    logits_N_V = model(tokens_N[None], use_cache=False).logits[0]
    table_N_V = logits_N_V.to(torch.promote_types(logits_N_V.dtype, torch.float32)).log_softmax(-1)
    return table_N_V.gather(1, targets_N[:, None])[:, 0]


def _peft(model: PreTrainedModel, sequences: Sequence[Example], folder: Path) -> tuple[Logprobs | None, str]:
    """Logprobs of the model with an adapter that PEFT loads, or None and the reason. PEFT changes `model`."""
    if importlib.util.find_spec("peft") is None:
        return None, "peft is not installed"
    import peft

    try:
        loaded = peft.PeftModel.from_pretrained(model, folder)
    except (ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        return None, f"peft does not load it: {error}"
    return _logprobs(loaded, sequences), ""  # type: ignore[arg-type]  # it behaves as the model that it wraps


def _why_no_gradients(subject: Subject, adapters: Sequence[Adapter]) -> str:
    """The reason for which gradients are not computed: too little memory. Empty if there is enough. Autograd keeps a
    copy of the whole weight of adapted experts; for other layers it keeps activations only."""
    experts = {
        target.name: target.num_experts * target.in_features * target.out_features
        for adapter in adapters
        for target in adapter.targets
        if target.num_experts is not None
    }
    needed = 2 * sum(experts.values()) * subject.dtype.itemsize
    free_bytes = available_bytes(subject.device)
    if needed > free_bytes:
        return f"plain autograd through the experts would take {size_text(needed)}, {size_text(free_bytes)} are free"
    return ""


def _num_bytes(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
