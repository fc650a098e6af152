"""Tiny base models with random weights."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tinsmith.modeling.pretrained import auto_class
from tinsmith.pictures.kimi import Kimi_K25ImageProcessorPil

VOCAB_SIZE = 512
CONTEXT = 256

TINY_CONFIG: dict[str, Any] = {
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
}
"""Settings that most model families understand."""


def make_model(folder: Path, **overrides: Any) -> Path:
    """A Qwen3 of two layers, with grouped queries and, unless overridden, an output layer of its own."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,  # sharper than the default, so that a wrong position shows
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{**settings, **overrides})).save_pretrained(folder)
    return folder


def make_sparse_model(folder: Path, **overrides: Any) -> Path:
    """A Qwen3-MoE of two layers with four experts, of which each token takes two."""
    settings = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "tie_word_embeddings": False, "initializer_range": 0.1,
    }  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**settings, **overrides})).save_pretrained(folder)
    return folder


def make_recurrent_model(folder: Path, **overrides: Any) -> Path:
    """A Qwen3.5 text model: a layer of Gated DeltaNet, which carries a state, and one of attention."""
    settings = {
        **TINY_CONFIG,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**settings, **overrides})).save_pretrained(folder)
    return folder


_SEEN = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
_TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "depth": 2, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "patch_size": 4, "initializer_range": 0.1,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_GEMMA4: dict[str, Any] = {
    **TINY_CONFIG, "global_head_dim": 16, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16,
    "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
    "use_bidirectional_attention": "vision", "tie_word_embeddings": False, "max_position_embeddings": 256,
}  # fmt: skip
_GEMMA4_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
    "position_embedding_size": 128,
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "Qwen3VL": {
        "text_config": TINY_CONFIG, "vision_config": {**_TOWER, "deepstack_visual_indexes": [0, 1]}, **_SEEN
    },
    "Qwen3_5": {"text_config": {**TINY_CONFIG, **_DELTA}, "vision_config": _TOWER, **_SEEN},
    "Qwen2VL": {
        "text_config": {**TINY_CONFIG, "rope_parameters": _MROPE},
        "vision_config": {
            "embed_dim": 32, "hidden_size": 64, "depth": 2, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2
        },
        **_SEEN,
    },
    "Qwen2_5_VL": {
        "text_config": {**TINY_CONFIG, "rope_parameters": _MROPE},
        "vision_config": {**_TOWER, "fullatt_block_indexes": [1], "window_size": 16},
        **_SEEN,
    },
    "Gemma3": {
        "text_config": {
            **TINY_CONFIG, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 24, "patch_size": 4,
        },
        "mm_tokens_per_image": 9, "image_token_index": 5, "boi_token_index": 7, "eoi_token_index": 8,
        "tie_word_embeddings": False,
    },
    "Gemma4": {
        "text_config": _GEMMA4, "vision_config": _GEMMA4_TOWER, "audio_config": None, "image_token_id": 5,
        "tie_word_embeddings": False,
    },
    "Glm4v": {
        "text_config": {
            **TINY_CONFIG, "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
        },
        "vision_config": {
            **_TOWER, "out_hidden_size": 64, "image_size": 16, "spatial_merge_size": 2, "intermediate_size": 48
        },
        "tie_word_embeddings": False, "image_token_id": 5, "video_token_id": 6,
    },
    "Exaone4_5_": {
        "text_config": {
            **TINY_CONFIG, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
        "vision_config": {**_TOWER, "fullatt_block_indexes": [1], "window_size": 16, "num_key_value_heads": 2},
        "tie_word_embeddings": False, "image_token_id": 5, "video_token_id": 6,
    },
    "Kimi_K25": {
        "text_config": {
            **TINY_CONFIG, "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "moe_intermediate_size": 48, "q_lora_rank": 24,
            "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8,
        },
        "projection_hidden_size": 32, "tie_word_embeddings": False, "image_token_id": 5, "video_token_id": 6,
    },
    "Mistral3": {
        "text_config": {**TINY_CONFIG, "tie_word_embeddings": False},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 64, "patch_size": 4, "initializer_range": 0.1,
        },
        "tie_word_embeddings": False, "image_token_index": 5,
    },
    "Llava": {
        "text_config": {**TINY_CONFIG, "model_type": "llama", "tie_word_embeddings": False},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 2, "image_size": 12, "patch_size": 4, "projection_dim": 16,
        },
        "tie_word_embeddings": False, "image_token_index": 5, "image_seq_length": 9,
    },
    "InternVL": {
        "text_config": {**TINY_CONFIG, "model_type": "qwen2", "tie_word_embeddings": False},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": [16, 16], "patch_size": [4, 4], "initializer_range": 0.1, "layer_scale_init_value": 1.0,
        },
        "tie_word_embeddings": False, "image_token_id": 5,
    },
}  # fmt: skip
"""Families that see pictures, with the settings that make them tiny. A token of a picture has 8 x 8 pixels."""


