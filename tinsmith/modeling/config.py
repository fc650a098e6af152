"""Reads the configuration in a base model's files. Code that comes with a model is never run."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig


def load_config(path: str | Path, *, local_files_only: bool = False) -> PretrainedConfig:
    """The configuration of a model. `path`: a folder or a Hugging Face id. `local_files_only`: do not ask the hub for a
    newer configuration. Raises OSError and ValueError, as AutoConfig does."""
    try:
        # Without trust_remote_code=False, transformers would ask on the terminal whether to run the model's code.
        return AutoConfig.from_pretrained(path, local_files_only=local_files_only, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{path}: the model needs Python code of its own (auto_map in config.json), which is not run here; take a "
            "model whose architecture transformers itself contains"
        ) from None
    except OSError as error:
        if Path(path).is_dir():
            raise
        if Path(path).is_absolute():
            raise FileNotFoundError(f"{path}: there is no such folder") from None
        raise OSError(
            f"{path}: config.json cannot be read from the hub or its cache; check the name and the network, or name a "
            f"folder that holds it ({' '.join(str(error).split())})"
        ) from error
