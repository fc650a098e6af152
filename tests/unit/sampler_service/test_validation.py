from typing import Any

import numpy as np
import pytest

from sampler_service.core.request import Params, Penalties, Request, RequestLimits, StopCondition, Targets
from tinsmith.errors import InvalidRequest

LIMITS = RequestLimits(
    vocab_size=100, max_context_length=64, max_kv_tokens=48, max_num_samples=16, max_topk_logprobs=20
)
PROMPT = np.arange(10, dtype=np.int32)


def check(**fields: Any) -> None:
    params = {name: fields.pop(name) for name in list(fields) if name in Params.__slots__}
    LIMITS.check(Request(**{"prompt": PROMPT, "params": Params(**params), **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": PROMPT[:0]}, "prompt: is empty"),
        (
            {"prompt": np.array([1, 100], np.int32)},
            r"prompt: token id 100 at position 1 is outside the vocabulary \[0, 100\)",
        ),
        ({"prompt": np.array([-1], np.int32)}, "prompt: token id -1 at position 0"),
        ({"num_samples": 0}, r"num_samples: 0 is outside 1\.\.16"),
        ({"num_samples": 17}, r"num_samples: 17 is outside 1\.\.16"),
        ({"max_tokens": 0}, "max_tokens: 0 is below 1"),
        ({"max_tokens": 55}, r"exceeds the model's context window: 10 \+ 55 > 64"),
        ({"prompt": np.zeros(64, np.int32)}, r"context window: 64 \+ 1 > 64"),
        ({"max_tokens": 39}, r"max_kv_tokens\): 10 \+ 39 > 48"),
        ({"temperature": -0.1}, "temperature: -0.1"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"temperature": float("inf")}, "temperature: inf"),
        ({"top_p": 0.0}, "top_p: 0.0 is outside"),
        ({"top_p": 1.1}, "top_p: 1.1 is outside"),
        ({"top_p": float("nan")}, "top_p: nan is outside"),
        ({"min_p": -0.1}, "min_p: -0.1 is outside"),
        ({"min_p": 1.5}, "min_p: 1.5 is outside"),
        ({"penalties": Penalties(frequency=2.5)}, r"frequency_penalty: 2.5 is outside \[-2, 2\]"),
        ({"penalties": Penalties(presence=float("nan"))}, "presence_penalty: nan is outside"),
        ({"penalties": Penalties(repetition=0)}, r"repetition_penalty: 0 is outside \[0.01, 100\]"),
        ({"penalties": Penalties(logit_bias=((3, 1.0), (100, 1.0)))}, "logit_bias: token id 100 is outside"),
        ({"penalties": Penalties(logit_bias=((3, -100.5),))}, "logit_bias: -100.5 for token 3 is outside"),
        (
            {"penalties": Penalties(logit_bias=tuple((n, 1.0) for n in range(1025)))},
            "logit_bias: 1025 tokens are above 1024",
        ),
        ({"stop": StopCondition(strings=("a", ""))}, "stop.strings: an empty one"),
        (
            {"stop": StopCondition(strings=("a" * 4000, "ä" * 49))},
            "stop.strings: 4098 bytes .* above the limit of 4096",
        ),
        ({"stop": StopCondition(token_ids=(3, 100))}, "stop.token_ids: token id 100 at position 1"),
        ({"prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n: 3 is given without prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, r"prompt_logprobs_last_n: 0 is outside 1\.\.9"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 10}, r"prompt_logprobs_last_n: 10 is outside 1\.\.9"),
        ({"topk_prompt_logprobs": 21}, r"topk_prompt_logprobs: 21 is outside 0\.\.20, this server.s max_topk_logprobs"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs: -1"),
        ({"prompt_alt_tokens_k": 21}, "prompt_alt_tokens_k: 21"),
        ({"targets": Targets(np.array([0, 4]), np.array([1, 100]))}, "token id 100 in row 4"),
        ({"targets": Targets(np.array([0]), np.array([-2]))}, "token id -2 in row 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_named_with_its_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check(**fields)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 55}, "sampling_params.max_tokens"),
        ({"max_tokens": 39}, "sampling_params.max_tokens"),
        ({"prompt": np.zeros(64, np.int32), "max_tokens": 3}, "prompt"),
        ({"prompt": np.zeros(48, np.int32)}, "prompt"),
    ],
    ids=str,
)
def test_a_prompt_that_fits_with_no_max_tokens_is_named_itself(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(**fields)
    assert refused.value.metadata["field"] == field


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 10**6},
        {"top_k": -1},
        {"max_tokens": 38},
        {"seed": -5},
        {"temperature": 0.0},
        {"num_samples": 16},
        {"min_p": 1},
        {"penalties": Penalties(-2, 2, 0.01, ((0, -100), (99, 100)))},
    ],
    ids=str,
)
def test_valid_requests_pass(fields: dict[str, Any]) -> None:
    check(**fields)
