"""Any Hugging Face causal LM: each family made tiny from its config, held against its own forward and stock PEFT."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.models import TINY_CONFIG
from tests.oracle import Oracle
from tinsmith.errors import Unsupported
from tinsmith.modeling import adaptation
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, UnsupportedModel, positions_of
from tinsmith.modeling.kv_cache import Cached, KVCache, Prefill
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.modeling.lora import Run

CPU = torch.device("cpu")
COMMON = {**TINY_CONFIG, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 16}
GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 16}
DENSE: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Llama": {"rope_parameters": LLAMA3_ROPE},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {},
    "Gemma2": GEMMA,
    "Gemma3Text": GEMMA,
    "Gemma3": {
        "text_config": {**COMMON, **GEMMA}, "mm_tokens_per_image": 4,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14,
        },
        "image_token_index": 5, "boi_token_index": 3, "eoi_token_index": 4,
    },
    "Phi3": {},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
    "Olmo2": {},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SPARSE: dict[str, dict[str, Any]] = {
    "Qwen3Moe": EXPERTS,
    "GptOss": {**EXPERTS, "sliding_window": 4, "rope_parameters": YARN},
    "Mixtral": EXPERTS,
    "GraniteMoe": EXPERTS,
    # Shared experts, and a dense layer before the sparse one:
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
    "Glm4Moe": {**ROUTED, "n_shared_experts": 1, "partial_rotary_factor": 0.5},
    "DeepseekV3": {
        **ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {"Mamba": {}}


def make(folder: Path, family: str, settings: dict[str, Any]) -> Path:
    shared = {} if "text_config" in settings else COMMON
    config = getattr(transformers, f"{family}Config")(**{**shared, **settings})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path, family: str) -> BaseModel:
    return BaseModel.load(make(folder, family, {**DENSE, **SPARSE}[family]), device=CPU, dtype=torch.float32)


def random_adapter(base: BaseModel, seed: int, **config: Any) -> Adapter:
    adapter = Adapter.create(AdapterConfig(seed=seed, **config), base.targets, CPU)
    generator = torch.Generator().manual_seed(seed)
    for weights in adapter.weights.values():
        weights.b_O_R.normal_(0, 0.1, generator=generator)
    for tensor in adapter.tensors():
        tensor.requires_grad_(True)
    return adapter


def packed_logprobs(base: BaseModel, tokens: torch.Tensor, lengths: list[int], runs: list[Run]) -> torch.Tensor:
    """Logprob of each token as the successor of itself."""
    hidden = base.hidden_states(tokens, positions_of(lengths, CPU), Packed(lengths), runs)
    return target_logprobs(base.head, hidden, torch.arange(len(tokens)), tokens, runs)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("family", [*DENSE, *SPARSE])
def test_family_equals_stock_peft_gradients_included(family: str, tmp_path: Path) -> None:
    base = load(tmp_path / "model", family)
    adapter = random_adapter(base, 1, rank=3)  # of all layers
    lengths = [7, 9]
    torch.manual_seed(1)
    tokens, factors = torch.randint(256, (16,)), torch.randn(16)
    ours = packed_logprobs(base, tokens, lengths, [Run(adapter, slice(0, 16))])
    grads = torch.autograd.grad((ours * factors).sum(), adapter.tensors())

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as one of keys that PEFT misses
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        oracle = Oracle(tmp_path / "model", adapter, tmp_path / "adapter")

    def theirs() -> torch.Tensor:
        return torch.cat([oracle.logprobs(tokens[p].tolist(), tokens[p]) for p in (slice(0, 7), slice(7, 16))])

    torch.testing.assert_close(ours.detach(), theirs().detach(), rtol=1e-5, atol=2e-5)
    for grad, expected in zip(grads, oracle.gradients(lambda: (theirs() * factors).sum()), strict=True):
        assert expected.norm() > 0
        assert (grad - expected).norm() <= 2e-5 * expected.norm()
    assert torch.equal(Adapter.load_peft(tmp_path / "adapter", adapter.config, base.targets).flat, adapter.flat)

    with torch.no_grad():  # and one token at a time, from the cache, beside a lane of the base model
        cache = KVCache()
        cache.reserve(2, 16)
        none, second = torch.empty(0, dtype=torch.int64), Run(adapter, torch.tensor([1]))
        for lane, runs in enumerate(([], [Run(adapter, slice(0, 6))])):
            base.hidden_states(tokens[:6], torch.arange(6), Cached(cache, none, [Prefill(lane, 0, 6)]), runs)
        both = Cached(cache, torch.tensor([6, 6]), [])
        last = base.hidden_states(tokens[6].repeat(2), torch.tensor([6, 6]), both, [second])
        for row, runs in enumerate(([], [Run(adapter, slice(0, 7))])):
            whole = base.hidden_states(tokens[:7], torch.arange(7), Packed([7]), runs)
            torch.testing.assert_close(last[row], whole[6], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Qwen2Moe", "GptOss"])
def test_adapters_of_experts_do_not_feel_their_neighbours(family: str, tmp_path: Path) -> None:
    base = load(tmp_path, family)
    first, second = random_adapter(base, 1, rank=3), random_adapter(base, 2, rank=8, train_unembed=False)
    attention = random_adapter(base, 3, rank=2, train_mlp=False)
    torch.manual_seed(1)
    tokens, factors, lengths = torch.randint(256, (26,)), torch.randn(26), [6, 5, 4, 7, 4]
    # The last sequence is the base model's; the second adapter has two sequences.
    two = torch.cat([torch.arange(6, 11), torch.arange(15, 22)])
    rows = {first: slice(0, 6), second: two, attention: slice(11, 15)}
    company = packed_logprobs(base, tokens, lengths, [Run(adapter, where) for adapter, where in rows.items()])
    wanted = first.tensors() + second.tensors()
    together = torch.autograd.grad((company * factors).sum(), wanted)
    alone = []
    for adapter, own in ((first, [6]), (second, [5, 7])):
        where = rows[adapter]
        ours = packed_logprobs(base, tokens[where], own, [Run(adapter, slice(0, sum(own)))])
        torch.testing.assert_close(company[where], ours, rtol=1e-5, atol=1e-5)
        alone += torch.autograd.grad((ours * factors[where]).sum(), adapter.tensors())
    for grad, expected in zip(together, alone, strict=True):
        assert (grad - expected).norm() <= 2e-5 * expected.norm()
    with torch.no_grad():
        plain = packed_logprobs(base, tokens[22:], [4], [])
        torch.testing.assert_close(company[22:], plain, rtol=1e-5, atol=1e-5)
        without_gradient = packed_logprobs(base, tokens, lengths, [Run(a, w) for a, w in rows.items()])
        torch.testing.assert_close(without_gradient, company, rtol=1e-5, atol=1e-5)


def test_the_router_of_experts_is_no_target_and_shared_experts_are(tmp_path: Path) -> None:
    targets = {t.name.removeprefix("model.layers."): t for t in load(tmp_path, "Qwen2Moe").targets if t.group == "mlp"}
    shared = [f"1.mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")]
    dense = [f"0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert sorted(targets) == sorted([*dense, *shared, "1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"])
    assert targets["1.mlp.experts.gate_up_proj"].shapes(8) == ((8, 64), (4, 64, 8))
    assert targets["1.mlp.experts.down_proj"].shapes(8) == ((4, 8, 32), (64, 8))


@pytest.mark.parametrize("family", SPARSE)
def test_rounding_that_chooses_another_expert_refuses_nothing(family: str, tmp_path: Path) -> None:
    base = BaseModel.load(make(tmp_path, family, SPARSE[family]), device=CPU, dtype=torch.bfloat16)
    assert base.groups == ["attn", "mlp", "unembed"], base.refused_groups


def test_unknown_experts_are_refused_and_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptation, "is_fused_experts", lambda module: False)
    base = load(tmp_path, "Qwen2Moe")  # whose shared experts alone could be adapted
    with pytest.raises(Unsupported, match=r"train_mlp: the experts of this base model \(Qwen2MoeExperts\)"):
        base.check_groups({"attn", "mlp"})
    with pytest.raises(Unsupported, match="train_mlp"):
        Adapter.create(AdapterConfig(rank=4), base.targets, CPU)
    Adapter.create(AdapterConfig(rank=4, train_mlp=False), base.targets, CPU)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_family_is_refused_at_load(family: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be packed"):
        BaseModel.load(make(tmp_path, family, RECURRENT[family]), device=CPU, dtype=torch.float32)


def test_attention_that_does_not_hand_on_the_layout_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"NemotronForCausalLM cannot be packed: .*layout"):
        BaseModel.load(make(tmp_path, "Nemotron", {}), device=CPU, dtype=torch.float32)


def test_a_model_that_is_no_causal_lm_is_refused_at_load(tmp_path: Path) -> None:
    transformers.Qwen3VLConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="no causal language model for Qwen3VLConfig"):
        BaseModel.load(tmp_path, device=CPU, dtype=torch.float32)
