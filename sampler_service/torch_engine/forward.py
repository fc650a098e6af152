"""The forward passes of a step: the newest token of each running sequence and the pieces of prompts, laid end to end.

Shapes: B running sequences, T packed tokens, R rows that sample, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.step import Pass, Step, adapter_of, passes_of, runs_of
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import Parameters
from tinsmith.modeling.kv_cache import Cached, KVCache, Prefill
from tinsmith.modeling.logprobs import logits
from tinsmith.modeling.lora import Run


@dataclass(frozen=True, slots=True)
class Forward:
    base: BaseModel
    parameters: Parameters
    cache: KVCache
    """Of the lanes."""
    metrics: SamplerMetrics

    def logits(self, step: Step) -> Tensor:
        """float32 logits [R, V]: of each running sequence, then of the last token of each prompt that ends here.

        Prompts are scored on the way.
        """
        running, decoding = step.running, step.decoding
        passes = passes_of(running, step.pieces) if step.pieces or decoding is None else decoding.passes
        if len(passes) == 1:
            return self._run_pass(step, passes[0])
        logits_R_V = torch.empty(len(running) + len(step.ending), self.base.vocab_size, device=self.base.device)
        for one in passes:
            rows = one.lanes + [len(running) + n for n, piece in enumerate(step.ending) if piece in one.pieces]
            logits_R_V[torch.tensor(rows, dtype=torch.int64, device=self.base.device)] = self._run_pass(step, one)
        return logits_R_V

    def _run_pass(self, step: Step, one: Pass) -> Tensor:
        """float32 [r, V]: for its sequences, then for its prompts that end here."""
        self.parameters.use(one.parameters)
        hidden_T_H = self._hidden_states(step, one)
        self._score(one, hidden_T_H)
        return self._logits(step, one, hidden_T_H)

    def _hidden_states(self, step: Step, one: Pass) -> Tensor:
        """Hidden states [T, H]: the running sequences' newest tokens, then the pieces."""
        device = self.base.device
        decoding = step.decoding
        tokens, positions = [], []
        lanes_B = None
        if decoding is None or not one.lanes:
            positions_B = torch.empty(0, dtype=torch.int64, device=device)
        elif len(one.lanes) == len(step.running):
            positions_B = decoding.positions_B
            tokens.append(decoding.tokens_B)
            positions.append(positions_B)
        else:
            lanes_B = torch.tensor(one.lanes, device=device)
            positions_B = decoding.positions_B[lanes_B]
            tokens.append(decoding.tokens_B[lanes_B])
            positions.append(positions_B)
        for piece in one.pieces:
            stop = piece.start + piece.length
            tokens.append(torch.from_numpy(piece.job.owner.tokens_of(piece.job, piece.start, stop)).to(device))
            positions.append(torch.arange(piece.start, stop, device=device))
            self.metrics.steps.prefilled_tokens.inc(piece.length)
        runs = _kept_runs(step, one)
        if runs is None:
            running = step.running
            segments = [(adapter_of(running[lane]), 1) for lane in one.lanes]
            runs = runs_of([*segments, *((adapter_of(piece.job.sequences[0]), piece.length) for piece in one.pieces)])
        prefills = [Prefill(piece.job.lane, piece.start, piece.length) for piece in one.pieces]
        shared = None if decoding is None else decoding.shared
        layout = Cached(self.cache, positions_B, prefills, lanes_B=lanes_B, shared=shared)
        return self.base.hidden_states(_joined(tokens), _joined(positions), layout, runs)

    def _score(self, one: Pass, hidden_T_H: Tensor) -> None:
        first = len(one.lanes)
        for piece in one.pieces:
            rows = slice(first, first + piece.length)
            first = rows.stop
            task = piece.job.owner
            if task.scorer is not None and piece.job.scored:
                adapter = adapter_of(piece.job.sequences[0])
                try:
                    task.scorer.add(self.base.head, hidden_T_H[rows], start=piece.start, adapter=adapter)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    task.fail(error)

    def _logits(self, step: Step, one: Pass, hidden_T_H: Tensor) -> Tensor:
        running, runs = step.running, _kept_runs(step, one)
        if runs is not None:
            return logits(self.base.head, hidden_T_H, runs)
        wanted = list(range(len(one.lanes)))
        adapters = [adapter_of(running[lane]) for lane in one.lanes]
        last = len(one.lanes) - 1
        for piece in one.pieces:
            last += piece.length
            if piece.ends:
                wanted.append(last)
                adapters.append(adapter_of(piece.job.sequences[0]))
        rows = torch.tensor(wanted, dtype=torch.int64, device=self.base.device)
        return logits(self.base.head, hidden_T_H[rows], runs_of((adapter, 1) for adapter in adapters))


def _kept_runs(step: Step, one: Pass) -> list[Run] | None:
    """Runs of the steps that only decode, all sequences in one pass."""
    decoding = step.decoding
    if decoding is None or one.pieces or len(decoding.passes) > 1:
        return None
    return decoding.runs


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
