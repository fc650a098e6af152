"""python -m sampler_service.grammar_check: compiles one grammar and says what is wrong with it.

Grammars come from clients, and a short one can take minutes and gigabytes to compile. This process may be killed for
that. The sampler must live, so it compiles only grammars that have passed here. Standard input and output are JSON.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

CPU_S = 2
"""Most CPU time of a check, in seconds."""
MEMORY_BYTES = 512 * 1024 * 1024
"""Most memory of a check, in bytes."""


_BY_ID = re.compile(r"<\[\d+\]>")
"""Matches a token by its id, in a grammar of Lark's form; the tokenizer of a check has other ids."""


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


def circular_reference(form: str, text: str) -> str:
    """Describes the first `$ref` of a JSON Schema in the grammar that stands for nothing but itself; empty without one.

    The library refuses such a schema with a word of its own at the top, and fails in the middle of a text elsewhere.
    """
    starts = [0] if form == "json_schema" else [match.end() for match in re.finditer(r"%json\s+", text)]
    for start in starts:
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, start)
            found = _circular(schema)
        except (ValueError, RecursionError):  # the library reports what is wrong with the text
            continue
        if found:
            line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
            return found if form == "json_schema" else f"at {line}({column}): {found}"
    return ""


def _circular(schema: Any) -> str:
    cleared: set[int] = set()
    for place, node in _schemas(schema, ()):
        if isinstance(node.get("$ref"), str) and _is_circular(node, schema, (), cleared):
            return f"{'.'.join([*place, '$ref'])}: {node['$ref']!r} leads back to itself, so no value fits it"
    return ""


def _schemas(node: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The schemas within a schema, each with its place. Objects that are data, such as values of an enum, are left
    out."""
    if isinstance(node, dict):
        yield place, node
        for name, value in node.items():
            if name not in ("const", "enum", "default", "examples"):
                yield from _schemas(value, (*place, name))
    elif isinstance(node, list):
        for n, value in enumerate(node):
            yield from _schemas(value, (*place, str(n)))


def _is_circular(node: Any, schema: Any, above: tuple[int, ...], cleared: set[int]) -> bool:
    """Whether every way through references and combinations leads back to a node of `above`, which are nodes by `id`.

    `cleared`: nodes for which that was false.
    """
    if id(node) in above:
        return True
    if not isinstance(node, dict) or id(node) in cleared:
        return False
    above = (*above, id(node))
    needed = [_referred(node["$ref"], schema)] if isinstance(node.get("$ref"), str) else []
    needed += node["allOf"] if isinstance(node.get("allOf"), list) else []
    choices = [node[name] for name in ("anyOf", "oneOf") if isinstance(node.get(name), list) and node[name]]
    circular = any(_is_circular(one, schema, above, cleared) for one in needed) or any(
        all(_is_circular(one, schema, above, cleared) for one in each) for each in choices
    )
    if not circular:
        cleared.add(id(node))
    return circular


def _referred(reference: str, schema: Any) -> Any:
    """The part of the schema for which a reference stands; None if it leads elsewhere or to nothing."""
    if not reference.startswith("#"):
        return None
    node = schema
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    return node


class _Bytes:
    """A tokenizer of the 256 bytes and of some special tokens."""

    def __init__(self, special: Sequence[str]) -> None:
        self.tokens = [bytes([n]) for n in range(256)] + [name.encode() for name in special]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.bos_token_id = self.eos_token_id = 256

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def error_of(form: str, text: str, special: Sequence[str]) -> str:
    """The reason for which the grammar cannot be used; empty if it can. `special`: names of the tokenizer's special
    tokens."""
    text = _BY_ID.sub("<[256]>", text)
    if circular := circular_reference(form, text):
        return circular
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(["<|end of the check|>", *special])))
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
