"""Draws tokens in vLLM's workers as the torch engine draws them: the same random streams, the same logprobs.

vLLM offers logprobs either without the temperature or after top-k and top-p; here they are log_softmax(logits /
temperature) before anything is cut off, for each request by itself.

Shapes: R rows, V vocabulary, k columns.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]
from vllm.v1.outputs import LogprobsTensors, SamplerOutput  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.sampler import Sampler  # pyright: ignore[reportMissingImports]

from sampler_service.core.penalties import History, Penalized
from sampler_service.core.request import Grammar
from sampler_service.core.sampling import Rules, UInt64s, draw, draw_masked, scaled_logprobs, uniforms
from sampler_service.grammars import Bools, Compiled, Compiler, Matcher, keep
from sampler_service.vllm.wire import Draws
from tinsmith.errors import ServiceError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrawRows:
    """How the rows of a batch draw. Used again as long as the same requests are in the same rows."""

    request_ids: Sequence[str]
    rules: Rules
    keys: UInt64s
    first: UInt64s
    """uint64 [R]: number of tokens that were drawn before each request."""
    columns: int
    """Number of columns of the widest top-k table."""
    penalized: Penalized | None
    penalized_ids: Sequence[str]
    """Request id of each row of `penalized`."""
    with_grammar: Mapping[int, Draws]
    """The draws of requests with a grammar, by row."""

    @classmethod
    def of(
        cls,
        request_ids: Sequence[str],
        draws: Sequence[Draws],
        histories: Mapping[str, History],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> DrawRows:
        changed = [(row, one) for row, one in enumerate(request_ids) if draws[row].penalties]
        return cls(
            request_ids=request_ids,
            rules=Rules.of([one.rule for one in draws], vocab_size=vocab_size, device=device),
            keys=np.array([one.key for one in draws], np.uint64),
            first=np.array([one.first for one in draws], np.uint64),
            columns=min(max(one.topk for one in draws), vocab_size),
            penalized=Penalized.of([(row, draws[row].penalties, histories[one]) for row, one in changed], device=device)
            if changed
            else None,
            penalized_ids=[one for _, one in changed],
            with_grammar={row: one for row, one in enumerate(draws) if one.grammar is not None},
        )


class RowGrammars:
    """Positions of requests in their grammars. Exists in the first worker only, which draws."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._compiler: Compiler | None = None
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._matchers: dict[str, Matcher] = {}
        self._newest: dict[str, int] = {}
        """By request id: the token that was drawn last. Whether vLLM has taken it is known at the next draw."""

    def draw(self, rows: DrawRows, logprobs_R_V: Tensor, numbers_R: Tensor) -> tuple[Tensor, list[int]]:
        """A token for each row, int64 [R], and the rows whose grammar has failed."""
        for one in self._newest.keys() - self._runner.requests.keys():
            del self._newest[one]
            self._matchers.pop(one, None)  # there is no matcher if the grammar could not be compiled
        masks: dict[int, Bools] = {}
        failed = []
        for row, how in rows.with_grammar.items():
            try:
                masks[row] = self._matcher(rows.request_ids[row], how, logprobs_R_V.shape[1]).allowed(
                    logprobs_R_V.shape[1]
                )
            except ServiceError as error:
                logger.error("request %s: %s", rows.request_ids[row], error.message)
                failed.append(row)
        if masks:
            allowed_M_V = torch.from_numpy(np.stack([*masks.values()])).to(logprobs_R_V.device)
            rows_M = torch.tensor(list(masks), device=logprobs_R_V.device)
            tokens_R = draw_masked(logprobs_R_V, rows.rules, numbers_R, rows_M, allowed_M_V)
        else:
            tokens_R = draw(logprobs_R_V, rows.rules, numbers_R)
        newest = tokens_R[list(rows.with_grammar)].tolist()
        self._newest.update(zip((rows.request_ids[row] for row in rows.with_grammar), newest, strict=True))
        return tokens_R, failed

    def _matcher(self, name: str, how: Draws, vocab_size: int) -> Matcher:
        """Position of a request after the tokens that vLLM has taken.

        vLLM lets a prompt that is computed in pieces draw after each piece, and throws those tokens away. It knows how
        many tokens it took before it has them here.
        """
        request = self._runner.requests[name]
        num_output = len(request.output_token_ids)
        matcher = self._matchers.get(name)
        if matcher is None:
            matcher = self._matchers[name] = self._compiled(how, vocab_size).matcher()
            prompt = request.prompt_token_ids
            # The prompt ends with the tokens that were drawn before a move to another version, or before a preemption.
            matcher.take([*prompt[len(prompt) - how.first :], *request.output_token_ids])
        elif how.first + num_output > matcher.num_taken:
            matcher.take([self._newest[name]])
        return matcher

    def _compiled(self, how: Draws, vocab_size: int) -> Compiled:
        assert how.grammar is not None
        compiled = self._kept.get(how.grammar)
        if compiled is None or compiled.broken:
            if self._compiler is None:
                path = self._runner.model_config.model
                self._compiler = Compiler(path, vocab_size=vocab_size, eos_token_ids=how.grammar_eos)
            compiled = self._compiler.compile(how.grammar)
        keep(self._kept, compiled)
        return compiled


