"""Scores prompts in vLLM's workers, beside their prefill. In place of vLLM's own prompt logprobs, which know nothing of
named tokens and draws, and which in a mixed batch run the output layer with other requests' adapters.

Shapes: n rows of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]

from sampler_service.core.scoring import PromptScorer
from sampler_service.vllm.wire import Scores

_CHUNK_BYTES = 256 * 1024 * 1024
"""Most bytes of float32 logits that are made at once."""


class PromptScoring:
    """Does the work of the model runner's `_get_prompt_logprobs_dict`, which is called after each forward pass. The
    workers make the logits together, and the first one has the scores."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._has_scores: bool = get_tp_group().is_first_rank
        self._begun: dict[str, tuple[Scores, PromptScorer]] = {}
        """The scores in progress, by vLLM's request id."""
        self._done: dict[str, PromptScorer] = {}
        """Complete scores, by the name that their request gave them."""
        self._plain: set[str] = set()
        """Ids of running requests that ask for no scores."""

    def take(self, name: str) -> list[bytes] | None:
        """Hands the scores of a prompt over, once. None in workers other than the first, and if the scores are not
        complete. Incomplete scores are forgotten."""
        for request_id, (scores, _) in list(self._begun.items()):
            if scores.name == name:
                del self._begun[request_id]
        scorer = self._done.pop(name, None)
        return scorer.dump() if scorer is not None and self._has_scores else None

    @torch.inference_mode()
    def __call__(self, hidden_T_H: Tensor, num_scheduled: dict[str, int]) -> dict[str, Any]:
        runner = self.runner
        self._plain &= num_scheduled.keys()
        for request_id, count in num_scheduled.items():
            if request_id in self._plain:
                continue
            state = runner.requests[request_id]
            begun = self._begin(request_id, state)
            if begun is None:
                self._plain.add(request_id)
                continue
            scores, scorer = begun
            start = state.num_computed_tokens
            row = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]].item()
            self._add(scorer, hidden_T_H[row : row + count], start, state.lora_request)
            if start + count >= scorer.length:
                del self._begun[request_id]
                self._done[scores.name] = scorer
                Scores.drop(state.sampling_params.extra_args)
                self._plain.add(request_id)
        return {}

    def _begin(self, request_id: str, state: Any) -> tuple[Scores, PromptScorer] | None:
        found = self._begun.get(request_id)
        if found is None:
            scores = Scores.read(state.sampling_params.extra_args or {})
            if scores is None:
                return None
            found = self._begun[request_id] = (
                scores,
                PromptScorer(scores.request(state.prompt_token_ids), seed=scores.seed),
            )
        return found

    def _add(self, scorer: PromptScorer, hidden_n_H: Tensor, start: int, version: Any) -> None:
        """Rows start .. start + n - 1."""
        rows = scorer.rows(start, hidden_n_H.shape[0])
        step = max(1, _CHUNK_BYTES // (4 * self.runner.model_config.get_vocab_size()))
        for row in range(rows.start, rows.stop, step):
            chunk = hidden_n_H[row - start : min(row + step, rows.stop) - start]
            if self.runner.lora_config:
                # The output layer takes each row's adapter from the mapping of the rows that sample.
                number = 0 if version is None else version.lora_int_id
                mapping = (number,) * chunk.shape[0]
                self.runner._set_active_loras(mapping, mapping, {version} if version is not None else set())
            logits_n_V = self.runner.model.compute_logits(chunk)
            if self._has_scores:
                scorer.add_logprobs(logits_n_V.float().log_softmax(-1), row)
