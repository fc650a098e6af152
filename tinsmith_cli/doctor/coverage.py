"""Finds the parts of a model that no adapter reaches, and parts that are missing or special."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from tinsmith.errors import Unsupported
from tinsmith.modeling.adapter import GROUPS, VISION, Group
from tinsmith.modeling.base_model import BaseModel
from tinsmith_cli.doctor.subject import Subject, first_line


@dataclass(frozen=True, slots=True)
class UnreachedMatrices:
    """Matrices of one name and shape that no adapter changes."""

    pattern: str
    """Name of the parameters, with * for the numbers of their layers."""
    shape: Sequence[int]
    count: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """The layers of a model that adapters change, and the parts that they do not reach."""

    groups: Mapping[Group, int]
    """Number of adapted layers of each group. Experts that are one tensor count once."""
    missing: Mapping[Group, str]
    """Groups that cannot be trained, with the reasons."""
    unreached: Sequence[UnreachedMatrices]
    """Matrices that no adapter changes. Vectors (norms, biases) and embeddings, which never have adapters, are left
    out."""
    foreign: Sequence[str]
    """Names of the classes of linear layers with weights that are not torch's own, such as quantised layers."""
    notes: Sequence[str]
    """Sentences about special properties of the model."""

    @classmethod
    def of(cls, base: BaseModel, subject: Subject) -> Coverage:
        """The coverage of a loaded base model, whose layers are already replaced by adapted ones."""
        counts = Counter(target.group for target in base.targets)
        reached = {target.name for target in base.targets}
        embedding = _embedding_names(base)
        patterns: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for name, parameter in base.parameters.items():
            owner = name.rpartition(".")[0]
            is_matrix = parameter.ndim > 1 and not name.endswith(
                "bias"
            )  # the stacked biases of experts have 2 dimensions
            if is_matrix and not {name, owner} & reached and name not in embedding:
                patterns[re.sub(r"\.\d+(?=\.|$)", ".*", name), tuple(parameter.shape)] += 1
        return cls(
            groups={group: counts[group] for group in GROUPS if counts[group]},
            missing={group: base.why_not(group) for group in GROUPS if not counts[group]},
            unreached=[UnreachedMatrices(name, shape, count) for (name, shape), count in patterns.items()],
            foreign=sorted({type(module).__name__ for module in base.decoder.modules() if _is_foreign(module)}),
            notes=_notes(base, subject),
        )


def _embedding_names(base: BaseModel) -> set[str]:
    """Names of the input embedding, and of an output layer that shares its tensor."""
    embeddings = {id(module.weight) for module in base.decoder.modules() if isinstance(module, nn.Embedding)}
    return {name for name, parameter in base.parameters.items() if id(parameter) in embeddings}


def _is_foreign(module: nn.Module) -> bool:
    """Whether the module is a linear layer of another class than torch's."""
    name = type(module).__name__
    if isinstance(module, nn.Linear):
        return type(module) is not nn.Linear
    weights = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return "Linear" in name and name != "LoraLinear" and bool(weights)


def _notes(base: BaseModel, subject: Subject) -> list[str]:
    config = subject.text_config.to_dict()
    notes = []
    if base.one_by_one:
        notes.append(f"it runs one sequence at a time, which is slow: {base.one_by_one}")
    elif base.recurrent:
        notes.append(f"{', '.join(base.recurrent)} carry a state from token to token: handled")
    if config.get("tie_word_embeddings"):
        notes.append("input and output embeddings are one tensor: an adapter on unembed changes the output only")
    if config.get("attn_logit_softcapping"):
        notes.append("attention scores are soft-capped: handled")
    if config.get("final_logit_softcapping"):
        notes.append("logits are soft-capped: handled")
    if any(name.endswith("sinks") for name in base.parameters):
        notes.append("attention has sinks: handled")
    if window := subject.window:
        length = max(sequence.tokens_N.size for sequence in subject.sequences())
        reach = f"a sequence of {length} tokens " + ("reaches beyond it" if length > window else "does not reach it")
        notes.append(f"sliding windows of {window} tokens: handled; {reach}")
    if base.tower is not None:
        number = sum(target.group == VISION for target in base.targets)
        adapted = f"train_vision adapts {number} of its layers" if number else base.why_not(VISION)
        notes.append(f"it sees pictures through a vision tower: handled; {adapted}")
    if quantised := getattr(subject.config, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
        notes.append(f"the files are quantised ({method})")
    return notes


@dataclass(frozen=True, slots=True)
class TokenizerFindings:
    """Properties of the tokenizer, which clients need that send text."""

    has_tokenizer: bool
    has_chat_template: bool
    num_tokens: int
    """Size of the tokenizer's vocabulary, which must not be larger than the model's."""
    failure: str = ""
    """The reason for which there is no tokenizer; empty if there is one."""
    is_broken: bool = False
    """Whether the files of a tokenizer are there but cannot be read."""

    @classmethod
    def of(cls, subject: Subject) -> TokenizerFindings:
        from sampler_service.tokenizer import BrokenTokenizer, load_tokenizer

        try:
            tokenizer = load_tokenizer(subject.path)
        except BrokenTokenizer as error:
            return cls(False, False, 0, first_line(error), is_broken=True)
        except Unsupported as error:
            return cls(False, False, 0, first_line(error).partition(" (")[0])
        return cls(True, bool(tokenizer.chat_template), len(tokenizer))
