"""A custom loss's graph: parses the SDK's JSON into a list of allowed calls, and executes it node by node.

Nothing in the JSON is evaluated or imported. A target is a key of the tables in custom_loss_ops.py. An argument is a
number, one of a few words, the result of an earlier node, or a list of these.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith.errors import InvalidRequest
from tinsmith.faults import is_out_of_memory
from trainer_service.objectives.custom_loss_ops import (
    COMBINATIONS,
    COMPARISONS,
    DTYPES,
    FORBIDDEN_KEYWORDS,
    FUNCTIONS,
    MASK_AS_INDEX,
    METHODS,
    WORDS,
    named,
)

FORMAT = 1
MAX_JSON_BYTES = 256 * 1024
MAX_NODES = 1000
MAX_DEPTH = 6
"""Nesting of lists and objects in an argument. An index made of slices of nodes needs three."""
_MAX_NAME = 200
_MAX_MESSAGE = 300
_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_METRIC_KEY = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class _Ref:
    """The result of an earlier node."""

    name: str


class _Device:
    """Stands for the device of the execution: the CPU, or the meta device, which computes shapes only."""


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    target: str
    call: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Graph:
    loss_name: str
    inputs: Sequence[str]
    """Names of the placeholders, in order."""
    nodes: Sequence[Node]
    """Calls, in the order of their execution."""
    loss: _Ref
    metrics: Mapping[str, _Ref]

    def run(
        self, inputs: Sequence[Tensor], *, before: Callable[[Node], None], after: Callable[[Any], None]
    ) -> tuple[Any, Mapping[str, Any]]:
        """Runs the nodes. Returns the loss and the metrics, unchecked. `before` is called with each node, and `after`
        with its result; both may raise.

        Raises InvalidRequest for any error in a node, except lack of memory. The message names the node and its target.
        """
        device = inputs[0].device
        values: dict[str, Any] = dict(zip(self.inputs, inputs, strict=True))
        for node in self.nodes:
            before(node)
            try:
                result = node.call(
                    *(_resolved(arg, values, device) for arg in node.args),
                    **{key: _resolved(arg, values, device) for key, arg in node.kwargs.items()},
                )
                after(result)
            except InvalidRequest as error:
                raise self.refused(node, error.message) from None
            except Exception as error:  # torch raises errors of many types; all are the graph's fault but one
                if is_out_of_memory(error):  # the engine tries again with fewer datums at once
                    raise
                raise self.refused(node, str(error)) from error
            values[node.name] = result
        return values[self.loss.name], {key: values[ref.name] for key, ref in self.metrics.items()}

    def refused(self, node: Node, problem: str) -> InvalidRequest:
        first_line = problem.strip().split("\n")[0][:_MAX_MESSAGE]
        return InvalidRequest(
            f"custom loss {self.loss_name!r}: node {node.name!r} ({node.target}): {first_line}",
            field="custom_loss.graph",
        )


def _resolved(arg: Any, values: Mapping[str, Any], device: torch.device) -> Any:
    match arg:
        case _Ref(name):
            return values[name]
        case _Device():
            return device
        case list() | tuple():
            return type(arg)(_resolved(item, values, device) for item in arg)
        case slice():
            return slice(*(_resolved(item, values, device) for item in (arg.start, arg.stop, arg.step)))
        case _:
            return arg


def parse(loss_name: str, inputs: Sequence[str], text: str) -> Graph:
    """Parses a graph from JSON. Raises InvalidRequest, which names the node and its target."""
    return _Parser(loss_name, inputs).graph(text)


class _Parser:
    def __init__(self, loss_name: str, inputs: Sequence[str]) -> None:
        self._loss_name = loss_name
        self._inputs = inputs
        self._known: set[str] = set()
        """Names of earlier nodes, which a reference may use."""
        self._masks: set[str] = set()
        """Names of nodes that are boolean masks for sure: comparisons, and combinations of masks only."""
        self._where = "its graph"

    def _refused(self, problem: str) -> InvalidRequest:
        return InvalidRequest(f"custom loss {self._loss_name!r}: {self._where}: {problem}", field="custom_loss.graph")

    def graph(self, text: str) -> Graph:
        if len(text) > MAX_JSON_BYTES:
            raise self._refused(f"has {len(text)} characters of JSON, this server takes {MAX_JSON_BYTES}")
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._refused(f"is not JSON: {str(error)[:_MAX_MESSAGE]}") from None
        self._check_keys(parsed, required=("nodes",), optional=("format",))
        if parsed.get("format", FORMAT) != FORMAT:
            raise self._refused(f"is of format {_shown(parsed['format'])}, this server reads {FORMAT}")
        entries = parsed["nodes"]
        if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_NODES:
            number = len(entries) if isinstance(entries, list) else _shown(entries)
            raise self._refused(f"nodes: {number} are outside 1..{MAX_NODES}")
        nodes: list[Node] = []
        placeholders: list[str] = []
        for position, entry in enumerate(entries):
            self._where = f"node {position}"
            op, name, target = self._head(entry)
            match op:
                case "placeholder":
                    if len(placeholders) == len(self._inputs) or target != self._inputs[len(placeholders)]:
                        raise self._refused(f"is not the next input of {', '.join(self._inputs)}")
                    if entry.get("args") or entry.get("kwargs") or nodes:
                        raise self._refused("a placeholder has no arguments and stands before all calls")
                    placeholders.append(name)
                case "call_function" | "call_method":
                    nodes.append(self._call(op, name, target, entry))
                case "output":
                    if position != len(entries) - 1:
                        raise self._refused("the output must be the last node")
                    if len(placeholders) != len(self._inputs):
                        raise self._refused(f"{len(placeholders)} placeholders for {len(self._inputs)} inputs")
                    loss, metrics = self._output(entry.get("args"))
                    return Graph(self._loss_name, placeholders, nodes, loss, metrics)
                case _:
                    raise self._refused(f"op {op[:80]!r} is not placeholder, call_function, call_method or output")
            self._known.add(name)
        raise self._refused("the last node must be the output")

    def _check_keys(self, value: Any, *, required: Sequence[str], optional: Sequence[str]) -> None:
        if not isinstance(value, dict):
            raise self._refused(f"{_shown(value)} is not an object")
        missing = [key for key in required if key not in value]
        unknown = [key for key in value if key not in (*required, *optional)]
        if missing or unknown:
            raise self._refused(f"{missing[0]} is missing" if missing else f"{_shown(unknown[0])} is not known")

    def _head(self, entry: Any) -> tuple[str, str, str]:
        self._check_keys(entry, required=("op", "name", "target"), optional=("args", "kwargs"))
        op, name, target = (entry[key] for key in ("op", "name", "target"))
        if not isinstance(name, str) or len(name) > _MAX_NAME or not _NODE_NAME.fullmatch(name):
            raise self._refused(f"name {_shown(name)} is not a name")
        if name in self._known:
            raise self._refused(f"name {name!r} was used before")
        if not isinstance(op, str) or not isinstance(target, str) or len(target) > _MAX_NAME:
            raise self._refused(f"op {_shown(op)} and target {_shown(target)} must be short texts")
        self._where = f"node {name!r} ({target})"
        return op, name, target

    def _call(self, op: str, name: str, target: str, entry: Mapping[str, Any]) -> Node:
        call = (FUNCTIONS if op == "call_function" else METHODS).get(target)
        if call is None:
            raise self._refused("is not on this server's list of operations, which docs/algorithms.md shows")
        args, kwargs = entry.get("args", []), entry.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise self._refused("args must be a list and kwargs an object")
        decoded_args = [self._decoded(arg, MAX_DEPTH) for arg in args]
        decoded_kwargs = {key: self._decoded(value, MAX_DEPTH) for key, value in kwargs.items()}
        for key, value in {**named(call, decoded_args), **decoded_kwargs}.items():
            if not _NODE_NAME.fullmatch(key) or (key in FORBIDDEN_KEYWORDS and value not in (None, False)):
                raise self._refused(f"argument {_shown(key)} is not allowed")
        if op == "call_method" and not (decoded_args and isinstance(decoded_args[0], _Ref)):
            raise self._refused("a method needs a node to be called on")
        self._check_masks(name, target, decoded_args)
        return Node(name, target, call, decoded_args, decoded_kwargs)

    def _check_masks(self, name: str, target: str, args: Sequence[Any]) -> None:
        """Refuses a mask as an index where the graph itself shows it. Other masks are found when the graph runs."""

        def is_mask(arg: Any) -> bool:
            return isinstance(arg, _Ref) and arg.name in self._masks

        if target in COMPARISONS or (target in COMBINATIONS and all(is_mask(arg) for arg in args)):
            self._masks.add(name)
        if target == "operator.getitem" and len(args) == 2:
            index = args[1]
            if any(is_mask(part) for part in (index if isinstance(index, (tuple, list)) else (index,))):
                raise self._refused(MASK_AS_INDEX)

    def _decoded(self, value: Any, depth: int) -> Any:
        """An argument, with _Ref for nodes and _Device for devices."""
        if depth == 0:
            raise self._refused(f"an argument is nested more than {MAX_DEPTH} deep")
        match value:
            case None | bool() | float():
                return value
            case int():
                return self._integer(value)
            case str():
                return self._word(value)
            case list():
                return [self._decoded(item, depth - 1) for item in value]
            case dict() if len(value) == 1:
                ((tag, content),) = value.items()
                return self._tagged(tag, content, depth)
            case _:
                raise self._refused(f"argument {_shown(value)} is not of a known form")

    def _tagged(self, tag: str, content: Any, depth: int) -> Any:
        match tag, content:
            case "ref", _:
                return self._ref(content)
            case "tuple", list():
                return tuple(self._decoded(item, depth - 1) for item in content)
            case "slice", [start, stop, step]:
                return slice(*(self._decoded(item, depth - 1) for item in (start, stop, step)))
            case "ellipsis", True:
                return ...
            case "float", "inf" | "-inf" | "nan":
                return float(content)
            case "dtype", str() if content in DTYPES:
                return DTYPES[content]
            case "device", "cpu":
                return _Device()
            case "memory_format", "contiguous_format" | "preserve_format":
                return getattr(torch, content)
            case _:
                raise self._refused(f"argument {_shown({tag: content})} is not supported")

    def _integer(self, value: int) -> int:
        if value not in _INT64:
            raise self._refused("an integer argument does not fit into 64 bits")
        return value

    def _word(self, value: str) -> str | _Device:
        if value == "cpu":
            return _Device()
        if value not in WORDS:
            raise self._refused(f"text argument {_shown(value)} is not one of {', '.join(sorted(WORDS))}")
        return value

    def _ref(self, name: Any) -> _Ref:
        if not isinstance(name, str) or name not in self._known:
            raise self._refused(f"refers to {_shown(name)}, which is no earlier node")
        return _Ref(name)

    def _output(self, args: Any) -> tuple[_Ref, Mapping[str, _Ref]]:
        """The loss and the metrics: the output node has one argument, the pair (loss, metrics)."""
        pair = args[0] if isinstance(args, list) and len(args) == 1 else None
        if isinstance(pair, dict) and len(pair) == 1:
            pair = pair.get("tuple")
        match pair:
            case [{"ref": loss}, {"dict": dict(metrics)}]:
                pass
            case _:
                raise self._refused("must be (loss, metrics): a node, and nodes by name")
        for key, value in metrics.items():
            if not _METRIC_KEY.fullmatch(key):
                raise self._refused(f"metric {_shown(key)} must be named custom/NAME:sum or custom/NAME:mean")
            if not isinstance(value, dict) or list(value) != ["ref"]:
                raise self._refused(f"metric {key!r} must be a node, not {_shown(value)}")
        return self._ref(loss), {key: self._ref(value["ref"]) for key, value in metrics.items()}


def check_result(value: Any) -> int:
    """Size of a node's result, in bytes; views count in full. Raises InvalidRequest for a type that is not allowed."""
    if isinstance(value, Tensor):
        return math.prod(value.shape) * value.element_size()
    if isinstance(value, tuple):  # a shape, or the two results of a call such as torch.max
        return sum(check_result(item) for item in value)
    if isinstance(value, int):
        if value not in _INT64:
            raise InvalidRequest("the integer result does not fit into 64 bits")
        return 0
    if isinstance(value, (float, torch.dtype, torch.device)):
        return 0
    raise InvalidRequest(f"its result, a {type(value).__name__}, is not a tensor or a number")


def _shown(value: Any) -> str:
    """A short text for any JSON value, for error messages."""
    text = value if isinstance(value, str) else type(value).__name__
    if isinstance(value, (int, float, bool)) or value is None:
        text = str(value) if not isinstance(value, int) or value in _INT64 else "a large number"
    elif isinstance(value, dict) and value:
        text = f"{{{next(iter(value))}: ...}}"
    return repr(text[:80]) if isinstance(value, str) else text[:80]
