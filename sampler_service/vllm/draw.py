"""Draws tokens in vLLM's workers as the torch engine draws them: the same random streams, the same logprobs.

vLLM offers logprobs either without the temperature or after top-k and top-p; here they are log_softmax(logits /
temperature) before anything is cut off, for each request by itself.

Shapes: R rows, V vocabulary, k columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]
from vllm.v1.outputs import LogprobsTensors, SamplerOutput  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.sampler import Sampler  # pyright: ignore[reportMissingImports]

from sampler_service.torch_engine.penalties import History, Penalized
from sampler_service.torch_engine.sampling import Rules, UInt64s, draw, scaled_logprobs, uniforms
from sampler_service.vllm.wire import Draws


@dataclass(frozen=True, slots=True)
class Rows:
    """How the rows of a batch draw; the same while the same requests stand in the same rows."""

    request_ids: Sequence[str]
    rules: Rules
    keys: UInt64s
    first: UInt64s
    """Tokens that were drawn before the request."""
    columns: int
    """Of the widest top-k table."""
    penalized: Penalized | None
    penalized_ids: Sequence[str]
    """Of its rows."""

    @classmethod
    def of(
        cls,
        request_ids: Sequence[str],
        draws: Sequence[Draws],
        histories: Mapping[str, History],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> Rows:
        changed = [(row, one) for row, one in enumerate(request_ids) if draws[row].penalties]
        return cls(
            request_ids=request_ids,
            rules=Rules.of([one.rule for one in draws], vocab_size=vocab_size, device=device),
            keys=np.array([one.key for one in draws], np.uint64),
            first=np.array([one.first for one in draws], np.uint64),
            columns=min(max(one.topk for one in draws), vocab_size),
            penalized=Penalized.of(
                [(row, draws[row].penalties, histories[one]) for row, one in changed], device=device
            ),
            penalized_ids=[one for _, one in changed],
        )


class StreamSampler(Sampler):
    """In the place of the model runner's sampler. Needs nothing of vLLM's sampling metadata."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = [runner]  # in a list: no submodule
        self._rows: Rows | None = None
        self._histories: dict[str, History] = {}
        """By request id, of those with penalties."""
        self._counted: dict[str, int] = {}
        """How many tokens of a request's own output are in its history."""
        self._newest_R: Tensor | None = None
        """What the rows drew last; whether vLLM has taken it is known at the next draw."""

    @torch.inference_mode()
    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> SamplerOutput:
        batch = self._runner[0].input_batch
        rows = self._rows_of(batch, logits)
        count = len(rows.request_ids)
        workers = get_tp_group()
        if not workers.is_first_rank:
            tokens_R_1 = torch.empty(count, 1, dtype=torch.int64, device=logits.device)
            return SamplerOutput(workers.broadcast(tokens_R_1).to(torch.int32), None)
        drawn = batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count]
        logprobs_R_V = scaled_logprobs(logits.float(), rows.rules.temperature_R_1)
        numbers_R = torch.from_numpy(uniforms(rows.keys, rows.first + drawn.astype(np.uint64))).to(logits.device)
        # Each worker has all logits. Were a sum rounded otherwise in one of them, it would draw another token, and go
        # on with other keys and values than the rest.
        drawn_from_R_V = logprobs_R_V
        if rows.penalized is not None:
            drawn_from_R_V = rows.penalized.logprobs(logits, logprobs_R_V, rows.rules.temperature_R_1)
        tokens_R_1 = workers.broadcast(draw(drawn_from_R_V, rows.rules, numbers_R)[:, None])
        self._newest_R = tokens_R_1[:, 0]
        ids, logprobs = tokens_R_1, logprobs_R_V.gather(-1, tokens_R_1)
        if rows.columns:
            best, best_ids = logprobs_R_V.topk(rows.columns)
            ids, logprobs = torch.cat([ids, best_ids], 1), torch.cat([logprobs, best], 1)
        ranks_R = torch.zeros(count, dtype=torch.int64, device=logits.device)  # nobody asks for them
        return SamplerOutput(tokens_R_1.to(torch.int32), LogprobsTensors(ids.to(torch.int32), logprobs, ranks_R))

    def _rows_of(self, batch: Any, logits: Tensor) -> Rows:
        request_ids = batch.req_ids[: logits.shape[0]]
        if self._rows is not None:
            self._count(self._rows)
        if self._rows is None or self._rows.request_ids != request_ids:
            requests, vocab_size, device = self._runner[0].requests, logits.shape[1], logits.device
            draws = [Draws.read(requests[one].sampling_params.extra_args) for one in request_ids]
            self._keep_histories(self._rows, dict(zip(request_ids, draws, strict=True)), vocab_size, device)
            self._rows = Rows.of(list(request_ids), draws, self._histories, vocab_size=vocab_size, device=device)
        return self._rows

    def _count(self, rows: Rows) -> None:
        """Puts the newest tokens into the histories, but for those that vLLM threw away: it lets a prompt that is
        computed in pieces draw after each piece. It knows how many tokens it took, and may not have them here yet."""
        if rows.penalized is None or self._newest_R is None:
            return
        requests = self._runner[0].requests
        numbers = [len(requests[one].output_token_ids) if one in requests else 0 for one in rows.penalized_ids]
        taken = [now > self._counted[one] for one, now in zip(rows.penalized_ids, numbers, strict=True)]
        rows.penalized.take(self._newest_R, counted_A=torch.tensor(taken, device=self._newest_R.device))
        for one, now in zip(rows.penalized_ids, numbers, strict=True):
            self._counted[one] = max(now, self._counted[one])
        self._newest_R = None

    def _keep_histories(
        self, before: Rows | None, draws: Mapping[str, Draws], vocab_size: int, device: torch.device
    ) -> None:
        """The histories of the requests that vLLM has, with those of a batch that is to come."""
        requests = self._runner[0].requests
        if before is not None and before.penalized is not None:
            for one, counts_V in zip(before.penalized_ids, before.penalized.counts_A_V, strict=True):
                self._histories[one] = History(self._histories[one].prompt_V, counts_V)
        for one in self._histories.keys() - requests.keys():
            del self._histories[one], self._counted[one]
        for one, how in draws.items():
            if how.penalties and one not in self._histories:
                prompt = requests[one].prompt_token_ids
                begin = len(prompt) - how.first  # what was drawn before a move to another version is output
                self._histories[one] = History.of(prompt[:begin], prompt[begin:], vocab_size=vocab_size, device=device)
                self._counted[one] = 0
