"""A custom loss on the server is the SDK's own computation, in one pass."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import torch.nn.functional as F
from tinker.lib.public_interfaces.custom_loss import run_loss_handle
from torch import Tensor
from torch.fx.node import _get_qualified_name

from tests.support.batches import datum, random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.unit.trainer_service.custom_losses import sent, traced
from tinsmith.errors import InvalidRequest
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.rpc.tensors import to_numpy
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.engine.batch import BatchLimits, Output
from trainer_service.engine.engine import TrainingEngine
from trainer_service.objectives.custom_loss import CustomLoss
from trainer_service.objectives.custom_loss_ops import FUNCTIONS, METHODS
from trainer_service.requests import batch_of

LENGTHS = (9, 4, 17, 4)
Result = tuple[Tensor, dict[str, Tensor]]


def dpo_like(logprobs, reference, chosen) -> Result:  # torch.fx calls it with proxies
    gap = ((logprobs - reference) * chosen).sum() - ((logprobs - reference) * (1 - chosen)).sum()
    return -F.logsigmoid(0.1 * gap), {"custom/margin:mean": gap, "custom/correct:sum": (gap > 0).float()}


def clipped_policy_gradient(logprobs, sampled, advantages, low) -> Result:
    ratio = torch.exp(logprobs - sampled)
    kept = torch.where(advantages > 0, torch.clamp(ratio, max=1.2), torch.maximum(ratio, low))
    count = logprobs.shape[0]
    loss = -(kept.detach() * logprobs * advantages)[..., :].sum() / math.sqrt(count)
    return loss, {"custom/ratio_max:mean": ratio.max(), "custom/tokens:sum": torch.ones_like(logprobs).sum()}


def entropy_of_candidates(logprobs, target_tokens, teacher) -> Result:
    student = torch.log_softmax(logprobs, dim=-1)
    cross = -(teacher.softmax(-1) * student).sum(dim=-1)
    entropy = -(student.exp() * student).sum(-1)
    first = logprobs.gather(1, (target_tokens % logprobs.shape[1])[:, :1])
    best = torch.topk(logprobs, 2, dim=1).values
    loss = (cross + 0.01 * entropy).mean() + 0.1 * first.squeeze(1).square().sum() + best.sum() * 0.01
    return loss, {"custom/entropy:mean": entropy.mean()}


def policy_data() -> list[types_pb2.Datum]:
    rng = np.random.default_rng(0)
    data = [
        datum(
            rng.integers(VOCAB_SIZE, size=n).tolist(),
            target_tokens=rng.integers(VOCAB_SIZE, size=n),
            reference=rng.normal(-6, 1, n).astype(np.float32),
            sampled=rng.normal(-6, 1, n).astype(np.float32),
            advantages=rng.normal(size=n).astype(np.float32),
            chosen=rng.integers(2, size=n),
            low=np.float32(0.8),
        )
        for n in LENGTHS
    ]
    for one in data:
        one.loss_fn_inputs["low"].ClearField("shape")  # so the SDK sends a scalar
    return data


def candidate_data() -> list[types_pb2.Datum]:
    rng = np.random.default_rng(1)
    return [
        datum(
            rng.integers(VOCAB_SIZE, size=n).tolist(),
            target_tokens=rng.integers(VOCAB_SIZE, size=(n, 3)),
            teacher=rng.normal(size=(n, 3)).astype(np.float32),
        )
        for n in LENGTHS
    ]


def sdk_datum(one: types_pb2.Datum) -> tinker.Datum:
    arrays = {key: to_numpy(value, field=key).copy() for key, value in one.loss_fn_inputs.items()}
    if "low" in arrays:
        arrays["low"] = arrays["low"].reshape(())
    tokens = np.frombuffer(one.model_input[0].encoded_text.tokens, "<i4").tolist()
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={key: tinker.TensorData.from_numpy(value) for key, value in arrays.items()},
    )


def custom(data: list[types_pb2.Datum], loss: pb.CustomLoss, **kwargs: object) -> pb.ForwardBackwardRequest:
    message = request(data, "custom", **kwargs)  # type: ignore[arg-type]
    message.custom_loss.CopyFrom(loss)
    return message


@pytest.fixture
def engine(base: BaseModel) -> TrainingEngine:
    engine = TrainingEngine(base, max_tokens_per_microbatch=20)  # the datums need three passes
    engine.create_model("m", AdapterConfig(rank=4, seed=1), "adamw")
    torch.manual_seed(2)
    with torch.no_grad():
        for weights in engine.models["m"].adapter.weights.values():
            weights.b_O_R.normal_(0, 0.05)
    return engine


def run(engine: TrainingEngine, message: pb.ForwardBackwardRequest) -> tuple[Output, Tensor]:
    """The output and the gradient, which is cleared."""
    (output,) = engine.forward_backward([("m", batch_of(message, engine.limits))])
    assert isinstance(output, Output), output
    gradient = engine.models["m"].need_gradient().flat.clone()
    engine.models["m"].clear_gradient()
    return output, gradient


CASES = {
    "dpo": (traced(dpo_like, reference=1, chosen=1), policy_data()),
    "clipped": (traced(clipped_policy_gradient, sampled=1, advantages=1, low=0), policy_data()),
    "candidates": (traced(entropy_of_candidates, logprobs=2, target_tokens=2, teacher=2), candidate_data()),
}


@pytest.mark.parametrize("case", CASES)
def test_one_pass_on_the_server_equals_the_two_passes_of_the_sdk(engine: TrainingEngine, case: str) -> None:
    handle, data = CASES[case]
    ours, our_gradient = run(engine, custom(data, sent(handle)))

    targets = [
        types_pb2.Datum(
            model_input=one.model_input, loss_fn_inputs={"target_tokens": one.loss_fn_inputs["target_tokens"]}
        )
        for one in data
    ]
    forward, _ = run(engine, request(targets, forward_only=True))
    leaves = [torch.tensor(logprobs, requires_grad=True) for logprobs in forward.logprobs]
    loss, metrics = run_loss_handle(handle, [sdk_datum(one) for one in data], leaves)
    loss.backward()
    linear = []
    for one, leaf in zip(targets, leaves, strict=True):
        assert leaf.grad is not None
        tokens = np.frombuffer(one.model_input[0].encoded_text.tokens, "<i4").tolist()
        target = to_numpy(one.loss_fn_inputs["target_tokens"], field="t")
        linear.append(datum(tokens, target_tokens=target, weights=-leaf.grad.numpy()))
    _, their_gradient = run(engine, request(linear))

    assert ours.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert {key: ours.metrics[key] for key in metrics} == pytest.approx(metrics, rel=1e-5)
    assert (our_gradient - their_gradient).norm() <= 1e-5 * their_gradient.norm()
    for x, y in zip(ours.logprobs, forward.logprobs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_forward_only_gives_loss_and_metrics_without_a_gradient(engine: TrainingEngine) -> None:
    handle, data = CASES["dpo"]
    forward, gradient = run(engine, custom(data, sent(handle), forward_only=True))
    backward, _ = run(engine, custom(data, sent(handle)))
    assert not gradient.any()
    assert forward.metrics == pytest.approx(backward.metrics, rel=1e-5)


def test_several_requests_in_one_call_keep_their_metrics_apart(engine: TrainingEngine) -> None:
    handle, data = CASES["dpo"]
    works = [("m", batch_of(custom(half, sent(handle)), engine.limits)) for half in (data[:1], data[1:])]
    outputs = engine.forward_backward(works)
    alone = [run(engine, custom(half, sent(handle)))[0] for half in (data[:1], data[1:])]
    for output, expected in zip(outputs, alone, strict=True):
        assert isinstance(output, Output)
        assert output.metrics == pytest.approx(expected.metrics, rel=1e-5)


def test_arrays_that_the_loss_does_not_name_are_not_read(engine: TrainingEngine) -> None:
    """As in the SDK, where a datum may hold more than the loss declares."""
    loss = sent(traced(lambda logprobs: (-logprobs.sum(), {})))
    data = [datum([1, 2], target_tokens=[2, 3], weights=np.float32([math.nan]))]
    output, _ = run(engine, custom(data, loss))
    assert output.metrics["loss:sum"] == pytest.approx(-output.logprobs[0].sum(), rel=1e-5)


def test_a_loss_that_is_not_finite_adds_nothing(engine: TrainingEngine) -> None:
    loss = sent(traced(lambda logprobs: ((logprobs * 1e30).square().sum(), {})))
    batch = batch_of(custom(policy_data(), loss), engine.limits)
    (refused,) = engine.forward_backward([("m", batch)])
    assert isinstance(refused, InvalidRequest)
    assert "custom: the loss (inf)" in str(refused)
    assert not engine.models["m"].need_gradient().flat.any()


def test_an_error_that_only_values_show_fails_its_own_request_only(engine: TrainingEngine) -> None:
    handle = traced(lambda logprobs, where: (logprobs[where].sum(), {}), where=1)
    good, bad = (
        batch_of(custom([datum([1, 2], target_tokens=[2, 3], where=[n])], sent(handle)), engine.limits) for n in (1, 2)
    )
    refused, fine = engine.forward_backward([("m", bad), ("m", good)])
    assert isinstance(refused, InvalidRequest)
    assert "node 'getitem' (operator.getitem): index 2 is out of bounds" in str(refused)
    assert isinstance(fine, Output)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"target_tokens": [2, 3]}, r"data\[0\].loss_fn_inputs\.reference: missing; loss 'dpo_like' reads it"),
        ({"target_tokens": [[2], [3]]}, r"shape \[2, 1\] must be \[2\]"),
        (
            {"target_tokens": [2, 3], "reference": np.zeros((2, 1), np.float32), "chosen": [0, 1]},
            r"\.reference: shape \[2, 1\] has 2 dimensions, but loss 'dpo_like' declares rank 1",
        ),
        (
            {"target_tokens": [2, 3], "reference": np.zeros(3, np.float32), "chosen": [0, 1]},
            r"custom loss 'dpo_like': node 'sub' \(operator.sub\): ",
        ),
    ],
)
def test_a_datum_that_does_not_fit_the_loss_is_named(engine: TrainingEngine, inputs, message) -> None:
    loss = sent(CASES["dpo"][0])
    with pytest.raises(InvalidRequest, match=message):
        batch_of(custom([datum([1, 2], **inputs)], loss), engine.limits)


def test_the_loss_and_its_graph_go_together(engine: TrainingEngine) -> None:
    data = [datum([1, 2], target_tokens=[2, 3])]
    with pytest.raises(InvalidRequest, match="custom_loss: missing; loss_fn 'custom' needs it"):
        batch_of(request(data, "custom"), engine.limits)
    loss = sent(traced(lambda logprobs: (-logprobs.sum(), {})))
    message = custom(data, loss)
    message.loss_fn = "cross_entropy"
    with pytest.raises(InvalidRequest, match="custom_loss: goes with loss_fn 'custom' only"):
        batch_of(message, engine.limits)
    with pytest.raises(InvalidRequest, match=r"loss_fn_config\.beta: a custom loss takes no settings"):
        batch_of(custom(data, loss, config={"beta": 1.0}), engine.limits)


def test_every_allowed_function_is_known_under_the_name_that_the_sdk_sends() -> None:
    for name in FUNCTIONS:
        module, _, attribute = name.rpartition(".")
        if module in ("torch", "torch.nn.functional", "math"):
            function = getattr({"torch": torch, "torch.nn.functional": F, "math": math}[module], attribute)
            assert _get_qualified_name(function) in FUNCTIONS


def test_the_documents_list_is_the_list() -> None:
    text = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    section = text[text.index("A graph may call") : text.index("## Optimizers")]
    listed = {word for line in section.splitlines() if line.startswith("    ") for word in line.split()}
    names = {name.rpartition(".")[2] for name in FUNCTIONS if not name.startswith(("operator.", "torch._C", "getattr"))}
    assert listed == names | set(METHODS)


def test_the_time_of_a_custom_loss_counts_also_where_it_fails_and_that_of_another_loss_does_not(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any) -> Any:
        time.sleep(0.02)
        return evaluate(*args)

    def fail(*args: Any) -> Any:
        time.sleep(0.02)
        raise InvalidRequest("took too long")

    evaluate = CustomLoss.evaluate
    handle, data = CASES["clipped"]
    message = custom(data, sent(handle))
    own = batch_of(message, engine.limits)
    plain = batch_of(request([random_datum(5, 1, vocab_size=VOCAB_SIZE)]), engine.limits)
    for behaviour in (slow, fail):
        monkeypatch.setattr(CustomLoss, "evaluate", behaviour)
        batches = [replace(one, model_id="m") for one in (own, plain)]
        engine.passes.run([(batch, range(len(batch.datums))) for batch in batches])
        assert batches[0].loss_seconds >= 0.02
        assert batches[1].loss_seconds == 0.0


def many_matrices(logprobs, matrix) -> Result:
    for _ in range(100):
        matrix = matrix.sin()
    return (matrix.mean() * logprobs).sum(), {}


def test_the_time_that_a_loss_will_take_is_foreseen_from_its_graph() -> None:
    """Datums that take long together can then go into several micro-batches, so that others wait for less."""

    def foreseen(size: int) -> float:
        data = [
            datum([1, 2], target_tokens=np.array([1, 2]), matrix=np.ones((size, size), np.float32)) for _ in range(2)
        ]
        message = custom(data, sent(traced(many_matrices, matrix=2)))
        first, second = batch_of(message, BatchLimits(VOCAB_SIZE, 64)).datums
        assert first.loss_s == second.loss_s  # the second one's shapes were known
        return first.loss_s

    assert foreseen(4) < 5e-3
    assert 0.02 < foreseen(512) < 1
