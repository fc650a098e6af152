"""Turns gaps and limits into checks, and checks into a verdict, without computing with a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from tinsmith.modeling.adapter import GROUPS, Group
from tinsmith.modeling.pretrained import listed
from tinsmith_cli.doctor import samplers
from tinsmith_cli.doctor.limits import COMPANY, Findings, GapLimits, gap, limits, relative
from tinsmith_cli.doctor.subject import BASE, Logprobs

Status = Literal["ok", "note", "warning", "FAILED", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    section: str
    """Section of the report to which the check belongs."""
    name: str
    status: Status
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Gaps and limits, by name."""
    detail: str = ""
    """Origin of the limits, or the reason for the status."""
    advice: str = ""
    """Advice to the user if the check is not ok."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """All checks, and the conclusions from them."""

    checks: Sequence[Check]
    trainable: Sequence[Group]
    """Groups whose adapters can be trained. If there are none, the model cannot be trained."""
    sampleable: Sequence[str]
    """Engines that sample from the model correctly."""

    @property
    def untrainable(self) -> Sequence[Group]:
        """Groups that a LoRA client must switch off. By default a client asks for all groups, and is refused."""
        return [group for group in GROUPS if group not in self.trainable]

    @property
    def is_ok(self) -> bool:
        """Whether a LoRA client with its defaults can train and sample here, and no check has failed."""
        return not self.untrainable and bool(self.sampleable) and all(one.status != "FAILED" for one in self.checks)


def judge(findings: Findings) -> Verdict:
    """Makes the checks from the findings, and the verdict from the checks."""
    checks = [*_weights(findings), *_logprobs(findings), *_gradients(findings), *_reload(findings)]
    for sampler in findings.samplers:
        checks += _sampler(findings, sampler)
    checks += [Check("samplers", name, "skipped", detail=why) for name, why in findings.not_there.items()]
    checks += [*_coverage(findings), *_text(findings)]
    failed = {(check.section, check.name) for check in checks if check.status == "FAILED"}
    sound = not any(section in ("weights", "trainer") for section, _ in failed) and not findings.trainer.failure
    wrong = {name for section, name in failed if section in ("logprobs", "gradients")}
    base_is_right = BASE not in wrong and not any("all" in name or "company" in name for name in wrong)
    return Verdict(
        checks=checks,
        trainable=[
            group for group in _groups(findings) if sound and base_is_right and f"adapter on {group}" not in wrong
        ],
        sampleable=[
            sampler.engine
            for sampler in findings.samplers
            if not any(section in (f"sampler {sampler.engine}", "weights") for section, _ in failed)
        ],
    )


def _groups(findings: Findings) -> list[Group]:
    """Groups whose adapters the trainer accepts."""
    coverage = findings.trainer.coverage
    return [] if coverage is None else list(coverage.groups)


def _gap_check(section: str, name: str, ours: Logprobs, theirs: Logprobs, limit: GapLimits, advice: str) -> Check:
    largest, mean = gap(ours, theirs)
    passed = largest <= limit.largest and mean <= limit.mean
    numbers = {"max": largest, "mean": mean, "limit": limit.largest, "mean_limit": limit.mean}
    return Check(section, name, "ok" if passed else "FAILED", numbers, limit.source, "" if passed else advice)


def _weights(findings: Findings) -> list[Check]:
    missing = findings.oracle.missing
    if not missing:
        return [Check("weights", "all parameters are in the files", "ok")]
    return [
        Check(
            "weights",
            f"{len(missing)} parameters are not in the files, and were drawn at random",
            "FAILED",
            detail=listed(missing),
            advice="fetch the files again; they are not complete, or of another architecture than config.json says",
        )
    ]


def _logprobs(findings: Findings) -> list[Check]:
    ours, theirs = findings.trainer, findings.oracle.truth
    if ours.failure:
        advice = "it cannot be trained here; an engine that samples from it may still serve it"
        return [Check("trainer", "the training engine", "FAILED", detail=ours.failure, advice=advice)]
    checks = []
    for name, logprobs in ours.logprobs.items():
        advice = (
            "do not train this model here: what it computes is not what the model says; report it with the --json file"
            if name == BASE
            else f"do not train with it: switch off {_flags(name)}, and report it with the --json file"
        )
        limit = limits(findings, name)
        checks.append(_gap_check("logprobs", name, logprobs, theirs.logprobs[name], limit, advice))
    if ours.alone is not None:
        limit = limits(findings, ours.largest)
        if findings.subject.dtype == torch.float32:
            allowed = COMPANY * max(1.0, max(float(np.abs(one).max()) for one in ours.alone))
            limit = GapLimits(allowed, allowed, 0.0, f"in company {COMPANY:g} of the largest logprob")
        advice = "sequences see their neighbours: do not train this model with several tenants; report it"
        checks.append(
            _gap_check("logprobs", "alone and in company", ours.logprobs[ours.largest], ours.alone, limit, advice)
        )
    return checks


def _flags(name: str) -> str:
    group = name.rpartition(" ")[2]
    return f"train_{group}" if group in GROUPS else "the groups that fail alone"


def _gradients(findings: Findings) -> list[Check]:
    if findings.trainer.failure:
        return []
    if findings.oracle.why_no_gradients:
        return [Check("gradients", "of all groups", "skipped", detail=findings.oracle.why_no_gradients)]
    checks = []
    for name, theirs in findings.oracle.truth.gradients.items():
        limit = limits(findings, name)
        error = relative(findings.trainer.gradients[name], theirs)
        passed = error <= limit.gradient
        advice = (
            "" if passed else f"do not train with it: switch off {_flags(name)}, and report it with the --json file"
        )
        numbers = {"relative": error, "limit": limit.gradient}
        checks.append(Check("gradients", name, "ok" if passed else "FAILED", numbers, limit.source, advice))
    return checks


def _reload(findings: Findings) -> list[Check]:
    ours = findings.trainer
    if ours.saved is None or ours.reloaded is None:
        return []
    same = bool(ours.is_same_after_load)
    name, section = ours.largest, "save and reload"
    checks = [
        Check(
            section, "every tensor of adapter and optimizer, bit for bit", "ok" if same else "FAILED",
            advice="" if same else "checkpoints of this model do not hold what was trained; report it",
        ),
        _gap_check(
            section, "logprobs of the reloaded adapter", ours.reloaded, ours.logprobs[name], limits(findings, name),
            "checkpoints of this model do not hold what was trained; report it",
        ),
    ]  # fmt: skip
    if findings.oracle.peft is None:
        why = findings.oracle.why_no_peft
        known = why.startswith("peft is not")
        status: Status = "skipped" if known else "warning"
        advice = "" if known else "adapters of this model cannot be used with that version of peft"
        checks.append(Check(section, "logprobs of stock PEFT with the same files", status, detail=why, advice=advice))
    else:
        theirs = findings.oracle.truth.logprobs[name]
        advice = "other programs will not read the exported adapter as it was trained; report it"
        checks.append(
            _gap_check(
                section, "logprobs of stock PEFT with the same files", findings.oracle.peft, theirs,
                limits(findings, name), advice,
            )
        )  # fmt: skip
    return checks


def _sampler(findings: Findings, sampler: samplers.SamplerFindings) -> list[Check]:
    section = f"sampler {sampler.engine}"
    if sampler.failure:
        return [Check(section, "the engine", "FAILED", detail=sampler.failure, advice="it cannot serve this model")]
    advice = "do not sample from this model with this engine: it is not the model that is trained; report it"
    checks = []
    for name, logprobs in sampler.logprobs.items():
        # If the trainer has failed, the oracle still has the reference.
        right = findings.trainer.logprobs.get(name) or findings.oracle.truth.logprobs.get(name)
        if right is None:
            checks.append(Check(section, f"prompts, {name}", "skipped", detail="the trainer has no such adapter"))
            continue
        cut = [theirs[: ours.size] for ours, theirs in zip(logprobs, right, strict=True)]
        checks.append(_gap_check(section, f"prompts, {name}", logprobs, cut, limits(findings, name), advice))
    for name in sampler.logprobs:
        for temperature, how in ((0.0, "greedy"), (1.0, "drawn")):
            chosen = [
                (one.logprobs_N, scored[0][-one.logprobs_N.size :])
                for one, scored in findings.trainer.drawn
                if one in sampler.drawn and one.name == name and one.temperature == temperature
            ]
            if chosen:
                ours, theirs = zip(*chosen, strict=True)
                checks.append(
                    _gap_check(section, f"{how} tokens, {name}", ours, theirs, limits(findings, name), advice)
                )
    unserved = [group for group in _groups(findings) if group not in sampler.groups]
    if unserved:
        checks.append(
            Check(
                section, f"adapters on {', '.join(unserved)}", "warning", detail="it cannot serve them",
                advice=f"train with {' and '.join(f'train_{group}=false' for group in unserved)} to sample with it",
            )
        )  # fmt: skip
    return checks


def _coverage(findings: Findings) -> list[Check]:
    coverage = findings.trainer.coverage
    if coverage is None:
        return []
    checks = [
        Check(
            "coverage", f"adapters on {group}", "FAILED", detail=reason,
            advice=f"a LoRA client asks for them by default, and is refused: create it with train_{group}=false",
        )
        for group, reason in coverage.missing.items()
    ]  # fmt: skip
    if coverage.foreign:
        checks.append(
            Check(
                "coverage", "quantised or other layers", "warning", detail=", ".join(coverage.foreign),
                advice="take files that are not quantised to train them",
            )
        )  # fmt: skip
    checks += [
        Check(
            "coverage", f"{one.count} x {one.pattern}", "note",
            detail=f"{list(one.shape)}, is never changed",
        )
        for one in coverage.unreached
    ]  # fmt: skip
    return checks


def _text(findings: Findings) -> list[Check]:
    text, vocab_size = findings.text, findings.subject.text_config.vocab_size
    if text.is_broken:
        advice = "fetch the tokenizer's files again; until then send tokens, not text"
        return [Check("text", "tokenizer", "FAILED", detail=text.failure, advice=advice)]
    if not text.has_tokenizer:
        advice = "put tokenizer.json and tokenizer_config.json beside the weights; until then send tokens, not text"
        return [Check("text", "tokenizer", "warning", detail=text.failure, advice=advice)]
    checks = []
    if text.num_tokens > vocab_size:
        checks.append(
            Check(
                "text", "tokenizer", "FAILED",
                detail=f"it has {text.num_tokens} tokens, the model's embedding {vocab_size}",
                advice="it is not this model's tokenizer: fetch the files again",
            )
        )  # fmt: skip
    else:
        checks.append(Check("text", "tokenizer", "ok", detail=f"{text.num_tokens} tokens of {vocab_size}"))
    if text.has_chat_template:
        checks.append(Check("text", "chat template", "ok"))
    else:
        checks.append(
            Check("text", "chat template", "warning", detail="there is none", advice="send text or tokens, no chats")
        )
    eos = next((sampler.eos_token_ids for sampler in findings.samplers if not sampler.failure), None)
    if eos is not None and not eos:
        advice = (
            "samples end at max_tokens or at a stop of the request only; set eos_token_id in generation_config.json"
        )
        checks.append(Check("text", "end-of-sequence token", "warning", detail="there is none", advice=advice))
    elif eos:
        checks.append(Check("text", "end-of-sequence token", "ok", detail=", ".join(str(token) for token in eos)))
    return checks
