"""Makes vLLM's objects for a sequence and its version."""

from __future__ import annotations

from collections import abc
from typing import Any

from sampler_service.core.sequence import Sequence
from sampler_service.core.versions import Version
from sampler_service.vllm.pictures import picture_prompt
from sampler_service.vllm.versions import SharedAdapter, SharedFull
from sampler_service.vllm.wire import Draws, Scores, extra_args
from tinsmith.pictures.processing import Processor


def prompt(
    sequence: Sequence, version: Version | None, processor: Processor | None, pictures: abc.Sequence[int]
) -> Any:
    """The prompt for vLLM: the sequence's prompt and the tokens drawn so far. Its salt keeps keys and values of
    different base weights apart. `pictures`: numbers by which the workers know the pictures."""
    from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]

    request, number = sequence.group.request, _base_weights(version)
    salt = f"{number}:{request.cache_salt}" if number or request.cache_salt else None
    tokens = [*request.prompt.tolist(), *sequence.tokens]
    if processor is None or not request.pictures:
        return tokens_input(tokens, cache_salt=salt)
    return picture_prompt(tokens, request.pictures, pictures, processor=processor, base_weights=number, cache_salt=salt)


def sampling_params(sequence: Sequence, version: Version | None, scores: Scores | None, *, topk: int) -> Any:
    """`topk`: number of columns of the sampled tokens' table."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

    group = sequence.group
    params = group.request.params
    draws = Draws(
        key=int(group.keys[sequence.index]),
        first=len(sequence.tokens),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        topk=topk,
        min_p=params.min_p,
        penalties=params.penalties,
        grammar=group.request.grammar,
        grammar_eos=[] if group.grammar is None else sorted(group.grammar.eos_token_ids),
    )
    # vLLM delivers every token at once if somebody waits for it, or if it may be the last.
    interval = 1 if group.generation.stream or group.request.follow_run else 4 if group.stop.strings else 16
    return SamplingParams(
        max_tokens=sequence.max_length - sequence.length,
        stop_token_ids=sorted(group.stop.token_ids),
        ignore_eos=True,  # stop_token_ids has them
        logprobs=topk,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=interval,
        skip_reading_prefix_cache=True if scores is not None else None,
        extra_args=extra_args(draws, scores, base_weights=_base_weights(version)),
        skip_clone=True,
    )


def lora_request(version: Version | None) -> Any:
    """vLLM's request for the version's adapter; None if the version has none."""
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    if version is None or not isinstance(version.weights, SharedAdapter):
        return None
    number = version.weights.number
    return LoRARequest(f"{version.version_id}#{number}", number, f"memory:{number}")


def _base_weights(version: Version | None) -> int:
    return version.weights.number if version is not None and isinstance(version.weights, SharedFull) else 0
