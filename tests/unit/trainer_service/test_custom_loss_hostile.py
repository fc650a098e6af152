"""Whatever a client sends as a custom loss, it is run or refused with InvalidRequest: nothing else, and soon."""

import json
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.trainer_service.custom_losses import custom_loss, graph, node, ref
from tinsmith.errors import InvalidRequest
from trainer_service.objectives import custom_loss as module
from trainer_service.objectives.custom_loss import CustomLoss
from trainer_service.objectives.custom_loss_graph import MAX_JSON_BYTES, MAX_NODES, check_result
from trainer_service.objectives.custom_loss_ops import FUNCTIONS, METHODS
from trainer_service.requests import loss_of

LOGPROBS = ref("logprobs")

NUM_EXAMPLES = 60


def call(target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """A graph of one function call on the way to a good loss."""
    calls = [node("call_function", "a", target, *args, **kwargs), node("call_method", "b", "sum", LOGPROBS)]
    return graph(*calls, loss="b")


def method(target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    calls = [node("call_method", "a", target, LOGPROBS, *args, **kwargs), node("call_method", "b", "sum", LOGPROBS)]
    return graph(*calls, loss="b")


def run(graph: Any, *, size: int = 8) -> float:
    loss = loss_of(custom_loss(graph, {"logprobs": 1}))
    loss.check_shapes([((size,), {})])
    return loss.evaluate([torch.full((size,), -1.0, requires_grad=True)], [{}], {}).value


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


FORMS = {
    "no JSON": ("{", r"its graph: is not JSON"),
    "deep JSON": ("[" * 200_000, r"its graph: is not JSON"),
    "long JSON": (" " * (MAX_JSON_BYTES + 1), rf"has {MAX_JSON_BYTES + 1} characters of JSON"),
    "a list": ("[]", "list is not an object"),
    "an unknown field": ({"format": 1, "nodes": [], "code": "1"}, "'code' is not known"),
    "another format": ({"format": 2, "nodes": []}, "of format 2, this server reads 1"),
    "no nodes": ({"format": 1, "nodes": []}, rf"nodes: 0 are outside 1..{MAX_NODES}"),
    "many nodes": ({"format": 1, "nodes": [0] * (MAX_NODES + 1)}, rf"nodes: {MAX_NODES + 1} are outside"),
    "a million nodes": ({"format": 1, "nodes": [0] * 10**6}, "characters of JSON"),
    "no output": (
        {"format": 1, "nodes": [node("placeholder", "logprobs", "logprobs")]},
        "last node must be the output",
    ),
    "another input": (
        {"format": 1, "nodes": [node("placeholder", "x", "x")]},
        r"node 'x' \(x\): is not the next input",
    ),
    "no placeholder": ({"format": 1, "nodes": [node("output", "o", "output")]}, "0 placeholders for 1 inputs"),
    "a default": (
        {"format": 1, "nodes": [node("placeholder", "logprobs", "logprobs", 1)]},
        "a placeholder has no arguments",
    ),
    "a module": (graph(node("call_module", "a", "net"), loss="a"), "op 'call_module' is not"),
    "a captured tensor": (graph(node("get_attr", "a", "_tensor"), loss="a"), "op 'get_attr' is not"),
    "a name twice": (graph(node("call_method", "logprobs", "sum", LOGPROBS), loss="logprobs"), "was used before"),
    "a strange name": (graph(node("call_method", "a b", "sum", LOGPROBS), loss="a b"), "is not a name"),
    "the output in between": (
        {"nodes": [*graph(loss="logprobs")["nodes"], node("call_method", "a", "sum", LOGPROBS)]},
        "the output must be the last node",
    ),
    "itself": (
        graph(node("call_function", "a", "torch.exp", ref("a")), loss="a"),
        "refers to 'a', which is no earlier",
    ),
    "a cycle": (
        graph(
            node("call_function", "a", "torch.exp", ref("b")),
            node("call_function", "b", "torch.exp", ref("a")),
            loss="b",
        ),
        "node 'a' .*refers to 'b', which is no earlier node",
    ),
    "an unknown loss": (graph(loss="nowhere"), "refers to 'nowhere'"),
    "a number as loss": (
        {"nodes": [*graph(loss="x")["nodes"][:1], node("output", "o", "output", {"tuple": [1, {"dict": {}}]})]},
        r"must be \(loss, metrics\)",
    ),
    "a metric name": (graph(loss="logprobs", metrics={"loss:sum": LOGPROBS}), "metric 'loss:sum' must be named custom"),
    "a metric value": (graph(loss="logprobs", metrics={"custom/x:sum": 1}), "metric 'custom/x:sum' must be a node"),
    "a method of nothing": (graph(node("call_method", "a", "sum", 3), loss="a"), "a method needs a node"),
}

CALLS = {
    "__class__": (call("getattr", LOGPROBS, "__class__"), "text argument '__class__' is not one of"),
    "_C": (call("getattr", LOGPROBS, "_C"), "text argument '_C'"),
    "data": (call("getattr", LOGPROBS, "data"), "text argument 'data'"),
    "grad_fn": (call("getattr", LOGPROBS, "grad_fn"), "text argument 'grad_fn'"),
    "an attribute of another thing": (call("getattr", LOGPROBS, "values"), "reads shape, ndim"),
    "a default attribute": (call("getattr", LOGPROBS, "shape", 1), r"node 'a' \(getattr\)"),
    "eval": (call("eval", "1"), r"node 'a' \(eval\): is not on this server's list"),
    "import": (call("builtins.__import__", "os"), "is not on this server's list"),
    "system": (call("os.system", "true"), "is not on this server's list"),
    "load": (call("torch.load", "x"), "is not on this server's list"),
    "compile": (call("torch.compile", LOGPROBS), "is not on this server's list"),
    "an inner name": (call("torch._C._nn.__class__", LOGPROBS), "is not on this server's list"),
    "attrgetter": (call("operator.attrgetter", "shape"), "is not on this server's list"),
    "random": (call("torch.rand_like", LOGPROBS), "is not on this server's list"),
    "dropout": (call("torch.nn.functional.dropout", LOGPROBS), "is not on this server's list"),
    "a string of functions": (call("torch.exp().exp", LOGPROBS), "is not on this server's list"),
    "einsum": (call("torch.einsum", "none", LOGPROBS), "is not on this server's list"),
    "in place": (method("add_", 1), r"node 'a' \(add_\): is not on this server's list"),
    "in place by operator": (call("operator.iadd", LOGPROBS, 1), "is not on this server's list"),
    "in place by argument": (call("torch.nn.functional.relu", LOGPROBS, inplace=True), "'inplace' is not allowed"),
    "in place by position": (call("torch.nn.functional.elu", LOGPROBS, 1.0, True), "'inplace' is not allowed"),
    "out by position": (call("torch.norm", LOGPROBS, 2, 0, False, LOGPROBS), "'out' is not allowed"),
    "out": (call("torch.exp", LOGPROBS, out=LOGPROBS), "argument 'out' is not allowed"),
    "a generator": (call("torch.zeros", 3, generator=LOGPROBS), "argument 'generator' is not allowed"),
    "host values": (method("item"), "is not on this server's list"),
    "a hook": (method("register_hook", LOGPROBS), "is not on this server's list"),
    "backward": (method("backward"), "is not on this server's list"),
    "set_": (method("set_", LOGPROBS), "is not on this server's list"),
    "as_strided": (method("as_strided", [10**9], [1]), "is not on this server's list"),
    "repeat": (method("repeat", 2**40), r"node 'a' \(repeat\): a step works on 8796093022208 elements"),
    "expand": (call("torch.broadcast_to", LOGPROBS, [10**9, 8]), "its result needs 32000000000 bytes"),
    "arange": (call("torch.arange", 10**15), "a step works on 1000000000000000 elements"),
    "a long sort": (
        graph(
            node("call_method", "a", "new_zeros", LOGPROBS, 2**22),
            node("call_function", "b", "torch.sort", ref("a")),
            loss="b",
        ),
        r"node 'b' \(torch.sort\): a step works on 67108864 elements",
    ),
    "arange of tiny steps": (call("torch.arange", 0, 1, 1e-300), r"node 'a' \(torch.arange\)"),
    "zeros": (call("torch.zeros", [2**62]), r"node 'a' \(torch.zeros\)"),
    "zeros on the CPU": (call("torch.zeros", [2**40], device={"device": "cpu"}), "a step works on"),
    "zeros on the CPU by name": (method("new_zeros", [2**40], device="cpu"), "a step works on"),
    "an overflow of sizes": (method("repeat", 2**62, 2**62), r"node 'a' \(repeat\)"),
    "a negative size": (call("torch.zeros", -1), r"node 'a' \(torch.zeros\)"),
    "a large matrix product": (
        graph(
            node("call_function", "a", "torch.zeros", 4000, 4000),
            node("call_function", "b", "operator.matmul", ref("a"), ref("a")),
            loss="b",
        ),
        r"node 'b' \(operator.matmul\): .*multiply-adds",
    ),
    "another device": (method("to", {"device": "cuda"}), r"\{device: ...\} is not supported"),
    "another device by name": (method("to", "cuda:0"), "text argument 'cuda:0'"),
    "another type": (method("to", {"dtype": "complex64"}), r"\{dtype: ...\} is not supported"),
    "division of the least integer": (
        call("torch.div", LOGPROBS, 1, rounding_mode="trunc"),
        "text argument 'trunc' is not one of",
    ),
    "a boolean mask": (
        graph(
            node("call_function", "a", "operator.lt", LOGPROBS, 0),
            node("call_function", "b", "operator.getitem", LOGPROBS, ref("a")),
            loss="b",
        ),
        r"node 'b' \(operator.getitem\): a boolean mask",
    ),
    "truth": (call("torch.where", LOGPROBS), r"node 'a' \(torch.where\)"),
    "sizes that values make": (
        call("torch.repeat_interleave", LOGPROBS, LOGPROBS, output_size=4),
        "argument 'output_size' is not allowed",
    ),
    "a huge power": (call("operator.pow", 10, 10**9), "integer exponent 1000000000"),
    "a power too large": (call("operator.pow", 10, 60), "does not fit into 64 bits"),
    "a complex number": (call("operator.pow", -8.0, 0.5), "a complex, is not a tensor or a number"),
    "a long list": (call("operator.mul", {"tuple": [1]}, 10**12), "takes tensors and numbers, not tuple"),
    "a long text": (call("operator.mul", "sum", 10**12), "takes tensors and numbers, not str"),
    "a large integer": (call("operator.add", LOGPROBS, 10**30), "does not fit into 64 bits"),
    "an integer of many digits": (call("operator.add", LOGPROBS, 10**4000), "does not fit into 64 bits"),
    "division by zero": (call("operator.truediv", 1, 0), "division by zero"),
    "a deep argument": (call("torch.stack", nested(50)), "nested more than 6 deep"),
    "a strange tag": (call("torch.exp", {"code": "1"}), r"\{code: ...\} is not supported"),
    "two tags": (call("torch.exp", {"ref": "logprobs", "tuple": []}), "is not of a known form"),
    "a reference to a list": (call("torch.exp", {"ref": ["logprobs"]}), "refers to list"),
    "a wrong argument": (call("torch.exp", LOGPROBS, dim=1), r"node 'a' \(torch.exp\)"),
    "too few arguments": (call("torch.exp"), r"node 'a' \(torch.exp\)"),
}


@pytest.mark.parametrize("case", [*FORMS, *CALLS])
def test_a_hostile_graph_is_refused_by_name(case: str) -> None:
    sent, message = {**FORMS, **CALLS}[case]
    with pytest.raises(InvalidRequest, match=rf"custom loss 'mine': .*{message}"):
        run(sent)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (node("call_method", "a", "exp", LOGPROBS), r"must be a scalar tensor of floats, not one of shape \[8\]"),
        (node("call_method", "a", "numel", LOGPROBS), "must be a scalar tensor of floats, not int"),
        (node("call_method", "a", "argmax", LOGPROBS), "not one of shape .* torch.int64"),
        (node("call_function", "a", "torch.zeros", {"tuple": []}), "does not depend on the logprobs"),
    ],
)
def test_a_loss_that_is_no_loss_is_refused(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run(graph(loss, loss="a"))


def test_a_loss_without_a_derivative_is_refused() -> None:
    step = node("call_function", "a", "torch.heaviside", LOGPROBS, LOGPROBS)
    with pytest.raises(InvalidRequest, match=r"custom loss 'mine': its gradient cannot be computed: .*heaviside"):
        run(graph(step, node("call_method", "b", "sum", ref("a")), loss="b"))


def test_a_metric_must_be_a_scalar() -> None:
    total = node("call_method", "a", "sum", LOGPROBS)
    with pytest.raises(InvalidRequest, match=r"metric 'custom/x:mean' must be a scalar, not one of shape \[8\]"):
        run(graph(total, loss="a", metrics={"custom/x:mean": LOGPROBS}))


def wide(target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Two tensors of 700 * 700 elements, broadcast together inside an operation to 700^3."""
    return graph(
        node("call_method", "s", "sum", LOGPROBS),
        node("call_method", "z", "new_zeros", LOGPROBS, 700, 1, 700),
        node("call_function", "a", "operator.add", ref("z"), ref("s")),
        node("call_method", "b", "new_zeros", LOGPROBS, 1, 700, 1),
        node("call_function", "c", target, ref("a"), ref("b"), *args, **kwargs),
        node("call_method", "d", "sum", ref("c")),
        loss="d",
    )


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("cosine_similarity", {"dim": -1}),
        *((name, {"reduction": "sum"}) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")),
    ],
)
def test_intermediate_tensors_of_a_node_are_counted(name: str, kwargs: dict[str, Any]) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match=rf"node 'c' \(.*{name}\): a step works on 343000000 elements"):
        run(wide(f"torch.nn.functional.{name}", **kwargs))
    assert time.monotonic() - started < 5


def test_small_results_are_not_counted_by_the_product_of_their_sizes() -> None:
    """Concatenation and integer indices do not broadcast."""
    calls = [
        node("call_function", "i", "torch.zeros", 3000, 1, dtype={"dtype": "int64"}),
        node("call_function", "a", "operator.getitem", LOGPROBS, ref("i")),
        node("call_function", "b", "torch.cat", [LOGPROBS, LOGPROBS]),
        node("call_method", "c", "sum", ref("a")),
        node("call_method", "d", "sum", ref("b")),
        node("call_function", "e", "operator.add", ref("c"), ref("d")),
    ]
    assert run(graph(*calls, loss="e"), size=10_000) == -23_000.0


def test_the_work_of_many_nodes_with_small_results_is_counted_with_their_gradients() -> None:
    """The gradient cannot be stopped on its way, so it must be known to be short."""

    def sums(number: int) -> dict[str, Any]:
        calls = [node("call_method", "w", "expand", LOGPROBS, 4000, 4000)]
        for n in range(number):
            calls.append(node("call_function", f"a{n}", "torch.logsumexp", ref("w"), {"tuple": [0, 1]}))
            calls.append(node("call_function", f"t{n}", "operator.add", ref(f"t{n - 1}" if n else "a0"), ref(f"a{n}")))
        return graph(*calls, loss=f"t{number - 1}")

    with pytest.raises(InvalidRequest, match=r"node 'a16' \(torch.logsumexp\): the graph works on \d+ elements"):
        loss_of(custom_loss(sums(40), {"logprobs": 1})).check_shapes([((4000,), {})])
    with pytest.raises(InvalidRequest, match=r"'mine': its gradient: the graph works on \d+ elements"):
        loss_of(custom_loss(sums(10), {"logprobs": 1})).check_shapes([((4000,), {})])


def test_many_results_are_counted_together() -> None:
    calls = [node("call_function", f"a{n}", "torch.zeros", 15_000_000) for n in range(9)]
    with pytest.raises(InvalidRequest, match=r"node 'a8' \(torch.zeros\): the graph needs 540000000 bytes"):
        run(graph(*calls, node("call_method", "b", "sum", LOGPROBS), loss="b"))


def test_a_graph_that_takes_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    long = graph(
        *[node("call_function", f"a{n}", "torch.exp", LOGPROBS) for n in range(900)],
        node("call_method", "b", "sum", LOGPROBS),
        loss="b",
    )
    loss = loss_of(custom_loss(long, {"logprobs": 1}))
    loss.check_shapes([((8,), {})])
    monkeypatch.setattr(module, "TIME_LIMIT_S", 1e-3)
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"node 'a\d+' \(torch.exp\): was not reached within 0.001 s"):
        loss.evaluate([torch.full((8,), -1.0)] * 1000, [{}] * 1000, {})
    assert time.monotonic() - started < 5


def test_the_last_node_and_the_gradient_count_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = loss_of(custom_loss(call("torch.exp", LOGPROBS), {"logprobs": 1}))
    loss.check_shapes([((8,), {})])
    gradient = CustomLoss._gradient

    def slow(self: CustomLoss, value: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        return gradient(self, value, p)

    monkeypatch.setattr(CustomLoss, "_gradient", slow)
    monkeypatch.setattr(module, "TIME_LIMIT_S", 0.2)
    with pytest.raises(InvalidRequest, match=r"custom loss 'mine': was not done within 0.2 s"):
        loss.evaluate([torch.full((8,), -1.0, requires_grad=True)], [{}], {})


@pytest.mark.parametrize(
    "calls",
    [
        [node("call_function", "m", "operator.gt", LOGPROBS, 0)],
        [node("call_method", "m", "isnan", LOGPROBS)],
        [node("call_function", "l", "torch.lt", LOGPROBS, 0), node("call_function", "m", "operator.invert", ref("l"))],
    ],
)
@pytest.mark.parametrize("index", [ref("m"), {"tuple": [{"ellipsis": True}, ref("m")]}])
def test_a_comparison_as_an_index_is_refused_when_the_loss_is_made(calls: list[dict[str, Any]], index: Any) -> None:
    sent = graph(*calls, node("call_function", "b", "operator.getitem", LOGPROBS, index), loss="b")
    with pytest.raises(InvalidRequest, match=r"node 'b' \(operator.getitem\): a boolean mask .*torch.where"):
        loss_of(custom_loss(sent, {"logprobs": 1}))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "inputs: 0 are outside 1..16"),
        ({"logprobs": 1, **{f"x{n}": 1 for n in range(16)}}, "17 are outside 1..16"),
        ({"x": 1}, "the first must be logprobs"),
        ({"logprobs": 0}, "the first must be logprobs, of rank 1 or 2"),
        ({"logprobs": 1, "X": 1}, "'X' is not a lowercase name"),
        ({"logprobs": 1, "x": 3}, "'x' has rank 3"),
    ],
)
def test_wrong_inputs_are_named(inputs: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        loss_of(custom_loss(graph(loss="logprobs"), inputs))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
REFS = st.sampled_from(["logprobs", "x", "n0", "n1", "n2"]).map(ref)
LEAVES = (
    REFS | st.integers(-3, 9) | SCALARS | st.sampled_from([{"ellipsis": True}, {"float": "inf"}, {"dtype": "int64"}])
)
ARGUMENTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(lambda items: {"tuple": items})
        | st.lists(inner, min_size=3, max_size=3).map(lambda items: {"slice": items})
    ),
    max_leaves=6,
)
KEYWORDS = st.dictionaries(st.sampled_from(["dim", "keepdim", "dtype", "min", "out", "other", "p"]), LEAVES, max_size=2)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """Calls of allowed operations with arguments of all kinds: most are wrong, some run."""
    calls: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 4))):
        op, table = draw(st.sampled_from([("call_function", FUNCTIONS), ("call_method", METHODS)]))
        args = [draw(REFS), *draw(st.lists(ARGUMENTS, max_size=3))]
        calls.append(node(op, f"n{number}", draw(st.sampled_from(sorted(table))), *args, **draw(KEYWORDS)))
    ending = [node("call_method", "total", "sum", LOGPROBS)]
    if draw(st.booleans()):  # what was called has a gradient too, if it can have one
        ending += [
            node("call_method", "part", "sum", ref(calls[-1]["name"])),
            node("call_function", "both", "operator.add", ref("total"), ref("part")),
        ]
    made = graph(*calls, *ending, loss=ending[-1]["name"])
    made["nodes"].insert(1, node("placeholder", "x", "x"))
    return made


def sizes(loss: CustomLoss, x: torch.Tensor, *, device: str) -> list[int]:
    """Bytes of every result."""
    found: list[int] = []
    inputs = [torch.full((4,), -1.0, device=device), x.to(device)]
    with torch.device(device):
        loss.graph.run(inputs, before=lambda _: None, after=lambda result: found.append(check_result(result)))
    return found


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_calls_with_any_arguments_are_run_or_refused_and_need_what_was_foreseen(sent: dict[str, Any]) -> None:
    x = np.array([[1, 2], [3, -(2**63)]])
    try:
        loss = loss_of(custom_loss(sent, {"logprobs": 1, "x": 2}))
        loss.check_shapes([((4,), {"x": x})])
        loss.evaluate([torch.full((4,), -1.0, requires_grad=True)], [{"x": x}], {})
    except InvalidRequest:
        return
    assert sizes(loss, torch.from_numpy(x), device="cpu") == sizes(loss, torch.from_numpy(x), device="meta")


JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner))


@settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True)
@given(
    st.text(max_size=60) | JSON.map(json.dumps) | JSON.map(lambda value: json.dumps({"format": 1, "nodes": [value]}))
)
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        loss_of(custom_loss(text, {"logprobs": 1}))
