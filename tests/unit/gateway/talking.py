"""A sampler that says what it is told to, for the OpenAI endpoints."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.unit.gateway.stack import FakeSampler
from tinsmith.errors import InvalidRequest, ServiceError, VersionNotLoaded
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import types_pb2

END = "<|end|>"
START = "<|start|>"


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE with few merges, so that most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=264, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the snow and the sand"], trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(START, special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


PICTURE = "<tool call>"
"""The text that the chat template renders for a picture."""


def _content(message: Any) -> str:
    parts = message["content"]
    return parts if isinstance(parts, str) else "".join(part.get("text", PICTURE) for part in parts)


def _ints(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _floats(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def logprob(n: int) -> float:
    """Logprob of the n-th token."""
    return -0.25 * (n + 1)


class TalkingSampler(FakeSampler):
    """Every sample is `says`, then the end token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = make_tokenizer()
        self.end = self.tokenizer.encode(END).ids[0]
        self.says = "the snow ❄ and the sand"
        self.error: ServiceError | None = None
        """Error of every Sample and StreamSample."""
        self.error_after: int | None = None
        """A stream fails with it after so many tokens."""
        self.stopped = asyncio.Event()
        """A caller has left."""
        self.pauses = False
        """Streams wait after the third token."""
        self.num_tokenizers = 0
        self.tool_call_format = pb.TOOL_CALL_FORMAT_UNSPECIFIED

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        self.num_tokenizers += 1
        return pb.GetTokenizerResponse(
            tokenizer_json=self.tokenizer.to_str(),
            has_chat_template=True,
            eos_token_ids=[self.end],
            tool_call_format=self.tool_call_format,
        )

    async def Tokenize(self, request: Any, context: Any) -> Any:
        if request.WhichOneof("input") == "text":
            text = (START if request.add_special_tokens else "") + request.text
        else:
            self.chat = request.chat
            messages = json.loads(request.chat.messages)
            if any(message["role"] == "martian" for message in messages):
                raise InvalidRequest("messages: the chat template does not know the role 'martian'", field="messages")
            text = "".join(f"{START}{message['role']}:{_content(message)}{END}" for message in messages)
        return pb.TokenizeResponse(tokens=_ints(self.tokenizer.encode(text).ids))

    def _drawn(self, request: pb.SampleRequest) -> tuple[list[int], bool]:
        """Tokens, and whether they end by a stop."""
        params = request.sampling_params
        stops = params.stop.token_ids if params.HasField("stop") else [self.end]
        tokens: list[int] = []
        for token in [*self.tokenizer.encode(self.says).ids, self.end]:
            tokens.append(token)
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
            if token in stops or any(string in text for string in params.stop.strings):
                return tokens, True
            if params.HasField("max_tokens") and len(tokens) >= params.max_tokens:
                break
        return tokens, False

    def _table(self, tokens: list[int], k: int, *, first: int = 0) -> types_pb2.TopkLogprobs | None:
        """The token itself, then the end token, then empty cells. `first`: number of the first token."""
        if not k:
            return None
        rows = [
            [(token, logprob(n)), (self.end, logprob(n) - 1), *[(0, -99999.0)] * k][:k]
            for n, token in enumerate(tokens, first)
        ]
        return types_pb2.TopkLogprobs(
            token_ids=_ints([token for row in rows for token, _ in row]),
            logprobs=_floats([value for row in rows for _, value in row]),
            k=k,
            length=len(rows),
        )

    def _response(self, request: pb.SampleRequest) -> pb.SampleResponse:
        tokens, stopped = self._drawn(request)
        prompt = [token for (token,) in struct.iter_unpack("<i", request.prompt[0].encoded_text.tokens)]
        sequence = types_pb2.SampledSequence(
            stop_reason=types_pb2.STOP_REASON_STOP if stopped else types_pb2.STOP_REASON_LENGTH,
            public_stop_reason=types_pb2.PUBLIC_STOP_REASON_STOP if stopped else types_pb2.PUBLIC_STOP_REASON_LENGTH,
            tokens=_ints(tokens),
            logprobs=_floats([logprob(n) for n in range(len(tokens))]),
            topk_sampled_logprobs=self._table(tokens, request.topk_sample_logprobs),
            version_spans=[
                types_pb2.VersionSpan(version_id="before", num_tokens=len(tokens) - 1),
                types_pb2.VersionSpan(version_id=request.version_id, num_tokens=1),
            ]
            if request.follow_run
            else None,
        )
        scores = _floats([math.nan, *[-1.0] * (len(prompt) - 1)]) if request.prompt_logprobs else None
        return pb.SampleResponse(
            sequences=[sequence] * request.num_samples,
            prompt_logprobs=scores,
            topk_prompt_logprobs=self._table(prompt, request.topk_prompt_logprobs),
            prompt_cache_hit_tokens=min(2, len(prompt)),
        )

    def _check(self, request: pb.SampleRequest) -> None:
        self.requests.append(request)
        if self.error is not None and self.error_after is None:
            raise self.error
        if not request.prompt or not request.prompt[0].encoded_text.tokens:
            raise InvalidRequest("prompt: is empty; at least one token is needed", field="prompt")
        if request.version_id not in self.versions:
            raise VersionNotLoaded(f"version {request.version_id} is not resident")

    async def Sample(self, request: Any, context: Any) -> Any:
        self._check(request)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.stopped.set()
            raise
        return self._response(request)

    async def StreamSample(self, request: Any, context: Any) -> Any:
        request = request.request
        self._check(request)
        try:
            for n, token in enumerate(self._drawn(request)[0]):
                if n == self.error_after and self.error is not None:
                    raise self.error
                if self.pauses and n == 3:
                    await self.go.wait()
                for index in range(request.num_samples):
                    delta = pb.SampleDelta(
                        index=index,
                        tokens=_ints([token]),
                        logprobs=_floats([logprob(n)]),
                        topk_sampled_logprobs=self._table([token], request.topk_sample_logprobs, first=n),
                    )
                    yield pb.StreamSampleResponse(delta=delta)
        except (asyncio.CancelledError, GeneratorExit):
            self.stopped.set()
            raise
        yield pb.StreamSampleResponse(result=self._response(request))
