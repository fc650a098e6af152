"""Methods that Tinsmith adds to each of vLLM's workers: versions from shared memory, its own draws and prompt scores.

The engine calls these methods by name (collective_rpc), between two steps. Like `patches.py` they lean on vLLM's
internals, so vLLM's version is pinned, and the engine checks itself at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]
from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]
from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]
from vllm.lora.utils import parse_fine_tuned_lora_name  # pyright: ignore[reportMissingImports]

from sampler_service.vllm import patches
from sampler_service.vllm.delta_rule import compute as compute_delta_rule
from sampler_service.vllm.device_weights import DeviceWeights
from sampler_service.vllm.draw import StreamSampler
from sampler_service.vllm.full_source import FullSource
from sampler_service.vllm.picture_inputs import PictureInfo, PictureInputs
from sampler_service.vllm.processes import die_with_parent
from sampler_service.vllm.score import PromptScoring
from sampler_service.vllm.shared_memory import Handle

patches.replace_picture_processor(PictureInfo)  # set here, because vLLM asks for it when it makes the model runner


@dataclass(frozen=True, slots=True)
class Registered:
    """A version that this worker can load at any time."""

    handle: Handle
    specs: Sequence[tuple[str, Sequence[int]]]
    """Names and shapes, in the order of the buffer: A and B in turn."""
    rank: int
    scaling: float


class WorkerExtension:
    """Mixed into vLLM's Worker, so its names must differ from the Worker's."""

    model_runner: Any

    def tinsmith_set_up(self) -> None:
        """Prepares the worker. Called once, before the first request."""
        runner = self.model_runner
        if get_tp_group().world_size > 1:  # else it is in the engine's process, which the scheduler has seen to
            die_with_parent()
            if runner.device.type == "cpu":
                patches.remove_shared_memory_names()
        self.tinsmith_versions: dict[int, Registered] = {}
        self.tinsmith_scoring = PromptScoring(runner)
        self.tinsmith_weights = DeviceWeights(runner)
        patches.replace_sampler(runner, StreamSampler(runner))
        patches.replace_prompt_logprobs(runner, self.tinsmith_scoring)
        patches.exchange_weights_before_steps(runner, self.tinsmith_weights.use)
        self.tinsmith_pictures = PictureInputs(runner.model_config.model)
        patches.fill_pictures(runner, self.tinsmith_pictures.fill)
        if runner.device.type == "cpu" and runner.dtype != torch.bfloat16:
            patches.replace_cpu_delta_rule(compute_delta_rule)
        if runner.lora_config:
            patches.replace_adapter_loading(runner, self._tinsmith_load)
            if runner.device.type == "cpu":
                patches.replace_cpu_kernels(runner)

    def tinsmith_without_place(self, names: Sequence[str]) -> list[str]:
        """The names among these PEFT names of layers that take no adapter in this model."""
        manager = self.model_runner.lora_manager._adapter_manager
        places = set(manager.modules).union(*manager.packed_modules.values())
        return [name for name in names if parse_fine_tuned_lora_name(name, self._tinsmith_mapper())[0] not in places]

    def tinsmith_register(
        self, number: int, handle: tuple[int, int, int], specs: Sequence[Any], rank: int, scaling: float
    ) -> None:
        """Registers a version, which requests may name from now on."""
        self.tinsmith_versions[number] = Registered(Handle(*handle), specs, rank, scaling)

    def tinsmith_forget(self, number: int) -> None:
        """Forgets a version, which no request names any more."""
        self.tinsmith_versions.pop(number, None)
        self.model_runner.lora_manager.remove_adapter(number)

    def tinsmith_register_full(self, number: int, handle: tuple[int, int, int, str], specs: Sequence[Any]) -> str:
        """Registers a full version, which requests may name from now on. Returns the reason for which vLLM cannot load
        such versions of this model; empty if it can."""
        return self.tinsmith_weights.register(number, FullSource(Handle(*handle), specs))

    def tinsmith_forget_full(self, number: int) -> None:
        self.tinsmith_weights.forget(number)

    def tinsmith_take_picture(self, number: int, shape: Sequence[int], pixels: bytes) -> None:
        """Registers a picture, which requests may have from now on."""
        self.tinsmith_pictures.take(number, shape, pixels)

    def tinsmith_forget_picture(self, number: int) -> None:
        self.tinsmith_pictures.forget(number)

    def tinsmith_take_scores(self, name: str) -> list[bytes] | None:
        return self.tinsmith_scoring.take(name)

    def _tinsmith_load(self, request: Any) -> LoRAModel:
        """Loads a version that is not on the device; vLLM's manager calls it."""
        version = self.tinsmith_versions[request.lora_int_id]
        manager = self.model_runner.lora_manager
        flat = version.handle.open()
        tensors, start = {}, 0
        for n, (name, shape) in enumerate(version.specs):
            size = shape[0] * shape[1]
            view = flat[start : start + size].view(*shape)
            # The scaling goes into a copy of B here: vLLM would multiply the shared buffer by it, in place.
            tensors[name] = view * version.scaling if n % 2 else view
            start += size
        return LoRAModel.from_lora_tensors(
            request.lora_int_id,
            tensors,
            PEFTHelper(r=version.rank, lora_alpha=version.rank, target_modules=[]),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=self._tinsmith_mapper(),
        )

    def _tinsmith_mapper(self) -> Any:
        mapper = getattr(self.model_runner.lora_manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()
