"""python -m sampler_service.grammar_check: compiles one grammar and says what is wrong with it.

Grammars come from clients, and a short one can take minutes and gigabytes. This process may be killed for that. The
sampler may not, so it compiles only grammars that have passed here. Standard input and output are JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

CPU_S = 2
"""Most CPU time of a check, in seconds."""
MEMORY_BYTES = 512 * 1024 * 1024
"""Most memory of a check, in bytes."""


def limits() -> LLParserLimits:
    """Limits of the library's parser. They are tighter than its own where those would let one token take tens of
    milliseconds, or a grammar half a gigabyte."""
    return LLParserLimits(step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=20_000, verbose_errors=False)


def source_of(form: str, text: str) -> str:
    """A grammar in the library's own form. Raises ValueError for a JSON Schema that is no JSON object."""
    if form == "json_schema":
        # At most one space after each comma and colon. The library repeats a pattern for spaces, so that a model may go
        # on with them until max_tokens.
        return LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
        )
    return LLMatcher.grammar_from_lark(text)


class _Bytes:
    """A tokenizer of the 256 bytes and of some special tokens."""

    def __init__(self, special: Sequence[str]) -> None:
        self.tokens = [bytes([n]) for n in range(256)] + [name.encode() for name in special]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.bos_token_id = self.eos_token_id = 256

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def error_of(form: str, text: str, special: Sequence[str]) -> str:
    """Why the grammar cannot be used; empty when it can. `special`: names of the tokenizer's special tokens."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(["<|end|>", *special])))
    try:
        matcher = LLMatcher(tokenizer, source_of(form, text), log_level=0, limits=limits())
    except ValueError as error:
        return str(error)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.load(sys.stdin)
    json.dump({"error": error_of(asked["form"], asked["text"], asked["special"])}, sys.stdout)


if __name__ == "__main__":
    main()
