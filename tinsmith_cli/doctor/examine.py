"""Runs the examination phase by phase. One model is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tinsmith_cli.doctor import oracle, samplers, trainer
from tinsmith_cli.doctor.coverage import TokenizerFindings
from tinsmith_cli.doctor.limits import Findings
from tinsmith_cli.doctor.subject import Subject


def examine(subject: Subject, scratch: Path, *, report: Callable[[str], None]) -> Findings:
    """Examines all engines and the oracle. `scratch`: an empty folder. `report`: called with a line for each phase.

    Raises Unloadable if the model cannot be loaded.
    """
    sequences = subject.sequences()
    not_there: dict[str, str] = {}
    sampled: list[samplers.SamplerFindings] = []
    for kind in samplers.KINDS:
        if subject.quantize is not None and kind.name == "vllm":
            not_there[kind.name] = f"it cannot compute with weights that are quantised to {subject.quantize} here"
        elif why := kind.missing():
            not_there[kind.name] = why
        else:
            report(f"the {kind.name} sampler: loading, scoring, drawing")
            sampled.append(samplers.examine(kind, subject, sequences))
    report("the trainer: loading, scoring, gradients, speed")
    drawn = [one for sampler in sampled for one in sampler.drawn]
    trained = trainer.examine(subject, sequences, drawn, scratch)
    report("the oracle: loading, scoring, gradients")
    truth = oracle.examine(subject, sequences, trained.adapters, trained.saved)
    return Findings(subject, truth, trained, sampled, not_there, TokenizerFindings.of(subject))
