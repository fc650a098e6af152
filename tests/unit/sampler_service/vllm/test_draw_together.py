"""Draws of several workers, with stand-ins for what vLLM gives them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from sampler_service.core.request import Grammar, Penalties
from sampler_service.vllm.wire import Draws, extra_args


class Team:
    """The first worker's tokens reach the others."""

    def __init__(self) -> None:
        self.is_first_rank = True
        self._sent: Tensor | None = None

    def broadcast(self, tensor: Tensor) -> Tensor:
        if self.is_first_rank:
            self._sent = tensor.clone()
            return tensor
        assert self._sent is not None
        assert (tensor.shape, tensor.dtype) == (self._sent.shape, self._sent.dtype)
        return tensor.copy_(self._sent)


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Team:
    team = Team()
    parts: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {"get_tp_group": lambda: team},
        "vllm.v1": {},
        "vllm.v1.outputs": {
            "LogprobsTensors": lambda *fields: fields,
            "SamplerOutput": lambda tokens, logprobs: SimpleNamespace(tokens=tokens, logprobs=logprobs),
        },
        "vllm.v1.sample": {},
        "vllm.v1.sample.sampler": {"Sampler": nn.Module},
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "sampler_service.vllm.draw", raising=False)
    return team


def runner(temperatures: list[float]) -> Any:
    draws = {
        f"{n}": Draws(key=n, first=0, temperature=one, top_k=-1, top_p=1.0, topk=0)
        for n, one in enumerate(temperatures)
    }
    count = len(draws)
    return SimpleNamespace(
        requests={
            name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra_args(one, None)))
            for name, one in draws.items()
        },
        input_batch=SimpleNamespace(
            req_ids=list(draws), num_tokens_no_spec=np.full(count, 5), num_prompt_tokens=np.full(count, 5)
        ),
    )


def test_all_workers_go_on_with_the_tokens_of_the_first_one_however_their_own_sums_were_rounded(team: Team) -> None:
    sampler = importlib.import_module("sampler_service.vllm.draw").StreamSampler(runner([0.0, 1.0]))
    logits = torch.zeros(2, 4)
    logits[:, 2] = 1e-6
    first = sampler(logits, None)
    assert first.tokens[0].item() == 2
    assert first.logprobs is not None
    team.is_first_rank = False
    logits[:, 1] = 2e-6
    other = sampler(logits, None)
    assert other.tokens.tolist() == first.tokens.tolist()
    assert other.tokens.dtype == first.tokens.dtype
    sys.modules.pop("sampler_service.vllm.draw")


def test_a_history_goes_on_when_the_batch_changes_and_leaves_out_what_vllm_threw_away(team: Team) -> None:
    """vLLM lets a prompt that is computed in pieces draw after each piece, and here knows numbers of tokens only."""
    one, other = (
        Draws(key=n, first=first, temperature=0.0, top_k=0, top_p=1.0, topk=0, penalties=Penalties(frequency=1.0))
        for n, first in ((0, 1), (1, 0))
    )
    requests = {
        name: SimpleNamespace(
            sampling_params=SimpleNamespace(extra_args=extra_args(draws, None)),
            prompt_token_ids=[3, 3],
            output_token_ids=[],
        )
        for name, draws in (("one", one), ("other", other))
    }
    batch = SimpleNamespace(num_tokens_no_spec=np.full(2, 5), num_prompt_tokens=np.full(2, 5))
    sampler = importlib.import_module("sampler_service.vllm.draw").StreamSampler(
        SimpleNamespace(requests=requests, input_batch=batch)
    )

    def draw(*names: str) -> list[int]:
        batch.req_ids = list(names)
        logits = torch.tensor([[0.0, 0.3, 0.6, 0.9]]).repeat(len(names), 1)
        return sampler(logits, None).tokens[:, 0].tolist()

    assert draw("one") == [2]  # its second 3 was drawn before it moved to another version
    assert draw("one") == [2]  # thrown away: no token of it is there
    requests["one"].output_token_ids.append(-1)  # taken, not yet known
    assert draw("other", "one") == [3, 1]
    requests["one"].output_token_ids.append(-1)
    assert draw("one", "other") == [0, 3]
    requests["other"].output_token_ids.append(-1)
    del requests["one"]
    assert draw("other") == [2]
    assert list(sampler._histories) == ["other"]
    sys.modules.pop("sampler_service.vllm.draw")


def test_a_grammar_goes_on_from_what_vllm_has_taken(team: Team, text_model_folder: Path) -> None:
    """A sequence that has moved to another version has its earlier tokens in the prompt."""
    grammar = Grammar("lark", 'start: "ab" "cd"')
    names = AutoTokenizer.from_pretrained(text_model_folder)
    a, b, c = (names.convert_tokens_to_ids(char) for char in "abc")
    one, moved = (
        Draws(key=n, first=first, temperature=0.0, top_k=0, top_p=1.0, topk=0, grammar=grammar, grammar_eos=[0])
        for n, first in ((0, 0), (1, 1))
    )
    free = Draws(key=2, first=0, temperature=0.0, top_k=0, top_p=1.0, topk=0)
    requests = {
        name: SimpleNamespace(
            sampling_params=SimpleNamespace(extra_args=extra_args(draws, None)),
            prompt_token_ids=[3, a],
            output_token_ids=[],
        )
        for name, draws in (("one", one), ("moved", moved), ("free", free))
    }
    batch = SimpleNamespace(num_tokens_no_spec=np.full(3, 5), num_prompt_tokens=np.full(3, 5))
    sampler = importlib.import_module("sampler_service.vllm.draw").StreamSampler(
        SimpleNamespace(
            requests=requests, input_batch=batch, model_config=SimpleNamespace(model=str(text_model_folder))
        )
    )
    logits_V = torch.zeros(300)
    logits_V[[a, b, c, 7]] = torch.tensor([1.0, 2.0, 3.0, 9.0])

    def draw(*rows: str) -> Any:
        batch.req_ids = list(rows)
        return sampler(logits_V.repeat(len(rows), 1), None)

    drawn = draw("one", "free")
    assert drawn.tokens[:, 0].tolist() == [a, 7]
    np.testing.assert_allclose(drawn.logprobs[1][0, 0], logits_V.log_softmax(-1)[a], rtol=1e-5)
    assert draw("one").tokens.tolist() == [[a]]  # the first one was thrown away
    requests["one"].output_token_ids.append(-1)  # taken, not yet known
    assert draw("moved", "one").tokens[:, 0].tolist() == [b, b]
    requests["one"].output_token_ids.append(-1)
    requests["moved"].output_token_ids.append(-1)
    assert draw("one", "free", "moved").tokens[:, 0].tolist() == [c, 7, c]
    del requests["one"]
    draw("moved")
    assert list(sampler._grammars._matchers) == ["moved"]
    requests["moved"].output_token_ids += [-1]
    sampler._grammars._newest["moved"] = 7  # a token that the grammar forbids
    assert torch.isnan(draw("moved").logprobs[1]).all()
    sys.modules.pop("sampler_service.vllm.draw")