class StreamSampler(Sampler):
    """Replaces the model runner's sampler. It needs none of vLLM's sampling metadata."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = [runner]  # in a list, so that torch does not make it a submodule
        self._rows: DrawRows | None = None
        self._histories: dict[str, History] = {}
        """By request id: the history of each request with penalties."""
        self._counted: dict[str, int] = {}
        """By request id: the number of tokens of its own output that are in its history."""
        self._grammars = RowGrammars(runner)
        self._newest_R: Tensor | None = None
        """Token that each row drew last. Whether vLLM has taken it is known at the next draw."""

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
        drawn_from_R_V = logprobs_R_V
        if rows.penalized is not None:
            drawn_from_R_V = rows.penalized.logprobs(logits, logprobs_R_V, rows.rules.temperature_R_1)
        failed: list[int] = []
        if rows.with_grammar:
            tokens_R, failed = self._grammars.draw(rows, drawn_from_R_V, numbers_R)
        else:
            tokens_R = draw(drawn_from_R_V, rows.rules, numbers_R)
        # Only the first worker draws, although each has all logits. If all drew, a sum that one worker rounds
        # differently could give it another token, and so other keys and values than the rest.
        tokens_R_1 = workers.broadcast(tokens_R[:, None])
        self._newest_R = tokens_R_1[:, 0]
        ids, logprobs = tokens_R_1, logprobs_R_V.gather(-1, tokens_R_1)
        logprobs[failed] = float("nan")  # NaN tells running.py that the grammar has failed
        if rows.columns:
            best, best_ids = logprobs_R_V.topk(rows.columns)
            ids, logprobs = torch.cat([ids, best_ids], 1), torch.cat([logprobs, best], 1)
        ranks_R = torch.zeros(count, dtype=torch.int64, device=logits.device)  # nobody asks for them
        return SamplerOutput(tokens_R_1.to(torch.int32), LogprobsTensors(ids.to(torch.int32), logprobs, ranks_R))

    def _rows_of(self, batch: Any, logits: Tensor) -> DrawRows:
        request_ids = batch.req_ids[: logits.shape[0]]
        if self._rows is not None:
            self._count(self._rows)
        if self._rows is None or self._rows.request_ids != request_ids:
            requests, vocab_size, device = self._runner[0].requests, logits.shape[1], logits.device
            draws = [Draws.read(requests[one].sampling_params.extra_args) for one in request_ids]
            self._keep_histories(self._rows, dict(zip(request_ids, draws, strict=True)), vocab_size, device)
            self._rows = DrawRows.of(list(request_ids), draws, self._histories, vocab_size=vocab_size, device=device)
        return self._rows

    def _count(self, rows: DrawRows) -> None:
        """Puts the newest tokens into the histories, but for those that vLLM threw away.

        vLLM lets a prompt that is computed in pieces draw after each piece. It knows how many tokens it took, and may
        not have them here yet.
        """
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
        self, before: DrawRows | None, draws: Mapping[str, Draws], vocab_size: int, device: torch.device
    ) -> None:
        """Drops the histories of requests that vLLM no longer has, and makes those of the next batch. `before`: the
        last batch. `draws`: of the next one, by request id."""
        requests = self._runner[0].requests
        if before is not None and before.penalized is not None:
            for one, counts_V in zip(before.penalized_ids, before.penalized.counts_A_V, strict=True):
                self._histories[one] = History(self._histories[one].prompt_V, counts_V)
        for one in self._histories.keys() - requests.keys():
            del self._histories[one], self._counted[one]
        for one, how in draws.items():
            if how.penalties and one not in self._histories:
                prompt = requests[one].prompt_token_ids
                begin = len(prompt) - how.first  # tokens drawn before a move to another version are output
                self._histories[one] = History.of(prompt[:begin], prompt[begin:], vocab_size=vocab_size, device=device)
                self._counted[one] = 0
