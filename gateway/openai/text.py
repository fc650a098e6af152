"""Decodes tokens to text, token by token.

Text is decoded from the bytes of the tokens, so a character that several tokens make is never shown in part.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from tinsmith.errors import Unsupported

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def _byte_of_char() -> dict[str, int]:
    """Character -> byte, as byte-level BPE writes bytes (GPT-2, `bytes_to_unicode`).

    Bytes that are printable in Latin-1 are written as themselves, the others as characters 256, 257, ... in order.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _kinds(decoder: dict[str, Any]) -> set[str]:
    if decoder["type"] == "Sequence":
        return set().union(*(_kinds(part) for part in decoder["decoders"]))
    if decoder["type"] == "Replace" and decoder["pattern"].get("String") == _SPACE_MARK:
        return {"Metaspace"}
    return {decoder["type"]}


class Vocabulary:
    """The bytes and the text of each token of a tokenizer."""

    def __init__(self, tokenizer_json: str) -> None:
        """Reads a tokenizer.json. Raises Unsupported when the text of a token depends on its neighbours."""
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        decoder: Any = self._tokenizer.decoder
        state = {"type": None} if decoder is None else json.loads(decoder.__getstate__())
        kinds = _kinds(state)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        if not self._is_byte_level and "Metaspace" not in kinds:
            raise Unsupported(
                f"model: its tokenizer's decoder, {state['type']}, cannot be streamed; use the Tinker API, which "
                "answers with tokens",
                field="model",
            )
        added = self._tokenizer.get_added_tokens_decoder()
        self.added = {token.content: number for number, token in added.items()}
        """Text -> id, of the tokens that were added to the vocabulary."""
        self.special = {number for number, token in added.items() if token.special}
        self._bytes: dict[int, bytes] = {}

    def is_special(self, token: int) -> bool:
        return token in self.special

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token. Empty for an id that the tokenizer does not have: a model may have more rows than the
        tokenizer, and clients may send any id."""
        found = self._bytes.get(token)
        if found is None:
            text = self._tokenizer.id_to_token(token) if token >= 0 else None
            if text is None:
                return b""  # not cached, because there are four billion such ids
            found = self._bytes[token] = self._bytes_of(text)
        return found

    def _bytes_of(self, text: str) -> bytes:
        if self._is_byte_level:
            known = [_BYTE_OF_CHAR.get(char) for char in text]
            return text.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        return text.replace(_SPACE_MARK, " ").encode()

    def text_of(self, token: int) -> str:
        r"""The text of one token, for a list of log-probabilities. Parts of characters are shown like \xe2."""
        return self.bytes_of(token).decode(errors="backslashreplace")


_SHORT = 8
"""Most characters of a stop string that is looked up, instead of compared with the text."""


@dataclass(frozen=True, slots=True)
class _Stops:
    """Stop strings, prepared for the search. A request may have a thousand of them, and to compare each with the text
    behind each token would take 0.7 ms."""

    short: frozenset[str]
    long: tuple[str, ...]
    sizes: Sequence[int]
    """Lengths of the strings in `short`, in characters."""
    beginnings: frozenset[str]
    """Proper beginnings of all stop strings, of at most _SHORT characters."""
    longest: int


@lru_cache(16)
def _stops(strings: tuple[str, ...]) -> _Stops:
    short = frozenset(string for string in strings if len(string) <= _SHORT)
    return _Stops(
        short,
        tuple(string for string in strings if len(string) > _SHORT),
        sorted({len(string) for string in short}),
        frozenset(string[:size] for string in strings for size in range(1, min(len(string), _SHORT + 1))),
        max(map(len, strings), default=0),
    )


class TextStream:
    """The text of one sequence, without special tokens. A stop string ends the text, and is not part of it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stops: Sequence[str] = (),
        hidden: Iterable[int] = (),
        shown: Iterable[int] = (),
    ) -> None:
        """`hidden`: further tokens without text. `shown`: special tokens whose text is shown."""
        self.stopped = False
        """True once a stop string was found. Later tokens have no text."""
        self.num_chars = 0
        """Number of characters of all tokens so far, including those that may still turn out to be a stop string."""
        self._vocabulary = vocabulary
        self._stops = _stops(tuple(stops))
        self._hidden = frozenset(hidden)
        self._shown = frozenset(shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Text that is not released yet. It has the text of special tokens, too, because the engine also looks for stop
        # strings there.
        self._pending = ""
        self._is_shown: list[bool] = []

    def push(self, token: int) -> str:
        """Adds a token. Returns the text that cannot become part of a stop string any more."""
        shown = token not in self._hidden and (token in self._shown or not self._vocabulary.is_special(token))
        data = self._vocabulary.bytes_of(token)
        return self._take(self._utf8.decode(data) if shown else data.decode(errors="replace"), shown=shown)

    def flush(self) -> str:
        """The rest of the text, after the last token."""
        return self._take(self._utf8.decode(b"", final=True), shown=True) + self._release(len(self._pending))

    def _take(self, text: str, *, shown: bool) -> str:
        if self.stopped:
            return ""
        if shown:
            self.num_chars += len(text)
        self._pending += text
        self._is_shown += [shown] * len(text)
        found = self._find(num_new=len(text))
        if found is not None:
            released = self._release(found)
            self.stopped = True
            self.num_chars -= sum(self._is_shown)
            self._pending, self._is_shown = "", []
            return released
        return self._release(len(self._pending) - self._num_held())

    def _find(self, *, num_new: int) -> int | None:
        """The position of the first stop string in the pending text; None when there is none. `num_new`: number of
        characters at the text's end that were not looked at before."""
        pending, stops = self._pending, self._stops
        if not stops.longest:
            return None
        begin = max(0, len(pending) - num_new - _SHORT + 1)
        found = [
            next(
                (
                    start
                    for start in range(begin, len(pending))
                    for size in stops.sizes
                    if pending[start : start + size] in stops.short
                ),
                -1,
            ),
            *(pending.find(stop) for stop in stops.long),
        ]
        return min((index for index in found if index >= 0), default=None)

    def _num_held(self) -> int:
        """Number of characters at the end that may be the beginning of a stop string."""
        for size in range(min(self._stops.longest - 1, len(self._pending)), 0, -1):
            end = self._pending[-size:]
            if end[:_SHORT] in self._stops.beginnings and (
                size <= _SHORT or any(stop.startswith(end) for stop in self._stops.long)
            ):
                return size
        return 0

    def _release(self, size: int) -> str:
        text = "".join(char for char, shown in zip(self._pending[:size], self._is_shown[:size], strict=True) if shown)
        self._pending, self._is_shown = self._pending[size:], self._is_shown[size:]
        return text
