"""The base model's tokenizer and its chat template, for clients that speak text."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file

from sampler_service.core.request import Ints
from sampler_service.threads import in_thread
from tinsmith.errors import FailedPrecondition, InvalidRequest, Unsupported
from tinsmith.tool_calls import ToolCallFormat

T = TypeVar("T")
_TOOL_CALL_FORMATS: Sequence[tuple[ToolCallFormat, Sequence[str], Sequence[str]]] = (
    ("qwen_xml", ("<tool_call>", "<function=", "<parameter="), ()),
    ("glm", ("<tool_call>", "<arg_key>", "<arg_value>"), ("<function=",)),
    ("hermes", ("<tool_call>",), ("<function=", "<arg_key>")),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral_array", ("[TOOL_CALLS]",), ()),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"), ()),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), ()),
    ("kimi", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"), ()),
    ("harmony", ("<|channel|>commentary", "<|call|>"), ()),
    ("llama3", ('"parameters": ', "ipython"), ()),
)
"""Formats of tool calls. Each has texts that a chat template of the format contains, and texts that it does not. The
first format that fits a template counts."""

MAX_TEXT_BYTES = 4 * 1024 * 1024
"""Longest text, and longest rendered chat, in bytes. Either takes some seconds of one core."""


class BrokenTokenizer(Unsupported):
    """The model has a tokenizer.json, and it cannot be read."""


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer. Raises Unsupported when the model has none, or one that is not of the tokenizers library or
    needs code of its own. Raises BrokenTokenizer when it cannot be read."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # None would ask on the terminal
    except Exception as error:  # the parser's own, and what transformers makes of fields that are missing
        if "trust_remote_code" in str(error):
            raise Unsupported(
                f"the tokenizer of {path!r} needs Python code of its own, which is not run here"
            ) from error
        if (file := _tokenizer_file(path)) is not None:
            raise BrokenTokenizer(f"{file} is there, but it is broken: {_parse_error(file) or repr(error)}") from error
        if not isinstance(error, OSError | ValueError):
            raise
        raise Unsupported(f"the model {path!r} has no tokenizer ({error})") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes up an empty one where there are no files
        raise Unsupported(f"the model {path!r} has no tokenizer")
    if not tokenizer.is_fast:
        raise Unsupported(f"the tokenizer of {path!r} is not one of the tokenizers library")
    return tokenizer


def _tokenizer_file(path: str) -> str | None:
    """tokenizer.json in the folder, or in the cache of a hub id."""
    return cached_file(path, "tokenizer.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)  # type: ignore[arg-type]


def _parse_error(file: str) -> str:
    """Empty when the file itself is right, and one beside it is not."""
    try:
        Tokenizer.from_file(file)
    except Exception as error:  # the library raises no other class
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, in JSON; empty means absent."""

    messages: str
    tools: str = ""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    template_kwargs: str = ""


class ChatTokenizer:
    """Blocking; see TokenizerSlot."""

    def __init__(self, path: str) -> None:
        """Raises Unsupported."""
        self._path = path
        self._tokenizer = load_tokenizer(path)
        self._backend: Tokenizer = cast(Any, self._tokenizer).backend_tokenizer
        # A tokenizer.json may bring settings to cut prompts or to fill them up, which would make other prompts of them.
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def tool_call_format(self) -> ToolCallFormat | None:
        """Format in which the chat template lets the model write a call of a tool. None when the template shows no
        known format."""
        if not self.has_chat_template:
            return None
        template = self._tokenizer.get_chat_template(tools=[{}])
        for name, has, has_not in _TOOL_CALL_FORMATS:
            if all(text in template for text in has) and not any(text in template for text in has_not):
                return name
        return None

    @cached_property
    def json(self) -> str:
        """The tokenizer.json. Made once, because that keeps the interpreter's lock for tenths of a second."""
        return self._backend.to_str()

    def tokens(self, text: str, *, add_special_tokens: bool, field: str = "text") -> Ints:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{field}: is no text ({error})", field=field) from error
        if size > MAX_TEXT_BYTES:
            raise InvalidRequest(f"{field}: {size} bytes of text are above the limit of {MAX_TEXT_BYTES}", field=field)
        # `encode` would keep the interpreter's lock from the event loop and the compute thread until it is done. It
        # also takes six times as long, because it notes where each token begins.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoded.ids, np.int32)

    def chat_tokens(self, chat: Chat) -> Ints:
        """The rendered chat. Raises FailedPrecondition for a model without a template, and InvalidRequest for messages
        that the template cannot render."""
        if not self.has_chat_template:
            raise FailedPrecondition(f"the model {self._path!r} has no chat template; send text or tokens")
        messages = _objects(chat.messages, "messages")
        tools: Any = _objects(chat.tools or "[]", "tools") or None
        if not messages:
            raise InvalidRequest("messages: is empty; a chat has at least one message", field="messages")
        kwargs = _object(chat.template_kwargs or "{}", "template_kwargs")
        self._check_variables(tools, kwargs)

        def render(messages: list[dict[str, Any]]) -> str:
            try:
                text = self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    add_generation_prompt=chat.add_generation_prompt,
                    continue_final_message=chat.continue_final_message,
                    tokenize=False,
                    **kwargs,
                )
            except Exception as error:  # a template is a program; its error is about these messages
                raise InvalidRequest(
                    f"messages: the model's chat template does not render them: {error or type(error).__name__}",
                    field="messages",
                ) from error
            return cast(str, text)

        try:
            text = render(messages)
        except InvalidRequest:
            if not _dump_arguments(messages):
                raise
            text = render(messages)
        _check_shown(messages, render)
        return self.tokens(text, add_special_tokens=False, field="messages")

    def _check_variables(self, tools: Any, kwargs: dict[str, Any]) -> None:
        """Raises InvalidRequest for parts of the chat that the template would drop without a word."""
        template = self._tokenizer.get_chat_template(tools=tools)
        variables = find_undeclared_variables(_PARSER.parse(template))
        if tools and "tools" not in variables:
            raise InvalidRequest("tools: the model's chat template has no place for them", field="tools")
        for name in kwargs:
            if name in _OWN_FIELDS or name not in variables:
                known = sorted(variables - _OWN_FIELDS)
                raise InvalidRequest(
                    f"template_kwargs: {name!r} is not a variable of the model's chat template; it has {known}",
                    field="template_kwargs",
                )


