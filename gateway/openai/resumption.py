"""A stream of a sampler that goes on at another one when the first is lost.

The request is sent again with the same seed, and what the client has seen already is skipped, after it was found equal:
tokens of two tries never mix. Samplers draw the same tokens for a seed up to rounding; where that made a difference, or
the weights are newer ones, the stream fails.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

from tinsmith.rpc.errors import NotReady, ServiceError
from tinsmith.v1 import sampler_pb2 as pb

_TOKEN_BYTES = 4
_MAX_TRIES = 5

Try = Callable[[NotReady], Awaitable[AsyncIterator[pb.StreamSampleResponse]]]
"""Begins a stream after another was lost, which is told; the iterator raises NotReady when the sampler is lost."""


def with_seed(request: pb.SampleRequest) -> pb.SampleRequest:
    """The request itself, with a seed of ours where it has none."""
    if not request.sampling_params.HasField("seed"):
        request.sampling_params.seed = secrets.randbits(63)
    return request


async def resumed(
    first: AsyncIterator[pb.StreamSampleResponse], again: Try, *, num_samples: int
) -> AsyncIterator[pb.StreamSampleResponse]:
    """The pieces of `first`; when that is lost, those of `again` which are new. Raises ServiceError when they do not
    go on from what was there."""
    seen = [bytearray() for _ in range(num_samples)]
    pieces = first
    for num_left in reversed(range(_MAX_TRIES)):
        passed = [0] * num_samples
        """Bytes of each sequence in this try."""
        try:
            async for piece in pieces:
                if piece.HasField("result"):
                    for sequence, tokens in zip(piece.result.sequences, seen, strict=True):
                        _check(bytes(tokens), sequence.tokens[: len(tokens)])
                    yield piece
                    return
                delta = piece.delta
                tokens, begin = seen[delta.index], passed[delta.index]
                known = tokens[begin : begin + len(delta.tokens)]
                _check(bytes(known), delta.tokens[: len(known)])
                passed[delta.index] += len(delta.tokens)
                tokens += delta.tokens[len(known) :]
                if len(known) < len(delta.tokens):
                    yield pb.StreamSampleResponse(delta=_after(delta, len(known) // _TOKEN_BYTES)) if known else piece
            return
        except NotReady as lost:
            if not num_left:
                raise
            pieces = await again(lost)


def _check(before: bytes, now: bytes) -> None:
    if before != now:
        raise ServiceError(
            "the sampler went away in the middle, and what another one drew differs from what was sent; ask again"
        )


def _after(delta: pb.SampleDelta, count: int) -> pb.SampleDelta:
    """Without its first `count` tokens."""
    rest = pb.SampleDelta(
        index=delta.index, tokens=delta.tokens[_TOKEN_BYTES * count :], logprobs=delta.logprobs[_TOKEN_BYTES * count :]
    )
    if delta.HasField("topk_sampled_logprobs"):
        table = delta.topk_sampled_logprobs
        begin = _TOKEN_BYTES * count * table.k
        rest.topk_sampled_logprobs.CopyFrom(table)
        rest.topk_sampled_logprobs.length = table.length - count
        rest.topk_sampled_logprobs.token_ids = table.token_ids[begin:]
        rest.topk_sampled_logprobs.logprobs = table.logprobs[begin:]
    return rest
