"""The forward passes of a step: the newest token of each running sequence and the pieces of prompts, laid end to end.

Shapes: B running sequences, T packed tokens, R rows that sample, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.step import Pass, Step, adapter_of, passes_of, runs_of
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import Parameters
from tinsmith.modeling.kv_cache import Cached, CachedTogether, KVCache, Prefill
from tinsmith.modeling.logprobs import logits
from tinsmith.modeling.lora import Run


@dataclass(frozen=True, slots=True)
class Forward:
    base: BaseModel
    parameters: Parameters
    caches: Mapping[int, KVCache]
    """Of the lanes, by the size of sequences."""
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
            rows = one.rows + [len(running) + n for n, piece in enumerate(step.ending) if piece in one.pieces]
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
        if decoding is not None and one.rows:
            every_row = len(one.rows) == len(step.running)
            rows = slice(None) if every_row else torch.tensor(one.rows, device=device)
            tokens.append(decoding.tokens_B[rows])
            positions.append(decoding.positions_B[rows])
        for piece in one.pieces:
            stop = piece.start + piece.length
            tokens.append(
                torch.from_numpy(piece.job.owner.tokens_of(piece.job.sequences[0], piece.start, stop)).to(device)
            )
            positions.append(torch.arange(piece.start, stop, device=device))
            self.metrics.steps.prefilled_tokens.inc(piece.length)
        runs = _kept_runs(step, one)
        if runs is None:
            running = step.running
            segments = [(adapter_of(running[row]), 1) for row in one.rows]
            runs = runs_of([*segments, *((adapter_of(piece.job.sequences[0]), piece.length) for piece in one.pieces)])
        layouts = list(self._layouts(step, one))
        layout = layouts[0] if len(layouts) == 1 else CachedTogether(layouts)
        return self.base.hidden_states(_joined(tokens), _joined(positions), layout, runs)

    def _layouts(self, step: Step, one: Pass) -> Iterator[Cached]:
        """Of each cache that the pass uses."""
        running, decoding = step.running, step.decoding
        of_running = Counter(sequence.size for sequence in running)
        rows_of: dict[int, list[int]] = {}
        for row in one.rows:
            rows_of.setdefault(running[row].size, []).append(row)
        for size in sorted({*rows_of, *(piece.job.size for piece in one.pieces)}):
            rows, lanes_B, shared = rows_of.get(size, []), None, None
            positions_B = torch.empty(0, dtype=torch.int64, device=self.base.device)
            if decoding is not None and rows:
                # Rows go by size, then by lane: all of one size follow each other.
                is_whole = len(rows) == of_running[size]
                positions_B = decoding.positions_B[slice(rows[0], rows[-1] + 1) if is_whole else rows]
                if is_whole:
                    shared = decoding.shared[size]
                else:
                    lanes_B = torch.tensor([running[row].lane for row in rows], device=self.base.device)
            prefills = [
                Prefill(piece.job.lane, piece.start, piece.length) for piece in one.pieces if piece.job.size == size
            ]
            yield Cached(self.caches[size], positions_B, prefills, lanes_B=lanes_B, shared=shared)

    def _score(self, one: Pass, hidden_T_H: Tensor) -> None:
        first = len(one.rows)
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
        wanted = list(range(len(one.rows)))
        adapters = [adapter_of(running[row]) for row in one.rows]
        last = len(one.rows) - 1
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