_MARK = re.compile(r"(?:call|argument|message)_[0-9a-f]{16}")
_ALWAYS_SHOWN = ("user", "assistant")
"""Roles whose messages every chat template shows."""


def _dump_arguments(messages: list[dict[str, Any]]) -> bool:
    """Turns the arguments of tool calls into JSON text, for templates that join texts. Returns False if there are no
    arguments."""
    calls = [call for message in messages if _are_objects(each := message.get("tool_calls")) for call in each or ()]
    functions = [call.get("function") for call in calls]
    found = [one for one in functions if isinstance(one, dict) and isinstance(one.get("arguments"), dict)]
    for function in found:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return bool(found)


def _check_shown(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> None:
    """Refuses messages, calls of tools, and their arguments, that the template would drop without a word. To find them,
    `render` gets random words in place of each text, each tool's name and each call's arguments."""
    if not any(message.get("tool_calls") or message.get("role") not in _ALWAYS_SHOWN for message in messages):
        return
    marked = copy.deepcopy(messages)
    marks: dict[str, tuple[str, str]] = {}
    """For each random word: the path of the text that it replaces, and the error message for a template that does not
    show the word."""
    ids: dict[str, str] = {}
    """The random ids of calls, by the ids that they replace."""
    for index, message in enumerate(marked):
        role, content = message.get("role"), message.get("content")
        if role not in _ALWAYS_SHOWN and content and isinstance(content, str):
            message["content"] = mark = f"message_{secrets.token_hex(8)}"
            why = f"a message of the role {role!r} here; send it as one of the roles that the model knows"
            marks[mark] = f"messages[{index}]", why
        if (answered := str(message.get("tool_call_id"))) in ids:  # a template may look up the answered call
            message["tool_call_id"] = ids[answered]
        calls = message.get("tool_calls") or []
        functions: list[Any] = [call.get("function", call) for call in calls] if _are_objects(calls) else [None]
        field = f"messages[{index}].tool_calls"
        if not _are_objects(functions):
            raise InvalidRequest(f"{field}: is not a list of objects with a function each", field=field)
        for call, function in zip(calls, functions, strict=True):
            mark = f"call_{secrets.token_hex(8)}"
            # Kimi K2's ids name the tool, and its template shows them in place of the name.
            if re.fullmatch(rf"(functions\.)?{re.escape(str(function.get('name')))}:\d+", str(call.get("id"))):
                ids[call["id"]] = f"functions.{mark}:0"
                call["id"] = ids[call["id"]]
            function["name"] = mark
            marks[mark] = field, "calls of tools; put what the model is to know of them into the content"
            if arguments := function.get("arguments"):
                mark = f"argument_{secrets.token_hex(8)}"
                function["arguments"] = _marked(arguments, mark)
                why = "arguments of calls of tools; put what the model is to know of them into the content"
                marks[mark] = field, why
    shown = set(_MARK.findall(render(marked)))
    for mark, (field, why) in marks.items():
        if mark not in shown:
            raise InvalidRequest(f"{field}: the model's chat template does not show {why}", field=field)


def _marked(arguments: Any, mark: str) -> Any:
    """Arguments of a call that contain the mark. They have the shape of the original ones, because a template may show
    an object and drop anything else."""
    if isinstance(arguments, str):
        try:
            return json.dumps(_marked(json.loads(arguments), mark))
        except ValueError:
            return mark
    return {mark: mark} if isinstance(arguments, dict) else [mark] if isinstance(arguments, list) else mark


class TokenizerSlot:
    """The tokenizer beside the event loop: loaded at its first use, and busy with one text at a time, so that texts do
    not take the compute thread's cores."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tokenizer: ChatTokenizer | None = None
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[ChatTokenizer], T]) -> T:
        """Runs `work` on the tokenizer, on a thread. Raises Unsupported when the model has no tokenizer, and the errors
        of `work`."""
        async with self._lock:
            if self._tokenizer is None:
                self._tokenizer = await in_thread(lambda: ChatTokenizer(self._path))
            tokenizer = self._tokenizer
            return await in_thread(lambda: work(tokenizer))


class _Generation(Extension):
    """The block by which templates of transformers mark the assistant's part; it prints what is in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# This environment only parses, to find the names of variables.
_PARSER = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])  # noqa: S701

_OWN_FIELDS = {
    *("messages", "raise_exception", "strftime_now"),
    *(set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"}),
}
"""Names that template_kwargs may not have: fields of the request, functions, and arguments of transformers' own."""


def _load(text: str, field: str) -> Any:
    if len(text) > MAX_TEXT_BYTES:
        raise InvalidRequest(
            f"{field}: {len(text)} characters of JSON are above the limit of {MAX_TEXT_BYTES}", field=field
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field}: is not JSON ({error})", field=field) from error


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _objects(text: str, field: str) -> list[dict[str, Any]]:
    value = _load(text, field)
    if not _are_objects(value):
        raise InvalidRequest(f"{field}: is not a JSON list of objects", field=field)
    return value


def _object(text: str, field: str) -> dict[str, Any]:
    value = _load(text, field)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field}: is not a JSON object", field=field)
    return value
