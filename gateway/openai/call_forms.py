"""Forms in which model families write calls of tools.

A form is one row of `FORMS`: how a call is read, and how it is written. The chat template tells which form a model
has (sampler_service/tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import regex

from gateway.openai.xml_calls import GLM, QWEN, Syntax
from tinsmith.tool_calls import ToolCallFormat

_NAME = r"(?P<name>[\w.-]{1,64})"
_OBJECT = r"\s*(?P<arguments>\{)"
_MEMBERS = r'\s*\{\s*"name"\s*:\s*(?P<quoted>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:' + _OBJECT
"""Matches the beginning of {"name": ..., "arguments": {...}}, up to the brace of the arguments."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """One form of calls.

    `begin` and `call` contain the marks of `marks`, which are tokens of most models that use them, and placeholders:
    $name and $quoted for the tool's name, plain and as JSON; $arguments; $number for digits; $space for at most one
    space; $xml for the name and the arguments in the syntax of `xml`.
    """

    reads: regex.Pattern[str]
    """Matches the beginning of a call, up to its arguments. The group `arguments` is the opening brace of a JSON
    object, whose text is passed on as it comes. The group `name` or `quoted` is the tool's name, plain or as JSON. The
    group `id` is the id that the model has given to its call; few families have one."""
    call: str
    marks: tuple[str, ...]
    """Marks without which the form cannot be read; where they are special tokens, they have to be decoded to text."""
    opens: str = ""
    """Mark before a call that is read as a whole, up to the first of `closes`, because `reads` does not match it."""
    more: regex.Pattern[str] | None = None
    """Matches the beginning of each further call, if it differs from that of the first call."""
    in_object: bool = False
    """True if the arguments are a member of a JSON object, which is read up to its end."""
    closes: tuple[str, ...] = ()
    """Marks after a call, in this order; each may be missing."""
    begin: str = ""
    """Text before the first call of an answer."""
    between: str | None = ""
    """Text between two calls. None means that an answer has at most one call."""
    end: str = ""
    """Text after the last call of an answer."""
    anywhere: bool = True
    """True if calls may follow text. False means that an answer is either calls or text, and that only a call of one of
    the request's tools counts as a call."""
    xml: Syntax | None = None
    """Syntax of the arguments. None means a JSON object."""
    id_length: int = 24
    """Number of digits of the ids that are made for calls. Templates may take only ids of one length."""
    id_prefix: str = "call_"
    text: str = "$text"
    """A message without calls. $text stands for its text."""
    joint: str = ""
    """Text between two messages of one answer."""
    hidden: tuple[str, ...] = ()
    """Marks that are left out of text."""


def _re(pattern: str) -> regex.Pattern[str]:
    return regex.compile(pattern)


_SECTION_BEGIN, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_MARKS = (_SECTION_BEGIN, _CALL_BEGIN, _CALL_SEP, _CALL_END, _SECTION_END)
_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

