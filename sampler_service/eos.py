"""The end-of-sequence tokens that a model's files name."""

from __future__ import annotations

from transformers import GenerationConfig, PretrainedConfig


def eos_token_ids(path: str, config: PretrainedConfig) -> frozenset[int]:
    """The ids in generation_config.json, else those in the configuration; there may be none."""
    try:
        found = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the model has no generation_config.json
        found = None
    if found is None:  # configurations of the language models of Qwen's vision models have no such field
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
