"""The verdict as text of at most 100 columns, and as JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np
import torch

import tinsmith
from tinsmith.formatting import size_text
from tinsmith_cli.doctor.limits import Findings
from tinsmith_cli.doctor.subject import BASE
from tinsmith_cli.doctor.trainer import Capacity, TrainingSpeed
from tinsmith_cli.doctor.verdict import Check, Verdict

_WIDTH = 100
_NAME = 44
_TITLES = {
    "weights": "weights",
    "trainer": "trainer",
    "logprobs": "logprobs: trainer (packed, with neighbours) and oracle (plain transformers)",
    "gradients": "gradients: trainer and autograd on the oracle",
    "save and reload": "save and reload",
    "samplers": "other samplers",
    "coverage": "what adapters do not reach",
    "text": "text",
}


def as_text(findings: Findings, verdict: Verdict) -> str:
    """The report for people."""
    return "\n".join([*_head(findings), *_checks(verdict), *_measured(findings), "", *_end(verdict)])


def _head(findings: Findings) -> Iterator[str]:
    subject = findings.subject
    sequences = subject.sequences()
    lengths = ", ".join(str(one.tokens_N.size) for one in sequences)
    threads = f", CPU threads: {torch.get_num_threads()}" if subject.device.type == "cpu" else ""
    yield f"{subject.path}"
    yield (
        f"  {_architecture(findings)}, {findings.oracle.num_parameters / 1e6:,.1f} M parameters, {_dtype(findings)} on "
        f"{subject.device}{threads}"
    )
    yield f"  compared on {len(sequences)} sequences of {lengths} tokens, adapters of rank {subject.rank}"


def _architecture(findings: Findings) -> str:
    config = findings.subject.config
    return (config.architectures or [type(config).__name__])[0]


def _dtype(findings: Findings) -> str:
    return str(findings.subject.dtype).removeprefix("torch.")


def _checks(verdict: Verdict) -> Iterator[str]:
    for section, group in groupby(verdict.checks, key=lambda check: check.section):
        checks = list(group)
        yield ""
        if section == "gradients":
            heading = f"{'':10}{'error':>10}{'limit':>10}"
        elif any("max" in check.numbers for check in checks):
            heading = f"{'max gap':>10}{'mean gap':>10}{'limit':>10}"
        else:
            heading = ""
        title = _TITLES.get(section, f"{section} and trainer")
        if heading and len(title) > _NAME:
            yield title
            title = ""
        yield f"{title:<{_NAME + 2}}{heading}".rstrip()
        for check in checks:
            yield from _check(check)
        sources = list(dict.fromkeys(check.detail for check in checks if check.numbers and check.detail))
        if section in ("logprobs", "gradients") and sources:
            yield from textwrap.wrap(f"limits: {'; '.join(sources)}", _WIDTH - 2, initial_indent="  ")


def _check(check: Check) -> Iterator[str]:
    numbers = check.numbers
    if "max" in numbers:
        cells = [numbers["max"], numbers["mean"], numbers["limit"]]
    elif "relative" in numbers:
        cells = [None, numbers["relative"], numbers["limit"]]
    else:
        cells = []
    if cells:
        values = "".join(f"{'':10}" if cell is None else f"{cell:>10.2g}" for cell in cells)
        yield f"  {check.name:<{_NAME}}{values}   {check.status}"
    else:
        text = check.name if not check.detail else f"{check.name}: {check.detail}"
        yield from textwrap.wrap(
            f"{check.status:<8} {text}", _WIDTH - 2, initial_indent="  ", subsequent_indent=" " * 11
        )
    if check.advice:
        yield from textwrap.wrap(check.advice, _WIDTH - 4, initial_indent="    -> ", subsequent_indent="       ")


def _measured(findings: Findings) -> Iterator[str]:
    yield ""
    yield "measured here, now"
    coverage = findings.trainer.coverage
    for note in () if coverage is None else coverage.notes:
        yield from textwrap.wrap(f"note: {note}", _WIDTH - 2, initial_indent="  ", subsequent_indent=" " * 8)
    if (gap := _quantisation_gap(findings)) is not None:
        largest, mean = gap
        name = f"gap of {findings.subject.quantize} to the unquantised model"
        yield _line(name, f"{largest:.2g} nats at most, {mean:.2g} in the mean")
    speed, capacity = findings.trainer.speed, findings.trainer.capacity
    if speed is not None:
        yield from _training(speed)
    for sampler in findings.samplers:
        for size, tokens_per_s in sampler.tokens_per_s.items():
            yield _line(f"decoding, {sampler.engine}, batch {size}", f"{tokens_per_s:,.0f} tokens/s")
        if sampler.max_length:
            yield _line(f"longest prompt and output, {sampler.engine}", f"{sampler.max_length:,} tokens")
    if capacity is not None:
        where = "all layers" if coverage is None or not coverage.missing else ", ".join(coverage.groups)
        yield from _capacity(capacity, where)


def _quantisation_gap(findings: Findings) -> tuple[float, float] | None:
    """Largest and mean gap of logprobs, in nats, between the quantised and the unquantised base model."""
    whole = findings.oracle.unquantised
    if whole is None:
        return None
    pairs = zip(findings.oracle.truth.logprobs[BASE], whole, strict=True)
    gaps = np.concatenate([np.abs(ours - theirs) for ours, theirs in pairs])
    return float(gaps.max()), float(gaps.mean())


def _training(speed: TrainingSpeed) -> Iterator[str]:
    yield _line(
        "training, forward and backward", f"{speed.tokens_per_s:,.0f} tokens/s, {speed.num_tokens:,} tokens at once"
    )


def _capacity(capacity: Capacity, where: str) -> Iterator[str]:
    yield _line("token budget of a micro-batch", f"{capacity.token_budget:,} tokens")
    yield _line("longest sequence to train on", f"{capacity.longest_sequence:,} tokens")
    for rank in capacity.adapter_bytes:
        served, trained = capacity.adapter_bytes[rank], capacity.training_bytes[rank]
        fits = f"{capacity.models_bytes // trained:,} fit"
        if capacity.device_bytes is not None:
            fits += f", {min(capacity.device_bytes, capacity.models_bytes) // trained:,} of them on the device"
        yield _line(
            f"an adapter of rank {rank} on {where}", f"{size_text(served)}; in training {size_text(trained)}, {fits}"
        )


def _line(name: str, value: str) -> str:
    return f"  {name:<{_NAME}}{value}"


def _end(verdict: Verdict) -> Iterator[str]:
    counts = {status: sum(check.status == status for check in verdict.checks) for status in ("FAILED", "warning")}
    trained = "NO"
    if verdict.trainable:
        off = ", ".join(f"train_{group}=false" for group in verdict.untrainable)
        trained = f"partly, with {off}: " if off else "yes, "
        trained += f"adapters on {', '.join(verdict.trainable)}"
    sampled = f"yes, with {', '.join(verdict.sampleable)}" if verdict.sampleable else "NO"
    yield f"trainable:  {trained}"
    yield f"sampleable: {sampled}"
    yield f"{'ok' if verdict.is_ok else 'NOT OK'}: {counts['FAILED']} failed, {counts['warning']} warnings"


def as_json(findings: Findings, verdict: Verdict) -> dict[str, Any]:
    """All results, in types that JSON has."""
    subject, trained = findings.subject, findings.trainer
    return {
        "tinsmith": tinsmith.__version__,
        "torch": torch.__version__,
        "model": subject.path,
        "architecture": _architecture(findings),
        "num_parameters": findings.oracle.num_parameters,
        "device": str(subject.device),
        "device_name": torch.cuda.get_device_name() if subject.device.type == "cuda" else "cpu",
        "num_threads": torch.get_num_threads(),
        "dtype": _dtype(findings),
        "quantize": subject.quantize,
        "gap_to_unquantised": _quantisation_gap(findings),
        "rank": subject.rank,
        "sequence_lengths": [int(one.tokens_N.size) for one in subject.sequences()],
        "ok": verdict.is_ok,
        "trainable": bool(verdict.trainable),
        "trainable_groups": list(verdict.trainable),
        "untrainable_groups": list(verdict.untrainable),
        "sampleable": bool(verdict.sampleable),
        "sampling_engines": list(verdict.sampleable),
        "max_context_length": subject.context,
        "checks": [_finite(asdict(check)) for check in verdict.checks],
        "coverage": None if trained.coverage is None else asdict(trained.coverage),
        "text": asdict(findings.text),
        "measured": {
            "training": None if trained.speed is None else asdict(trained.speed),
            "decoding_tokens_per_s": {one.engine: dict(one.tokens_per_s) for one in findings.samplers},
            "room": None if trained.capacity is None else asdict(trained.capacity),
        },
    }


def _finite(check: Mapping[str, Any]) -> dict[str, Any]:
    """The check in the form for JSON, which has no NaN: numbers that are not finite become null."""
    numbers = {key: value if math.isfinite(value) else None for key, value in check["numbers"].items()}
    return {**check, "numbers": numbers}
