"""Tokens -> text, as they come.

Text is decoded from the bytes of the tokens, so a character that several tokens make is never shown in halves.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from tinsmith.rpc.errors import Unsupported

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def _byte_of_char() -> dict[str, int]:
    """The printable characters by which byte-level BPE writes the 256 bytes (GPT-2, `bytes_to_unicode`): those that
    are printable in Latin-1 stand for themselves, the others for 256, 257, ... in order."""
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
    """What the tokens of a tokenizer stand for."""

    def __init__(self, tokenizer_json: str) -> None:
        """Raises Unsupported when the text of a token depends on its neighbours."""
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
        """Tokens that stand beside the vocabulary of text, by name."""
        self.special = {number for number, token in added.items() if token.special}
        self._bytes: dict[int, bytes] = {}

    def is_special(self, token: int) -> bool:
        return token in self.special

    def bytes_of(self, token: int) -> bytes:
        """Nothing for an id that the tokenizer does not have: models may have more rows than that, and clients send
        what they like."""
        found = self._bytes.get(token)
        if found is None:
            text = self._tokenizer.id_to_token(token) if token >= 0 else None
            if text is None:
                return b""  # not remembered: there are four billion such ids
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
        r"""Of one token, for a list of log-probabilities; bytes that are no whole character are shown as \xe2."""
        return self.bytes_of(token).decode(errors="backslashreplace")


class TextStream:
    """The text of one sequence. Special tokens have none; a stop string ends it and does not belong to it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stops: Sequence[str] = (),
        hidden: Iterable[int] = (),
        shown: Iterable[int] = (),
    ) -> None:
        """`hidden`: further tokens without text; `shown`: special tokens with it."""
        self.stopped = False
        """A stop string was found; what comes after has no text."""
        self.num_chars = 0
        """Characters of the tokens so far, with those that may still turn out to be a stop string."""
        self._vocabulary = vocabulary
        self._stops = stops
        self._hidden = frozenset(hidden)
        self._shown = frozenset(shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Not released yet. The engine looks for stop strings in the text with special tokens, so they lie here too.
        self._pending = ""
        self._is_shown: list[bool] = []

    def push(self, token: int) -> str:
        """The text that is certain now."""
        shown = token not in self._hidden and (token in self._shown or not self._vocabulary.is_special(token))
        data = self._vocabulary.bytes_of(token)
        return self._take(self._utf8.decode(data) if shown else data.decode(errors="replace"), shown=shown)

    def flush(self) -> str:
        """The rest, after the last token."""
        return self._take(self._utf8.decode(b"", final=True), shown=True) + self._release(len(self._pending))

    def _take(self, text: str, *, shown: bool) -> str:
        if self.stopped:
            return ""
        if shown:
            self.num_chars += len(text)
        self._pending += text
        self._is_shown += [shown] * len(text)
        found = [index for stop in self._stops if (index := self._pending.find(stop)) >= 0]
        if found:
            released = self._release(min(found))
            self.stopped = True
            self.num_chars -= sum(self._is_shown)
            self._pending, self._is_shown = "", []
            return released
        return self._release(len(self._pending) - self._num_held())

    def _num_held(self) -> int:
        """Characters at the end with which a stop string may have begun."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        return next(
            (
                size
                for size in range(min(longest, len(self._pending)), 0, -1)
                if any(stop.startswith(self._pending[-size:]) for stop in self._stops)
            ),
            0,
        )

    def _release(self, size: int) -> str:
        text = "".join(char for char, shown in zip(self._pending[:size], self._is_shown[:size], strict=True) if shown)
        self._pending, self._is_shown = self._pending[size:], self._is_shown[size:]
        return text