FORMS: Mapping[ToolCallFormat, CallForm] = {
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3
    "hermes": CallForm(
        reads=_re(rf"<tool_call>{_MEMBERS}"),
        opens="<tool_call>",
        call='<tool_call>\n{"name": $quoted, "arguments": $arguments}\n</tool_call>',
        marks=("<tool_call>", "</tool_call>"),
        in_object=True,
        closes=("</tool_call>",),
        between="\n",
    ),
    # {"name": ..., "parameters": {...}} as the whole message: Llama 3
    "llama3": CallForm(
        reads=_re(rf"\s*(?:<\|python_tag\|>)?{_MEMBERS}"),
        call='{"name": $quoted, "parameters": $arguments}',
        marks=("<|python_tag|>",),
        more=_re(rf"[\s;]*{_MEMBERS}"),
        in_object=True,
        between=None,
        anywhere=False,
    ),
    # <tool_call><function=NAME><parameter=ARGUMENT>...: Qwen3-Coder and Qwen3.5
    "qwen_xml": CallForm(
        reads=_re("<tool_call>"),
        opens="<tool_call>",
        call="<tool_call>\n$xml\n</tool_call>",
        marks=("<tool_call>", "</tool_call>"),
        closes=("</tool_call>",),
        between="\n",
        xml=QWEN,
    ),
    # <tool_call>NAME<arg_key>ARGUMENT</arg_key><arg_value>...: GLM 4.5 and later
    "glm": CallForm(
        reads=_re("<tool_call>"),
        opens="<tool_call>",
        call="<tool_call>$xml</tool_call>",
        marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        closes=("</tool_call>",),
        between="\n",
        xml=GLM,
    ),
    # [TOOL_CALLS]NAME[ARGS]{...}: Mistral since Magistral and Mistral Small 3.2
    "mistral": CallForm(
        reads=_re(rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\](?P<id>\w{{1,64}}))?\[ARGS\]{_OBJECT}"),
        call="[TOOL_CALLS]$name[ARGS]$arguments",
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        id_length=9,
        id_prefix="",
    ),
    # [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]: Mistral before these
    "mistral_array": CallForm(
        reads=_re(rf"\[TOOL_CALLS\]\s*\[{_MEMBERS}"),
        call='{"name": $quoted, "arguments": $arguments}',
        marks=("[TOOL_CALLS]",),
        more=_re(rf"\s*,{_MEMBERS}"),
        in_object=True,
        closes=("]",),
        begin="[TOOL_CALLS]$space[",
        between=", ",
        end="]",
        id_length=9,
        id_prefix="",
    ),
    "deepseek_v3": CallForm(  # and R1
        reads=_re(rf"(?:{_SECTION_BEGIN}\s*)?{_CALL_BEGIN}\s*function{_CALL_SEP}\s*{_NAME}\s*```(?:json)?{_OBJECT}"),
        call=f"{_CALL_BEGIN}function{_CALL_SEP}$name\n```json\n$arguments\n```{_CALL_END}",
        marks=_DEEPSEEK_MARKS,
        closes=("```", _CALL_END, _SECTION_END),
        begin=_SECTION_BEGIN,
        between="\n",
        end=_SECTION_END,
    ),
    "deepseek_v31": CallForm(
        reads=_re(rf"(?:{_SECTION_BEGIN}\s*)?{_CALL_BEGIN}\s*{_NAME}\s*{_CALL_SEP}{_OBJECT}"),
        call=f"{_CALL_BEGIN}$name{_CALL_SEP}$arguments{_CALL_END}",
        marks=_DEEPSEEK_MARKS,
        closes=(_CALL_END, _SECTION_END),
        begin=_SECTION_BEGIN,
        end=_SECTION_END,
    ),
    # The id, functions.NAME:NUMBER, names the tool; the template shows it with the tool's answer. Kimi K2
    "kimi": CallForm(
        reads=_re(
            r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
            rf"(?P<id>(?:functions\.)?{_NAME}:\d+)\s*<\|tool_call_argument_begin\|>{_OBJECT}"
        ),
        call="<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
        marks=(
            _KIMI_BEGIN,
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            _KIMI_END,
        ),
        closes=("<|tool_call_end|>", _KIMI_END),
        begin=_KIMI_BEGIN,
        end=_KIMI_END,
    ),
    # A message to the tool, whose recipient stands before or after the channel. gpt-oss
    "harmony": CallForm(
        reads=_re(
            rf"(?:<\|start\|>assistant)?(?:\s?to=functions\.{_NAME}\s?<\|channel\|>(?:commentary|analysis)"
            rf"|<\|channel\|>(?:commentary|analysis)\s*to=functions\.{_NAME})"
            rf"\s*(?:<\|constrain\|>)?\w*<\|message\|>{_OBJECT}"
        ),
        call="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments",
        marks=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
        closes=("<|call|>",),
        between=None,
        text="<|channel|>$channel<|message|>$text",
        joint="<|end|><|start|>assistant",
        hidden=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
    ),
}