def make_vision_model(
    folder: Path, family: str = "Qwen3VL", *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """A tiny model of VISION in its published form, with the processor of its pictures."""
    config = getattr(transformers, f"{family}Config")(**{**VISION[family], **overrides})
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).to(dtype)
    if family == "Gemma3":  # it begins with zeros, and a model that sees nothing could not show a mistake
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
    model.save_pretrained(folder)
    if family == "Gemma3":
        Gemma3ImageProcessorPil(size={"height": 24, "width": 24}).save_pretrained(folder)
    elif family == "Gemma4":
        Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70).save_pretrained(folder)
    elif family == "Glm4v":
        settings: dict[str, Any] = {"patch_size": 4, "size": {"shortest_edge": 4 * 64, "longest_edge": 64 * 64}}
        Glm4vImageProcessorPil(**settings).save_pretrained(folder)
    elif family == "Mistral3":
        PixtralImageProcessorPil(patch_size={"height": 8, "width": 8}, size={"longest_edge": 64}).save_pretrained(
            folder
        )
        vocabulary = {"[IMG]": 5, "[IMG_BREAK]": 7, "[IMG_END]": 8}
        words = Tokenizer(WordLevel(vocabulary, unk_token="[IMG]"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    elif family == "Llava":
        CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12}).save_pretrained(folder)
    elif family == "InternVL":
        tile = {"height": 16, "width": 16}
        GotOcr2ImageProcessorPil(size=tile, crop_to_patches=True, max_patches=3).save_pretrained(folder)
    elif family == "Kimi_K25":
        Kimi_K25ImageProcessorPil(patch_size=4, max_patches=64).save_pretrained(folder)
    else:
        size = {"shortest_edge": 2 * 64, "longest_edge": 32 * 64}
        Qwen2VLImageProcessorPil(patch_size=4, size=size).save_pretrained(folder)
    return folder


def image_processor(folder: Path) -> Any:
    """The processor in a model's files that scales with Pillow."""
    name = json.loads((folder / "preprocessor_config.json").read_text())["image_processor_type"]
    if name == "Kimi_K25ImageProcessor":
        return Kimi_K25ImageProcessorPil.from_pretrained(folder)
    return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")


def kinds_of(model: Any, is_picture_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """The argument with which a model's forward takes the kinds of tokens, if there is one."""
    known = inspect.signature(model.forward).parameters
    return {name: is_picture_T.int()[None] for name in ("mm_token_type_ids", "token_type_ids") if name in known}


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
SPARSE: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**TINY_CONFIG, **_EXPERTS, "num_experts": 4, "tie_word_embeddings": False},
    "Qwen3_5Moe": {
        "text_config": {
            **TINY_CONFIG, **_DELTA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40
        },
        "vision_config": _TOWER, "tie_word_embeddings": False, **_SEEN,
    },
    "DeepseekV3": {
        **TINY_CONFIG, **_EXPERTS, "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "tie_word_embeddings": False,
    },
    "GptOss": {
        **TINY_CONFIG, "num_experts_per_tok": 2, "num_local_experts": 4, "intermediate_size": 48, "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "NemotronH": {
        **TINY_CONFIG, **_EXPERTS, "layers_block_type": ["moe", "attention"], "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 2, "chunk_size": 16,
    },
}  # fmt: skip
"""Families with fused experts, 48 wide, and the settings that make them tiny. A gate and an input are halves of one
tensor, in GptOss alternate rows; NemotronH has no gate. Qwen3_5Moe has its encoder of images."""


def make_sparse_family(folder: Path, family: str) -> Path:
    """A tiny model of SPARSE in its published form."""
    config = getattr(transformers, f"{family}Config")(**SPARSE[family])
    torch.manual_seed(0)
    auto_class(config).from_config(config).float().save_pretrained(folder)
    return folder
