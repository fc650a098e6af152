"""Checks once whether the Hugging Face hub or its cache has a base model. Without this check and without a network, the
hub's library would try again for half a minute, for each file of the model and in each service."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from tinsmith_cli.base_models import UsageError

_REFUSALS = (401, 403, 404)
"""Statuses with which the hub answers for a model that it does not have, or does not show to this user."""
_TIMEOUT_S = 10.0
"""Longest wait for the hub's answer, in seconds."""


def require(model: str, *, flag: str, report: Callable[[str], None]) -> None:
    """Raises UsageError for a hub id that neither the hub nor the cache has. If the hub does not answer but the cache
    has the model, this process and its children do not ask the hub any more. `model`: a hub id, or the absolute path of
    a folder, which is not checked. `flag`: flag that names the model, for the message."""
    if Path(model).is_absolute():
        return
    try:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    except ModuleNotFoundError:  # the planner reports the missing package
        return
    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=_TIMEOUT_S)
        return
    except HfHubHTTPError as error:
        if error.response.status_code not in _REFUSALS:  # trying again may help
            return
        reason = f"{constants.ENDPOINT} has no such model, or shows it only to users with a token (HF_TOKEN)"
        is_silent = False
    except OfflineModeIsEnabled:
        reason, is_silent = "HF_HUB_OFFLINE is set", False
    except Exception as error:  # it raises errors of many libraries
        reason, is_silent = f"{constants.ENDPOINT} does not answer ({' '.join(str(error).split())})", True
    if not _is_cached(model):
        raise UsageError(
            f"{flag}: {model}: {reason}, and the cache {constants.HF_HUB_CACHE} does not hold the model; name a folder "
            "with its files, or a cache that has it (HF_HOME), or download it where there is a network"
        )
    if is_silent:
        report(f"{model}: {reason}; the files in the cache are taken, as with HF_HUB_OFFLINE=1")
        os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes that this one starts
        constants.HF_HUB_OFFLINE = True


def _is_cached(model: str) -> bool:
    """Whether the cache has the model's configuration and all files of its weights."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json")
    if not isinstance(config, str):
        return False
    folder = Path(config).parent
    indexes = list(folder.glob("*.index.json"))
    if not indexes:
        return any(list(folder.glob(kind)) for kind in ("*.safetensors", "*.bin"))
    try:
        parts = {name for index in indexes for name in json.loads(index.read_text())["weight_map"].values()}
    except (OSError, ValueError, LookupError, AttributeError):
        return False
    return all((folder / name).is_file() for name in parts)
