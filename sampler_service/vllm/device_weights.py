"""The base weights on the worker's device: the base model's own, from its files, or those of one full version, from
shared memory. Exchanged between two steps, in place, by vLLM's own loading of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader import get_model_loader  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from sampler_service.vllm.full_source import FullSource
from sampler_service.vllm.patches import pack_tied_output

BASE = 0


class DeviceWeights:
    def __init__(self, runner: Any) -> None:
        self.current = BASE
        self._runner = runner
        self._versions: dict[int, FullSource] = {}
        self._others: list[tuple[str, Tensor]] | None = None
        """Tensors in the files that are no parameters; None until the first full version."""

    def register(self, number: int, version: FullSource) -> str:
        """Registers a version that steps may use from now on. Returns an empty text; or, if vLLM cannot load
        such versions of this model, the reason, and changes nothing.

        The first version is loaded here on trial, so that no step fails if vLLM cannot load such versions.
        """
        self._versions[number] = version
        if self._others is not None:
            return ""
        try:
            self._others = version.others(self._base())
            before = self.current
            try:
                self.use(number)
            finally:
                self._load(before)
        except (ValueError, RuntimeError, KeyError, AttributeError, TypeError, AssertionError) as error:
            del self._versions[number]
            self._others = None
            return str(error) or repr(error)
        return ""

    def forget(self, number: int) -> None:
        self._versions.pop(number, None)

    def use(self, number: int) -> None:
        if number != self.current:
            self._load(number)

    def _load(self, number: int) -> None:
        weights = self._base() if number == BASE else self._full(self._versions[number])
        self.current = number
        runner = self._runner
        model = runner.get_model()
        wanted = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        # vLLM loads models outside inference mode, in which steps run, so the mode is switched off.
        with set_current_vllm_config(runner.vllm_config), torch.inference_mode(mode=False), torch.no_grad():
            initialize_layerwise_reload(model)
            try:
                loaded = model.load_weights(weights)
            finally:
                finalize_layerwise_reload(model, runner.model_config)
            pack_tied_output(model)
            runner.reset_lora_state()
        if loaded is not None and (missing := sorted(wanted - loaded)):
            raise ValueError(f"vLLM's loading leaves {missing[0]} as it was, and {len(missing) - 1} more")

    def _full(self, version: FullSource) -> Iterable[tuple[str, Tensor]]:
        assert self._others is not None
        yield from version.tensors()
        yield from self._others

    def _base(self) -> Iterable[tuple[str, Tensor]]:
        runner = self._runner
        loader: Any = get_model_loader(runner.vllm_config.load_config)
        return loader.get_all_weights(runner.model_config, runner.get_model())
