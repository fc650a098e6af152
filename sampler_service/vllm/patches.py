"""All changes to vLLM's own objects, one function each. The table in docs/vllm.md names every function and its reason.

They lean on internals of vLLM 0.32. `worker.py` applies them in each worker before the first request, but for
`pack_tied_output`, which follows each exchange of the base weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper import punica_cpu  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # pyright: ignore[reportMissingImports]
from vllm.multimodal import MULTIMODAL_REGISTRY  # pyright: ignore[reportMissingImports]

from sampler_service.vllm.kernels import SlotKernels


def replace_sampler(runner: Any, sampler: torch.nn.Module) -> None:
    """Draws tokens by `sampler`."""
    runner.sampler = sampler


def replace_prompt_logprobs(runner: Any, score: Callable[[Tensor, dict[str, int]], dict[str, Any]]) -> None:
    """Calls `score` after each forward pass, where vLLM computes its own prompt logprobs."""
    runner._get_prompt_logprobs_dict = score


def replace_adapter_loading(runner: Any, load: Callable[[Any], Any]) -> None:
    """Loads an adapter by `load(LoRARequest)` when it is not on the device, where vLLM would read a folder of files."""
    runner.lora_manager._load_adapter = load


def exchange_weights_before_steps(runner: Any, use: Callable[[int], None]) -> None:
    """Calls `use` before each step that computes, with the number of the base weights that the scheduler wrote into
    the step."""
    execute = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            use(scheduler_output.tinsmith_base_weights)
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model


def replace_picture_processor(make: Callable[[Any], Any]) -> None:
    """Uses `make(ModelConfig)` instead of vLLM's processor of pictures. Must be applied in each of vLLM's processes,
    and in the process that starts them."""
    MULTIMODAL_REGISTRY.create_processor = lambda model_config, **_: make(model_config)
    MULTIMODAL_REGISTRY.get_processing_info = make


def fill_pictures(runner: Any, fill: Callable[[Any], Any]) -> None:
    """Replaces the item of each picture that the tower is about to encode by `fill(item)`, which has the pixels."""
    batch = runner._batch_mm_inputs_from_scheduler

    def filled(scheduler_output: Any) -> tuple[list[str], list[tuple[str, Any]], list[Any]]:
        names, items, places = batch(scheduler_output)
        return names, [(modality, fill(item)) for modality, item in items], places

    runner._batch_mm_inputs_from_scheduler = filled


def replace_cpu_kernels(runner: Any) -> None:
    """Replaces the LoRA kernels of the CPU, and tells the new ones the rank of each adapter that comes into a slot."""
    manager = runner.lora_manager._adapter_manager
    kernels = SlotKernels()
    kernels.install(punica_cpu)
    activate = manager.activate_adapter

    def activate_adapter(number: int) -> bool:
        activated = activate(number)
        slot = manager.lora_index_to_id.index(number)
        kernels.ranks[slot] = manager.get_adapter(number).rank
        return activated

    manager.activate_adapter = activate_adapter


def replace_cpu_delta_rule(compute: Callable[..., None]) -> None:
    """Calls `compute` for the convolution and the recurrence of a Gated DeltaNet layer, where vLLM would call its
    kernel of the CPU, which takes bfloat16 alone. Does nothing for a model without such layers."""
    name = "cpu_gdn_attention_core"
    if hasattr(torch.ops.vllm, name):
        setattr(torch.ops.vllm, name, compute)


def pack_tied_output(model: Any) -> None:
    """Packs the weight of a tied output layer anew. On a CPU that layer computes with a packed copy of the embedding's
    weight, which vLLM's loading leaves as it was."""
    modules = list(model.modules())
    heads = [module for module in modules if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear")]
    for head in heads:
        if any(other is not head and getattr(other, "weight", None) is head.weight for other in modules):
            head.quant_method.process_weights_after_loading(head)


def remove_shared_memory_names() -> None:
    """Removes the names of the memory by which workers on a CPU exchange tensors. All workers have opened that memory
    by now, and vLLM would leave the names behind."""
    folder = Path("/dev/shm")  # noqa: S108 - where vLLM makes it
    for path in folder.glob(f"{os.environ['VLLM_DIST_IDENT']}-*-cpushm_*"):
        path.unlink(missing_ok=True)  # each worker does this
