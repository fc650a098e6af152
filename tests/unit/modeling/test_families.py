"""Any Hugging Face causal LM: each family made tiny from its config, held against its own forward and stock PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.oracle import Oracle
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, UnsupportedModel, positions_of
from tinsmith.modeling.kv_cache import Cached, KVCache, Prefill
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.modeling.lora import Run
from tinsmith.rpc.errors import Unsupported

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DENSE: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {},
    "Gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 16},
    "Gemma3Text": {"sliding_window": 4, "query_pre_attn_scalar": 16},
    "Phi3": {},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
}
SPARSE: dict[str, dict[str, Any]] = {"Qwen3Moe": EXPERTS, "GptOss": {**EXPERTS, "sliding_window": 4}}
RECURRENT: dict[str, dict[str, Any]] = {"Mamba": {}}


def make(folder: Path, family: str, settings: dict[str, Any]) -> Path:
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **settings})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("family", [*DENSE, *SPARSE])
def test_family_equals_stock_peft_gradients_included(family: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", family, {**DENSE, **SPARSE}[family])
    base = BaseModel.load(folder, device=CPU, dtype=torch.float32)
    adapter = Adapter.create(AdapterConfig(rank=4, seed=1, train_mlp=family in DENSE), base.targets, CPU)
    torch.manual_seed(1)
    for weights in adapter.weights.values():
        weights.b_O_R.normal_(0, 0.1)
    for tensor in adapter.tensors():
        tensor.requires_grad_(True)
    lengths = [7, 9]
    tokens, targets, factors = torch.randint(256, (16,)), torch.randint(256, (16,)), torch.randn(16)
    runs = [Run(adapter, slice(0, 16))]
    hidden = base.hidden_states(tokens, positions_of(lengths, CPU), Packed(lengths), runs)
    ours = target_logprobs(base.head, hidden, torch.arange(16), targets, runs)
    grads = torch.autograd.grad((ours * factors).sum(), adapter.tensors())

    oracle = Oracle(folder, adapter, tmp_path / "adapter")

    def theirs() -> torch.Tensor:
        return torch.cat([oracle.logprobs(tokens[p].tolist(), targets[p]) for p in (slice(0, 7), slice(7, 16))])

    torch.testing.assert_close(ours.detach(), theirs().detach(), rtol=1e-5, atol=2e-5)
    for grad, expected in zip(grads, oracle.gradients(lambda: (theirs() * factors).sum()), strict=True):
        assert (grad - expected).norm() <= 2e-5 * expected.norm()

    with torch.no_grad():  # and one token at a time, from the cache
        cache = KVCache()
        cache.reserve(1, 16)
        none = torch.empty(0, dtype=torch.int64)
        base.hidden_states(tokens[:6], torch.arange(6), Cached(cache, none, [Prefill(0, 0, 6)]), [])
        last = base.hidden_states(tokens[6:7], torch.tensor([6]), Cached(cache, torch.tensor([6]), []), [])
        whole = base.hidden_states(tokens[:7], torch.arange(7), Packed([7]), [])
    torch.testing.assert_close(last[0], whole[6], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", SPARSE)
def test_fused_experts_are_refused_and_not_left_out(family: str, tmp_path: Path) -> None:
    base = BaseModel.load(make(tmp_path, family, SPARSE[family]), device=CPU, dtype=torch.float32)
    with pytest.raises(Unsupported, match="train_mlp"):
        Adapter.create(AdapterConfig(rank=4), base.targets, CPU)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_family_is_refused_at_load(family: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be packed"):
        BaseModel.load(make(tmp_path, family, RECURRENT[family]), device=CPU, dtype=torch.float32)
