"""A byte-level BPE tokenizer with Qwen's special tokens and chat template, trained on generated text."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tinsmith.toy.text import documents

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

_SPECIAL = [
    END_OF_TEXT, "<|im_start|>", END_OF_TURN, "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
_KEPT_WHEN_DECODING = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip

# Splits as Qwen's tokenizer does: words with a leading space or mark, single digits, runs of marks, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>system\\nTools, to be called as <tool_call>{"name": ..., "arguments": {...}}</tool_call>:\\n' }}
{%- for tool in tools -%}
{{ tool | tojson + '\\n' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] -%}
{{ '<tool_call>\\n{"name": ' + call['function']['name'] | tojson + ', "arguments": ' }}
{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}
{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif -%}
{%- endif -%}"""

_TRAINING_DOCUMENTS = 30_000
_MAX_LENGTH = 32_768


def write_tokenizer(folder: Path, *, vocab_size: int, seed: int) -> PreTrainedTokenizerBase:
    """Trains a tokenizer of at most `vocab_size` ids and writes it to `folder`. It has fewer ids if the text yields
    fewer merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_SPECIAL) - len(_KEPT_WHEN_DECODING),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain = (
        document if isinstance(document, str) else "\n".join(f"{role}\n{content}" for role, content in document)
        for document in islice(documents(seed), _TRAINING_DOCUMENTS)
    )
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _KEPT_WHEN_DECODING])

    folder.mkdir(parents=True, exist_ok=True)
    # Not tokenizer.save, whose error on a full disk is no OSError.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(tokenizer), indent=2))
    return AutoTokenizer.from_pretrained(folder)


def _config(tokenizer: Tokenizer) -> dict[str, object]:
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in _SPECIAL,
        }
        for token in [*_SPECIAL, *_KEPT_WHEN_DECODING]
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "additional_special_tokens": _SPECIAL[1:],
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "errors": "replace",
        "model_max_length": _MAX_LENGTH,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "unk_token": None,
    }
