"""Measures the base model with our own torch model before vLLM loads it: layers, sizes, and logprobs to check against.

It runs in a process of its own, which ends before vLLM starts, so that both never lie in memory together.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from sampler_service.config import SamplerConfig
from sampler_service.core.request import Floats, Ints
from sampler_service.core.sizing import Sizes, resolve_device, resolve_dtype
from sampler_service.eos import eos_token_ids
from sampler_service.vllm.division import Devices, check_division, sizes_of_each
from sampler_service.vllm.full import Parameters
from tinsmith.modeling.adapter import GROUPS, AdapterConfig, Group, Target
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.config import load_config
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.modeling.pretrained import UnsupportedModel
from tinsmith.modeling.self_check import only, random_adapter

_LENGTH = 24
_RANK = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """Logprobs that a prompt's tokens must have, with the random adapter of a configuration or without any."""

    prompt: Ints
    config: AdapterConfig | None
    logprobs: Floats
    """Logprobs of all tokens but the first."""


@dataclass(frozen=True, slots=True)
class Reference:
    architecture: str
    device: str
    """ "cpu" or "cuda"."""
    dtype: str
    vocab_size: int
    max_context_length: int
    targets: Sequence[Target]
    parameters: Parameters
    eos_token_ids: frozenset[int]
    sizes: Sizes
    """Sizes for each worker."""
    base: Sample
    groups: Mapping[Group, Sample]


def take_reference(config: SamplerConfig) -> Reference:
    """Blocks. Raises as BaseModel.load does."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    # A daemon: it does not hold up the end of a sampler that is stopped while it loads.
    process = spawn.Process(target=_report, args=(config.model_dump(), sender), daemon=True)
    process.start()
    sender.close()
    try:
        outcome: Reference | Exception = receiver.recv()
    except EOFError:
        process.join()
        raise UnsupportedModel(
            f"the process that loads {config.base_model} to measure it died, status {process.exitcode}; it has "
            "probably found no memory"
        ) from None
    process.join()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _report(settings: dict[str, object], sender: Connection) -> None:
    try:
        outcome = _measure(SamplerConfig.model_validate(settings))
    except Exception as error:
        outcome = error
    sender.send(outcome)


def _measure(config: SamplerConfig) -> Reference:
    device = torch.device(resolve_device(config.device))
    is_divided = config.tensor_parallel > 1
    if is_divided:
        check_division(load_config(config.base_model), config.tensor_parallel)
    devices = Devices.of(device.type, config.tensor_parallel)
    # One of several GPUs may have no room for the whole model.
    place = torch.device("cpu") if is_divided else device
    if place.type == "cpu" and config.num_threads:
        torch.set_num_threads(config.num_threads)
    base = BaseModel.load(config.base_model, device=place, dtype=resolve_dtype(config.dtype, device))
    if base.recurrent:
        raise UnsupportedModel(
            f"{base.architecture}: its layers {', '.join(base.recurrent)} carry a state, which the memory of the vLLM "
            'engine is not sized for; set engine to "torch"'
        )
    length = min(_LENGTH, base.max_context_length - 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(base.vocab_size, (length,), generator=generator).numpy().astype(np.int32)
    rank = min(_RANK, config.max_lora_rank)
    return Reference(
        architecture=base.architecture,
        device=device.type,
        dtype=str(base.dtype).removeprefix("torch."),
        vocab_size=base.vocab_size,
        max_context_length=base.max_context_length,
        targets=[target for target in base.targets if target.group in GROUPS],  # this engine takes no pictures
        parameters=Parameters(
            {name: tuple(parameter.shape) for name, parameter in base.parameters.items()}, base.by_columns, base.dtype
        ),
        eos_token_ids=eos_token_ids(base.path, base.config),
        sizes=sizes_of_each(base, config, devices) if is_divided else Sizes.of(base, config),
        base=_sample(base, tokens, None),
        groups={
            group: _sample(base, tokens, only(group, rank=rank, seed=0)) for group in GROUPS if group in base.groups
        },
    )


@torch.no_grad()
def _sample(base: BaseModel, tokens: Ints, config: AdapterConfig | None) -> Sample:
    """`tokens`: int32, the whole prompt."""
    tokens_T = torch.from_numpy(tokens.astype(np.int64)).to(base.device)
    length = len(tokens) - 1
    runs = [] if config is None else [Run(random_adapter(config, base.targets, base.device), slice(0, length))]
    hidden_T_H = base.hidden_states(tokens_T[:-1], positions_of([length], base.device), Packed([length]), runs)
    rows = torch.arange(length, device=base.device)
    logprobs = target_logprobs(base.head, hidden_T_H, rows, tokens_T[1:], runs)
    return Sample(tokens, config, logprobs.float().cpu().numpy())
