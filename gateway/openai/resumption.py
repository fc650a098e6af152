"""Streams that continue at another sampler when the first one is lost.

The request is sent again with the same seed. Tokens that the client has already are compared, and skipped when they are
equal, so tokens of two tries never mix. Samplers draw the same tokens for a seed, up to rounding. When rounding, or
newer weights, make a difference, the stream fails.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

from tinsmith.errors import NotReady, ServiceError
from tinsmith.v1 import sampler_pb2 as pb

_TOKEN_BYTES = 4
"""Bytes of a token, or of a logprob, in a delta."""
_MAX_TRIES = 5
"""Most streams that are begun for one request."""

Try = Callable[[NotReady], Awaitable[AsyncIterator[pb.StreamSampleResponse]]]
"""A function that begins a new stream. Its argument is the error of the lost stream. The iterator raises NotReady when
the new stream is lost, too."""


def with_seed(request: pb.SampleRequest) -> pb.SampleRequest:
    """Gives the request a random seed if it has none. Returns the request."""
    if not request.sampling_params.HasField("seed"):
        request.sampling_params.seed = secrets.randbits(63)
    return request


async def resumed(
    first: AsyncIterator[pb.StreamSampleResponse], again: Try, *, num_samples: int
) -> AsyncIterator[pb.StreamSampleResponse]:
    """The pieces of `first`, and when that stream is lost, the new pieces of `again`.

    Raises ServiceError when the new stream differs from the tokens that the client has already, and NotReady after
    _MAX_TRIES.
    """
    seen = [bytearray() for _ in range(num_samples)]
    pieces = first
    for num_left in reversed(range(_MAX_TRIES)):
        passed = [0] * num_samples
        """Bytes of each sequence that this try has delivered."""
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
            "the sampler went away in the middle, and another sampler's tokens differ from those sent; ask again"
        )


def _after(delta: pb.SampleDelta, count: int) -> pb.SampleDelta:
    """The delta without its first `count` tokens."""
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
