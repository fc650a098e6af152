"""Converts messages of the sampler's RPCs to the engine's requests, and the engine's results to messages."""

from __future__ import annotations

import numpy as np

from sampler_service.core.request import (
    MAX_NAME_CHARACTERS,
    MAX_STOP_TOKENS,
    AltTokens,
    Delta,
    Floats,
    Grammar,
    Ints,
    Params,
    Penalties,
    QueueStatus,
    Request,
    Result,
    SampledSequence,
    StopCondition,
    Targets,
    TopkTable,
)
from sampler_service.tokenizer import Chat
from tinsmith.errors import InvalidRequest
from tinsmith.model_input import model_input
from tinsmith.pictures.processing import Processor
from tinsmith.rpc.tensors import from_numpy, sparse_cells, to_numpy
from tinsmith.rpc.times import duration
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import types_pb2 as types

_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")


def request_from_proto(
    message: pb.SampleRequest,
    *,
    processor: Processor | None = None,
    why_no_pictures: str = "it sees text only",
    max_tokens: int = 0,
    on_probation: bool = False,
    owner: str | None = None,
) -> Request:
    """The engine's request for a message. Raises InvalidRequest for a malformed message. `owner`: owner of the caller's
    key; None if the caller sends requests of others, whose owner is in cache_salt. `processor`: the processor of the
    base model's pictures; None, with the reason, if the engine takes no pictures. `max_tokens`: most tokens of a prompt
    with pictures."""
    for name in ("version_id", "follow_run", "cache_salt"):
        _check_number(len(getattr(message, name)), MAX_NAME_CHARACTERS, what="characters", field=name)
    prompt, pictures = model_input(
        message.prompt, processor=processor, why_no_pictures=why_no_pictures, max_tokens=max_tokens, field="prompt"
    )
    last_n = message.prompt_logprobs_last_n if message.HasField("prompt_logprobs_last_n") else None
    has_targets = message.HasField("target_prompt_logprobs")
    return Request(
        prompt=prompt,
        version_id=message.version_id,
        num_samples=message.num_samples,
        params=_params(message.sampling_params),
        prompt_logprobs=message.prompt_logprobs,
        prompt_logprobs_last_n=last_n,
        topk_prompt_logprobs=message.topk_prompt_logprobs,
        topk_sample_logprobs=message.topk_sample_logprobs,
        targets=_targets(message.target_prompt_logprobs, length=len(prompt)) if has_targets else None,
        prompt_alt_tokens_k=message.prompt_alt_tokens_k,
        follow_run=message.follow_run,
        on_probation=on_probation,
        cache_salt=message.cache_salt if owner is None else f"{owner} {message.cache_salt}",
        owner=message.cache_salt if owner is None else owner,
        pictures=pictures,
        num_chunks=len(message.prompt),
        grammar=_grammar(message.grammar) if message.HasField("grammar") else None,
    )


def _check_number(number: int, limit: int, *, what: str, field: str) -> None:
    if number > limit:
        raise InvalidRequest(f"{field}: {number} {what} are above the limit of {limit}", field=field)


def _grammar(grammar: pb.Grammar) -> Grammar:
    form = grammar.WhichOneof("form")
    if form is None or not getattr(grammar, form):
        raise InvalidRequest("grammar: is empty; set json_schema or lark, or leave grammar out", field="grammar")
    return Grammar(form, getattr(grammar, form))


def _params(params: pb.SamplingParams) -> Params:
    # These limits are checked here and not in RequestLimits, because as Python integers the tokens of one message could
    # take gigabytes.
    num_stops, field = len(params.stop.token_ids), "sampling_params.stop.token_ids"
    _check_number(num_stops, MAX_STOP_TOKENS, what="tokens", field=field)
    stop = StopCondition(tuple(params.stop.strings), tuple(params.stop.token_ids)) if params.HasField("stop") else None
    return Params(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        seed=params.seed if params.HasField("seed") else None,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        penalties=Penalties(
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            repetition=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
            logit_bias=tuple(sorted(params.logit_bias.items())),
        ),
        stop=stop,
    )


