"""A backend's elementwise functions in models of several families: what they replace, and that nothing else changes."""

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.support.models import TINY_CONFIG
from tinsmith.modeling.kernels import elementwise
from tinsmith.modeling.kernels.elementwise import Elementwise
from tinsmith.modeling.kernels.install import install
from tinsmith.modeling.kernels.liger import liger

FAMILIES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "Llama": ({}, {"norms": 5, "SwiGLU": 2, "rotations": 2}),
    "Qwen3": ({}, {"norms": 9, "SwiGLU": 2, "rotations": 2}),
    "Mistral": ({}, {"norms": 5, "SwiGLU": 2, "rotations": 2}),
    "Gemma3Text": ({"query_pre_attn_scalar": 16}, {"norms": 13, "rotations": 2}),  # GELU
    "Phi3": ({}, {"norms": 5}),  # gate and up are one layer, and it may rotate a part of a head
    "Cohere": ({}, {"SwiGLU": 2}),  # layer norms, and it rotates neighbours
    "Qwen3Moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"norms": 9, "rotations": 2},
    ),
    "GptOss": ({"num_local_experts": 4, "num_experts_per_tok": 2}, {"norms": 5}),  # its cos and sin are halves
}


class Counting:
    """The plain functions, which count their calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.backend = Elementwise(
            "counting",
            self._counted("norms", elementwise.rms_norm),
            self._counted("SwiGLU", elementwise.swiglu),
            self._counted("rotations", elementwise.rotary),
        )

    def _counted(self, kind: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[kind] += 1
            return function(*args, **kwargs)

        return call


def make(family: str, settings: dict[str, Any]) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**{**TINY_CONFIG, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0, 0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_backend_computes_what_it_replaces_and_no_more(family: str) -> None:
    settings, expected = FAMILIES[family]
    model, other = make(family, settings), make(family, settings)
    tokens = torch.randint(256, (1, 9), generator=torch.Generator().manual_seed(1))
    before, names = model(tokens).logits, [name for name, _ in model.named_parameters()]
    counting = Counting()
    assert install(model, counting.backend) == expected
    after = model(tokens).logits
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert counting.calls == expected
    assert [name for name, _ in model.named_parameters()] == names
    counting.calls.clear()
    assert torch.equal(other(tokens).logits, before)  # another model of the same kind keeps its own
    assert not counting.calls


@pytest.mark.parametrize("gemma", [False, True])
def test_the_weight_is_where_it_was_in_half_precision_too(gemma: bool) -> None:
    model = make("Gemma3Text" if gemma else "Llama", {}).bfloat16()
    counting = Counting()
    assert install(model, counting.backend)["norms"] == (13 if gemma else 5)
    assert model(torch.arange(5)[None]).logits.dtype == torch.bfloat16


def test_liger_computes_gemma_s_norms_not_in_place_and_torch_the_plain_ones() -> None:
    calls: list[tuple[Any, ...]] = []

    class Recorded:
        def apply(self, *args: Any) -> Tensor:
            calls.append(args)
            return args[0]

    class Ops:
        LigerRMSNormFunction = LigerSiLUMulFunction = LigerRopeFunction = Recorded()

    backend = liger(Ops)
    x, w = torch.randn(1, 2, 4), torch.randn(4)
    torch.testing.assert_close(backend.rms_norm(x, w, 1e-6, gemma=False), elementwise.rms_norm(x, w, 1e-6, gemma=False))
    assert not calls
    backend.rms_norm(x, w, 1e-6, gemma=True)
    assert [call[2:] for call in calls] == [(1e-6, 1.0, "gemma", False)]
    with pytest.raises(ImportError, match="LigerRMSNormFunction"):
        liger(object())
