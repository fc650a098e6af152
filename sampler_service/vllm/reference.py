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
from sampler_service.core.sizing import Sizes, measured_cache, resolve_device, resolve_dtype, tokens_per_step
from sampler_service.eos import eos_token_ids
from sampler_service.vllm.division import Devices, check_division, kv_part, sizes_of_each
from sampler_service.vllm.full import Parameters
from sampler_service.vllm.pages import Pages
from sampler_service.vllm.picture_inputs import FORMS
from tinsmith.modeling.adapter import GROUPS, AdapterConfig, Group, Target
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.config import load_config
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.modeling.pretrained import UnsupportedModel
from tinsmith.modeling.self_check import only, random_adapter
from tinsmith.modeling.tower import PlacedPicture, positions_with_pictures

_LENGTH = 24
_RANK = 4
_KNOWN_STATES = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet")
"""Classes of recurrent layers whose states vLLM lays out as pages.py expects."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Logprobs that a prompt's tokens must have, with the random adapter of a configuration or without any."""

    prompt: Ints
    config: AdapterConfig | None
    logprobs: Floats
    """Logprobs of all tokens but the first."""
    placed: tuple[PlacedPicture, ...] = ()
    """Pictures in the prompt."""


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
    pages: Pages
    """Blocks of each worker's cache."""
    max_running: int
    """Most sequences that generate at once."""
    has_tower: bool
    """Whether the model is one that sees pictures, also where they are not to be taken."""
    why_no_pictures: str
    """Empty if it takes pictures."""
    picture_tokens: int
    """Tokens that no picture exceeds; 0 if it takes none."""
    base: Sample
    pictures: Sequence[Sample]
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
    dtype = resolve_dtype(config.dtype, device)
    base = BaseModel.load(config.base_model, device=place, dtype=dtype, pictures=config.pictures)
    if others := [name for name in base.recurrent if name not in _KNOWN_STATES]:
        raise UnsupportedModel(
            f"{base.architecture}: its layers {', '.join(others)} carry a state, which the memory of the vLLM engine "
            'is not sized for; set engine to "torch"'
        )
    pages = Pages.of(measured_cache(base), kv_part=kv_part(base.config, devices.count), num_devices=devices.count)
    length = min(_LENGTH, base.max_context_length - 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(base.vocab_size, (length,), generator=generator).numpy().astype(np.int32)
    rank = min(_RANK, config.max_lora_rank)
    picture_tokens = for_pictures = 0
    why_no_pictures = base.why_no_pictures
    if base.tower is not None and base.tower.processor.counting.rule not in FORMS:
        why_no_pictures = (
            f"the vLLM engine does not know how vLLM's tower takes pictures of {base.tower.processor.family.name}; the "
            'engine "torch" samples with them'
        )
    elif base.tower is not None:
        picture_tokens = min(base.tower.processor.counting.most_tokens, base.max_context_length)
        # vLLM encodes in a step, and keeps, as many tokens of pictures as a step has, or one picture.
        for_pictures = base.tower.bytes_for(max(picture_tokens, tokens_per_step(config, device.type)))
    if is_divided:
        sizes = sizes_of_each(base, config, devices, for_pictures=for_pictures, bytes_per_lane=pages.bytes_per_lane)
    else:
        sizes = Sizes.of(base, config, for_pictures=for_pictures, bytes_per_lane=pages.bytes_per_lane)
    return Reference(
        architecture=base.architecture,
        device=device.type,
        dtype=str(base.dtype).removeprefix("torch."),
        vocab_size=base.vocab_size,
        max_context_length=base.max_context_length,
        targets=[target for target in base.targets if target.group in GROUPS],  # vLLM's own tower is not adapted
        parameters=Parameters(
            {name: tuple(parameter.shape) for name, parameter in base.parameters.items()}, base.by_columns, base.dtype
        ),
        eos_token_ids=eos_token_ids(base.path, base.config),
        sizes=sizes,
        pages=pages,
        max_running=pages.most_running(sizes, config.max_running),
        has_tower=getattr(load_config(config.base_model), "vision_config", None) is not None,
        why_no_pictures=why_no_pictures,
        picture_tokens=picture_tokens,
        base=_sample(base, tokens, None),
        pictures=[] if why_no_pictures else _with_pictures(base, tokens),
        groups={
            group: _sample(base, tokens, only(group, rank=rank, seed=0)) for group in GROUPS if group in base.groups
        },
    )


def _with_pictures(base: BaseModel, tokens: Ints) -> list[Sample]:
    """Samples with two pictures between texts, and with one of them; none if they have no room in the context."""
    if base.tower is None:
        return []
    rng = np.random.default_rng(0)
    processor, samples = base.tower.processor, []
    made = [
        processor.of_pixels(rng.integers(256, size=(height, width, 3), dtype=np.uint8))
        for width, height in processor.counting.examples()
    ]
    text = np.where(tokens == processor.picture_token, (tokens + 1) % base.vocab_size, tokens)
    for pictures in (made, made[:1]):
        parts, placed, start = [], [], 0
        for picture in pictures:
            parts += [text[:5], picture.tokens]
            placed.append(PlacedPicture(start + 5, picture))
            start += 5 + picture.num_tokens
        prompt = np.concatenate([*parts, text[5:12]])
        if len(prompt) + 4 < base.max_context_length:
            samples.append(_sample(base, prompt, None, tuple(placed)))
    return samples


@torch.no_grad()
def _sample(
    base: BaseModel, tokens: Ints, config: AdapterConfig | None, placed: tuple[PlacedPicture, ...] = ()
) -> Sample:
    """`tokens`: int32, the whole prompt."""
    tokens_T = torch.from_numpy(tokens.astype(np.int64)).to(base.device)
    length = len(tokens) - 1
    runs = [] if config is None else [Run(random_adapter(config, base.targets, base.device), slice(0, length))]
    positions, picture_features = positions_of([length], base.device), None
    if placed and base.tower is not None:
        positions = positions_with_pictures([length], placed, base.device)
        picture_features = base.tower.features_of(placed, runs)
    hidden_T_H = base.hidden_states(tokens_T[:-1], positions, Packed([length]), runs, picture_features)
    rows = torch.arange(length, device=base.device)
    logprobs = target_logprobs(base.head, hidden_T_H, rows, tokens_T[1:], runs)
    return Sample(tokens, config, logprobs.float().cpu().numpy(), placed)
