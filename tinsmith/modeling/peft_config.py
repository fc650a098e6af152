"""Reads adapter_config.json of a PEFT folder: rank and scaling of each layer. Refuses all but plain LoRA, by name."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import regex

from tinsmith.errors import InvalidRequest
from tinsmith.modeling.peft_files import CONFIG

_MAX_CONFIG_BYTES = 2**20
_MAX_PATTERNS = 1000
_MAX_PATTERN_LENGTH = 300
_MATCHING_TIMEOUT_S = 2.0
_MAX_FLOAT = 1e300
_MAX_RANK = 2**20

_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules",
}  # fmt: skip
"""Keys that do not change what the tensors compute. The tensors' names show to which layers they belong."""
_HARMLESS_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights as they are."""


@dataclass(frozen=True, slots=True)
class LayerScaling:
    """Rank and scaling of a layer that computes with W + scaling * B A."""

    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of a PEFT folder that decide what its tensors compute."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    parameters: Sequence[str]
    """Ends of the names of parameters that PEFT adapts as such: fused experts, and weights of linear layers."""
    made_for: str
    """Name of the base model; empty if the file names none."""
    notes: Sequence[str]
    """Settings that have no effect here, in sentences for the user."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the file. Raises InvalidRequest, naming the key that cannot be imported."""
        if not path.exists():
            raise InvalidRequest(f"{CONFIG} is missing", field=CONFIG)
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise InvalidRequest(f"{CONFIG} has more than {_MAX_CONFIG_BYTES} bytes", field=CONFIG)
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{CONFIG} is not JSON: {error}", field=CONFIG) from None
        if not isinstance(content, dict):
            raise InvalidRequest(f"{CONFIG} must be a JSON object, not {type(content).__name__}", field=CONFIG)
        keys: dict[str, Any] = dict(content)
        notes: list[str] = []
        _expect(keys, "peft_type", ("LORA",))
        _expect(keys, "task_type", (None, "CAUSAL_LM"))
        _expect(keys, "bias", (None, "none"))
        _expect(keys, "init_lora_weights", _HARMLESS_INITS)
        if _number(keys, "lora_dropout", 0.0, low=0.0):
            notes.append("lora_dropout is not applied in training here")
        keys.pop("fan_in_fan_out", None)  # PEFT corrects it to what the layer is
        config = cls(
            rank=_rank(keys.pop("r", 8), "r"),
            alpha=_number(keys, "lora_alpha", 8.0),
            rslora=_expect(keys, "use_rslora", (None, False, True)) is True,
            rank_pattern={
                key: _rank(value, f"rank_pattern[{key!r}]") for key, value in _patterns(keys, "rank_pattern")
            },
            alpha_pattern={
                key: _as_number(value, f"alpha_pattern[{key!r}]") for key, value in _patterns(keys, "alpha_pattern")
            },
            parameters=_names(keys, "target_parameters"),
            made_for=str(keys.get("base_model_name_or_path") or ""),
            notes=notes,
        )
        for key, value in keys.items():
            if key not in _WITHOUT_EFFECT and value not in (None, False, [], {}, ""):
                raise InvalidRequest(
                    f"{CONFIG}: {key} = {_shown(value)} cannot be imported; only plain LoRA of linear layers can "
                    "(remove the key if the tensors do not depend on it)",
                    field=key,
                )
        return config

    def scalings(self, modules: Sequence[str]) -> dict[str, LayerScaling]:
        """Rank and scaling of each module, by its name in the model. Raises InvalidRequest for a bad or slow regular
        expression."""
        deadline_s = time.monotonic() + _MATCHING_TIMEOUT_S
        found: dict[str, LayerScaling] = {}
        for module in modules:
            weight = f"{module}.weight"
            name = weight if any(f".{weight}".endswith(f".{end}") for end in self.parameters) else module
            rank = _first_match(self.rank_pattern, name, deadline_s, key="rank_pattern", otherwise=self.rank)
            alpha = _first_match(self.alpha_pattern, name, deadline_s, key="alpha_pattern", otherwise=self.alpha)
            found[module] = LayerScaling(rank, alpha / (math.sqrt(rank) if self.rslora else rank))
        return found


def _expect(keys: dict[str, Any], key: str, allowed: Sequence[object]) -> object:
    value = keys.pop(key, None)
    if not any(value is one or (isinstance(value, str) and value == one) for one in allowed):
        raise InvalidRequest(
            f"{CONFIG}: {key} = {_shown(value)} cannot be imported; it must be one of "
            f"{', '.join(json.dumps(one) for one in allowed)}",
            field=key,
        )
    return value


def _rank(value: object, key: str) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise InvalidRequest(f"{CONFIG}: {key} = {_shown(value)} is not a rank of 1 or more", field=key)
    return value


def _number(keys: dict[str, Any], key: str, default: float, *, low: float = -math.inf) -> float:
    value = keys.pop(key, default)
    number = _as_number(value, key)
    if number < low:
        raise InvalidRequest(f"{CONFIG}: {key} = {_shown(value)} is below {low:g}", field=key)
    return number


def _as_number(value: object, key: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_FLOAT:
        return float(value)
    raise InvalidRequest(f"{CONFIG}: {key} = {_shown(value)} is not a finite number", field=key)


def _patterns(keys: dict[str, Any], key: Literal["rank_pattern", "alpha_pattern"]) -> list[tuple[str, object]]:
    value = keys.pop(key, None) or {}
    if (
        not isinstance(value, dict)
        or len(value) > _MAX_PATTERNS
        or max(map(len, value), default=0) > _MAX_PATTERN_LENGTH
    ):
        raise InvalidRequest(
            f"{CONFIG}: {key} must be an object of at most {_MAX_PATTERNS} keys of {_MAX_PATTERN_LENGTH} characters",
            field=key,
        )
    return list(value.items())


def _names(keys: dict[str, Any], key: str) -> list[str]:
    value = keys.pop(key, None) or []
    if not isinstance(value, list) or len(value) > _MAX_PATTERNS or not all(isinstance(name, str) for name in value):
        raise InvalidRequest(f"{CONFIG}: {key} must be a list of at most {_MAX_PATTERNS} names", field=key)
    return value


def _first_match(patterns: Mapping[str, Any], module: str, deadline_s: float, *, key: str, otherwise: Any) -> Any:
    """The value of the first regular expression that matches the module's name or its end, as in PEFT.

    The expressions come from users, and some take forever to match. Python's own `re` would block the whole process.
    """
    for pattern, value in patterns.items():
        try:
            left_s = max(deadline_s - time.monotonic(), 1e-6)
            if regex.match(rf"(.*\.)?({pattern})$", module, timeout=left_s, concurrent=True):
                return value
        except TimeoutError:
            raise InvalidRequest(f"{CONFIG}: {key}[{pattern!r}] takes too long to match", field=key) from None
        except regex.error as error:
            raise InvalidRequest(
                f"{CONFIG}: {key}[{pattern!r}] is not a regular expression: {error}", field=key
            ) from None
    return otherwise


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
