"""Grammars: which tokens may come next in a sequence that has to be JSON, or a call of a tool.

A grammar is compiled beside the event loop and the compute thread, once for all requests that send the same one, after
a process of its own (`grammar_check.py`) has shown what that costs.

Shapes: V vocabulary.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from asyncio.subprocess import PIPE
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from sampler_service.core.request import Grammar
from sampler_service.grammar_check import CPU_S, MEMORY_BYTES, limits, source_of
from sampler_service.threads import in_thread
from sampler_service.tokenizer import load_tokenizer
from tinsmith.errors import InvalidRequest, OutOfCapacity, ServiceError, Unsupported

Bools = npt.NDArray[np.bool_]

logger = logging.getLogger(__name__)

MAX_TEXT_BYTES = 256 * 1024
"""Longest text of a grammar, in bytes. A list of 10,000 names is as long."""
MAX_KEPT = 32
"""Most compiled grammars that are kept; the least recently used one goes first. Each takes up to some 40 MB."""
MAX_KEPT_BYTES = 2 * 1024 * 1024
"""Longest texts of the kept grammars together."""
CHECKS_AT_ONCE = 2
"""Most grammars that are checked and compiled at the same time."""
CHECK_S = 20.0
"""Longest wait for a check, on a machine that is busy with other work, in seconds."""
_EXCERPT = re.compile(r"\n\s*\d+ \| ")
"""Matches where the library begins to repeat lines of the grammar, at the end of a message."""


@dataclass(slots=True, eq=False)
class Compiled:
    """A grammar, compiled for one tokenizer. The matchers of all sequences share the states that they find."""

    grammar: Grammar
    start: LLMatcher
    eos_token_ids: frozenset[int]
    """End-of-sequence tokens; any one of them ends a complete text."""
    broken: bool = False
    """True when the library has failed in this grammar, which makes all its matchers useless."""

    def matcher(self) -> Matcher:
        """The matcher of a new sequence."""
        return Matcher(self)


class Matcher:
    """Position of one sequence in its grammar. Belongs to the thread that draws."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._matcher = compiled.start.deep_copy()
        self.num_taken = 0
        """Tokens of the sequence before this position."""

    def allowed(self, vocab_size: int) -> Bools:
        """bool [V]: the tokens that may come next. Raises ServiceError when the grammar fails."""
        bits = np.zeros(-(-vocab_size // 32), np.int32)
        self._run(lambda: self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes))
        if not bits.any():
            raise ServiceError("the request's grammar allows no token where its text stands")
        return np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)

    def take(self, tokens: Sequence[int]) -> None:
        """Moves on by these tokens of the sequence. Raises ServiceError when the grammar fails."""
        if tokens:
            self._run(lambda: self._matcher.consume_tokens(list(tokens)))
            self.num_taken += len(tokens)

    def _run(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:  # a panic of the library is a BaseException
            if type(error).__name__ != "PanicException" and not isinstance(error, Exception):
                raise
            self._compiled.broken = True
            raise ServiceError(f"the grammar library failed in this request: {error}") from error
        if self._matcher.is_error():
            raise InvalidRequest(f"grammar: {_shortened(self._matcher.get_error())}", field="grammar")


class Compiler:
    """Compiles for one model; its tokenizer is loaded at the first grammar. Blocking."""

    def __init__(self, path: str, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Raises Unsupported when the model has no tokenizer, or no end-of-sequence token."""
        try:
            tokenizer = load_tokenizer(path)
        except Unsupported as error:
            raise Unsupported(f"grammar: needs a tokenizer, and {error}", field="grammar") from error
        own = cast(int | None, tokenizer.eos_token_id)
        self._eos_token_ids = frozenset(eos_token_ids or ([] if own is None else [own]))
        if not self._eos_token_ids:
            raise Unsupported(f"grammar: the model {path!r} has no end-of-sequence token", field="grammar")
        backend = cast(Any, tokenizer).backend_tokenizer
        added = backend.get_added_tokens_decoder().values()
        self.special = sorted({token.content for token in added})
        """Names that a grammar in Lark's form may write as <name>."""
        try:
            self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=sorted(self._eos_token_ids))
        except ValueError as error:
            raise Unsupported(
                f"grammar: does not work with this model's tokenizer: {error}", field="grammar"
            ) from error

    def compile(self, grammar: Grammar) -> Compiled:
        """Compiles a grammar. Raises InvalidRequest for one with a mistake."""
        try:
            start = LLMatcher(self._tokenizer, source_of(grammar.form, grammar.text), log_level=0, limits=limits())
        except ValueError as error:
            raise refused(grammar, str(error)) from error
        compiled = Compiled(grammar, start, self._eos_token_ids)
        if not start.is_error():  # computes the first token, whose cost counts, too
            start.compute_bitmask()
        if start.is_error():
            raise refused(grammar, start.get_error())
        return compiled


def refused(grammar: Grammar, reason: str) -> InvalidRequest:
    """The error for a grammar that cannot be used."""
    field = f"grammar.{grammar.form}"
    return InvalidRequest(f"{field}: {_shortened(reason)}", field=field)


def _shortened(reason: str) -> str:
    reason = _EXCERPT.split(reason)[0]
    lines = [line.rstrip() for line in reason.splitlines() if line.strip()]
    text = " ".join(line for line in lines[:4])
    return text if len(text) <= 400 else text[:400] + "..."


def keep(kept: OrderedDict[Grammar, Compiled], compiled: Compiled) -> None:
    """Adds a grammar to the kept ones, and drops the least recently used ones beyond the limits."""
    kept[compiled.grammar] = compiled
    kept.move_to_end(compiled.grammar)
    while len(kept) > MAX_KEPT or sum(one.num_bytes for one in kept) > MAX_KEPT_BYTES:
        kept.popitem(last=False)


class Grammars:
    """Compiled grammars of one model, the most recently used ones. Belongs to the event loop."""

    def __init__(self, path: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._loading: asyncio.Task[Compiler] | None = None
        self._compiling: dict[Grammar, asyncio.Task[Compiled]] = {}
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._turns = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def compiled(self, grammar: Grammar) -> Compiled:
        """The compiled grammar, from the kept ones or new.

        Raises InvalidRequest for a grammar with a mistake, or one that takes too much to compile; Unsupported for a
        model without a fitting tokenizer; and OutOfCapacity when the machine is too busy.
        """
        kept = self._kept.get(grammar)
        if kept is not None and not kept.broken:
            self._kept.move_to_end(grammar)
            return kept
        if (size := grammar.num_bytes) > MAX_TEXT_BYTES:
            raise refused(grammar, f"{size} bytes are above the limit of {MAX_TEXT_BYTES}")
        if grammar not in self._compiling:
            task = self._compiling[grammar] = asyncio.create_task(self._compile(grammar))
            task.add_done_callback(lambda _: self._compiling.pop(grammar, None))
        return await asyncio.shield(self._compiling[grammar])

    async def _compile(self, grammar: Grammar) -> Compiled:
        if self._loading is None:
            self._loading = asyncio.create_task(in_thread(self._load))
        try:
            compiler = await asyncio.shield(self._loading)
        except ServiceError:
            self._loading = None
            raise
        async with self._turns:
            if reason := await _checked(grammar, compiler.special):
                raise refused(grammar, reason)
            compiled = await in_thread(lambda: compiler.compile(grammar))
        keep(self._kept, compiled)
        return compiled

    def _load(self) -> Compiler:
        return Compiler(self._path, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)


async def _checked(grammar: Grammar, special: Sequence[str]) -> str:
    """The reason for which a grammar cannot be used; empty if it can. Raises OutOfCapacity when the machine is too busy
    for the check."""
    asked = json.dumps({"form": grammar.form, "text": grammar.text, "special": special})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sampler_service.grammar_check", stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(CHECK_S):
            answer, noise = await process.communicate(asked.encode())
    except TimeoutError:
        raise OutOfCapacity(f"a grammar could not be checked in {CHECK_S:g} s; try again") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return json.loads(answer)["error"]
    logger.info(
        "a grammar was refused: its check ended with %d: %s",
        process.returncode,
        noise[-300:].decode("utf-8", "replace"),
    )
    return f"takes more than {CPU_S} s or {MEMORY_BYTES >> 20} MB to compile; make it smaller"