def _targets(tensor: types.Tensor, *, length: int) -> Targets:
    """The stored cells of a dense or a sparse table, row by row. A sparse table does not become a dense one, which may
    be far larger than the request."""
    field = "target_prompt_logprobs"
    if tensor.WhichOneof("layout") == "sparse_csr":
        rows_M, _, tokens_M = sparse_cells(tensor, field=field)
        shape = tuple(tensor.shape)
    else:
        table = to_numpy(tensor, field=field)
        shape, tokens_M = table.shape, table.reshape(-1)
        # np.repeat would hold the interpreter's lock until it is done.
        rows = np.broadcast_to(np.arange(shape[0], dtype=np.int64)[:, None], shape) if table.ndim == 2 else table
        rows_M = rows.reshape(-1)
    if len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1 or tokens_M.dtype.kind != "i":
        raise InvalidRequest(
            f"{field}: needs integers of shape [{length - 1}, K], K at least 1, for this prompt of {length} tokens; "
            f"got {tokens_M.dtype.name} of shape {list(shape)}",
            field=field,
        )
    if not (tokens_M >= 0).any():
        raise InvalidRequest(f"{field}: names no token", field=field)
    return Targets(rows_M.astype(np.int64, copy=False), tokens_M.astype(np.int64, copy=False))


def response_to_proto(result: Result, request: pb.SampleRequest) -> pb.SampleResponse:
    prompt = result.prompt
    return pb.SampleResponse(
        sequences=[_sequence(sequence) for sequence in result.sequences],
        prompt_logprobs=None if prompt.logprobs is None else _floats(prompt.logprobs),
        topk_prompt_logprobs=None if prompt.topk is None else _table(prompt.topk),
        prompt_cache_hit_tokens=result.prompt_cache_hit_tokens,
        target_prompt_logprobs=None
        if prompt.targets_M is None
        else _scores(prompt.targets_M, request.target_prompt_logprobs),
        prompt_alt_tokens=None if prompt.alt_tokens is None else _alternatives(prompt.alt_tokens),
    )


def status_to_proto(status: QueueStatus) -> types.QueueStatus:
    return types.QueueStatus(
        running=status.running,
        position=status.position,
        tokens_ahead=status.tokens_ahead,
        expected_time=None if status.expected_seconds is None else duration(status.expected_seconds),
        reason=status.reason,
    )


def chat_from_proto(chat: pb.Chat) -> Chat:
    return Chat(
        messages=chat.messages,
        tools=chat.tools,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        template_kwargs=chat.template_kwargs,
    )


def tokens_to_proto(tokens: Ints) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(tokens=tokens.astype(_INT32).tobytes())


def delta_to_proto(delta: Delta) -> pb.SampleDelta:
    return pb.SampleDelta(
        index=delta.index,
        tokens=np.array(delta.tokens, _INT32).tobytes(),
        logprobs=np.array(delta.logprobs, _FLOAT32).tobytes(),
        topk_sampled_logprobs=None if delta.topk is None else _table(delta.topk),
    )


def _sequence(sequence: SampledSequence) -> types.SampledSequence:
    stopped = sequence.stop_reason == "stop"
    return types.SampledSequence(
        stop_reason=types.STOP_REASON_STOP if stopped else types.STOP_REASON_LENGTH,
        public_stop_reason=types.PUBLIC_STOP_REASON_STOP if stopped else types.PUBLIC_STOP_REASON_LENGTH,
        tokens=np.array(sequence.tokens, _INT32).tobytes(),
        logprobs=np.array(sequence.logprobs, _FLOAT32).tobytes(),
        topk_sampled_logprobs=None if sequence.topk is None else _table(sequence.topk),
        version_spans=[
            types.VersionSpan(version_id=span.version_id, num_tokens=span.num_tokens) for span in sequence.spans
        ],
    )


def _table(table: TopkTable) -> types.TopkLogprobs:
    length, k = table.token_ids.shape
    return types.TopkLogprobs(
        token_ids=table.token_ids.astype(_INT32).tobytes(), logprobs=_floats(table.logprobs), k=k, length=length
    )


def _scores(targets_M: Floats, asked: types.Tensor) -> types.Tensor:
    """The scores of the named cells, in the layout of the request's table."""
    answer = types.Tensor(dtype=types.DTYPE_FLOAT32, shape=asked.shape)
    if asked.WhichOneof("layout") == "sparse_csr":
        answer.sparse_csr.values = _floats(targets_M)
        answer.sparse_csr.crow_indices = asked.sparse_csr.crow_indices
        answer.sparse_csr.col_indices = asked.sparse_csr.col_indices
    else:
        answer.dense = _floats(targets_M)
    return answer


def _alternatives(alternatives: AltTokens) -> types.PromptAltTokens:
    return types.PromptAltTokens(tokens=from_numpy(alternatives.tokens), logprobs=from_numpy(alternatives.logprobs))


def _floats(values: Floats) -> bytes:
    return values.astype(_FLOAT32).tobytes()
