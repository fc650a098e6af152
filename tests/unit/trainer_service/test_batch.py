"""An error about a batch names the field and the value; an accepted batch keeps every number."""

import math

import numpy as np
import pytest

from tests.support.batches import datum, request
from tinsmith.errors import InvalidRequest, UnknownLossFn
from tinsmith.v1 import trainer_pb2, types_pb2
from trainer_service.engine.batch import BatchLimits, Output
from trainer_service.requests import answer_of, batch_of

LIMITS = BatchLimits(vocab_size=100, max_context_length=8, max_datums=4)
GOOD = {"target_tokens": [2, 3], "weights": np.float32([0, 1])}
POLICY = {"target_tokens": [2, 3], "logprobs": np.float32([-1, -1]), "advantages": np.float32([1, 1])}

GSPO = {**POLICY, "sequence_ratio_mask": np.float32([0, 1])}
STABLE = {**POLICY, "sampled_mask": np.float32([1, 1])}


def clip(low: list[float], high: list[float]) -> dict[str, object]:
    return {"clip_low_threshold": np.float32(low), "clip_high_threshold": np.float32(high)}


@pytest.mark.parametrize(
    ("data", "loss_fn", "config", "message"),
    [
        ([datum([1, 2], **GOOD)], "crossentropy", {}, "loss_fn: 'crossentropy' is not one of cross_entropy"),
        ([], "cross_entropy", {}, r"data: 0 datums are outside 1\.\.4"),
        ([datum([1, 2], **GOOD)] * 5, "cross_entropy", {}, "data: 5 datums"),
        ([datum([], **GOOD)], "cross_entropy", {}, r"data\[0\].model_input: 0 tokens"),
        ([datum([1] * 9, **GOOD)], "cross_entropy", {}, r"data\[0\].model_input: 9 tokens are outside 1\.\.8"),
        ([datum([1, 100], **GOOD)], "cross_entropy", {}, r"data\[0\].model_input: token id 100 at position 1"),
        ([datum([1, -1], **GOOD)], "cross_entropy", {}, r"token id -1"),
        ([datum([1, 2])], "cross_entropy", {}, r"loss_fn_inputs\.target_tokens: missing"),
        ([datum([1, 2], target_tokens=[2, 101])], "cross_entropy", {}, "target_tokens: token id 101 at position 1"),
        ([datum([1, 2], target_tokens=[2])], "cross_entropy", {}, r"shape \[1\] must be \[2\] or \[2, K\]"),
        ([datum([1, 2], target_tokens=np.ones((2, 1, 1), int))], "cross_entropy", {}, r"\[2, 1, 1\] must be \[2\] or"),
        ([datum([1, 2], target_tokens=np.float32([1, 2]))], "cross_entropy", {}, "dtype float32 must be int64"),
        ([datum([1, 2], **{**GOOD, "weights": np.float32([1])})], "cross_entropy", {}, r"shape \[1\] is not that of"),
        ([datum([1, 2], **GOOD, mask=[1, 1])], "cross_entropy", {}, r"loss_fn_inputs\.mask: cross_entropy takes"),
        ([datum([1, 2], **{**GOOD, "weights": np.float32([1, math.nan])})], "cross_entropy", {}, r"\[1\]: nan is not"),
        (
            [datum([1, 2], **{**POLICY, "advantages": np.float32([1, math.inf])})],
            "ppo",
            {},
            r"\[1\]: inf is not finite",
        ),
        (
            [datum([1, 2], **POLICY, weights=np.float32([1]))],
            "importance_sampling",
            {},
            r"\.weights: shape \[1\] is not that of",
        ),
        ([datum([1, 2], target_tokens=[2, 3])], "importance_sampling", {}, r"\.logprobs: missing"),
        (
            [datum([1, 2], target_tokens=[[2, 3], [3, 4]], logprobs=np.zeros((2, 2)), advantages=np.zeros((2, 2)))],
            "importance_sampling",
            {},
            r"target_tokens: shape \[2, 2\] must be \[2\]",
        ),
        ([datum([1, 2], **POLICY)], "ppo", {"beta": 1.0}, r"loss_fn_config\.beta: ppo takes clip_low_threshold"),
        ([datum([1, 2], **POLICY)], "ppo", {"clip_low_threshold": math.nan}, "nan is not finite"),
        ([datum([1, 2], **POLICY)], "ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold 2.0 is above"),
        ([datum([1, 2], **GOOD)], "cross_entropy", {"beta": 1.0}, "takes no settings"),
        (
            [datum([1, 2], **GSPO, **clip([0.8, 1.3], [1.2, 1.2]))],
            "gspo",
            {},
            r"clip_low_threshold\[1\]: 1.29.* is above",
        ),
        ([datum([1, 2], **POLICY, **clip([1, 2], [1, 1]))], "ppo", {}, r"clip_low_threshold\[1\]: 2.0 is above"),
        (
            [datum([1, 2], **POLICY, clip_high_threshold=np.float32([1, 0.5]))],
            "ppo",
            {},
            r"low_threshold\[1\]: 0.8.* is above",
        ),
        (
            [datum([1, 2], **POLICY, **clip([0], [1]))],
            "cispo",
            {},
            r"\.clip_low_threshold: shape \[1\] is not that of",
        ),
        (
            [datum([1, 2], **POLICY, **clip([0, 0], [1, 1]))],
            "dro",
            {},
            r"\.clip_high_threshold: dro takes target_tokens",
        ),
        ([datum([1, 2], **POLICY)], "gspo", {}, r"\.sequence_ratio_mask: missing"),
        (
            [datum([1, 2], **{**GSPO, "sequence_ratio_mask": np.float32([0, 0])})],
            "gspo",
            {},
            r"data\[0\].loss_fn_inputs\.sequence_ratio_mask: is zero everywhere",
        ),
        (
            [datum([1, 2], **GSPO, weights=np.float32([1, 0]))],
            "gspo",
            {},
            r"data\[0\].loss_fn_inputs\.weights: is zero at each target of sequence_ratio_mask",
        ),
        ([datum([1, 2], **POLICY)], "stable_reinforce", {}, r"\.sampled_mask: missing"),
        (
            [datum([1, 2], **POLICY, sampled_mask=np.float32([1, 0]))],
            "stable_reinforce",
            {},
            r"\.advantages\[1\]: 1.0 is at a target that was not sampled",
        ),
        ([datum([1, 2], **STABLE)], "stable_reinforce", {"kl_coeff": -0.1}, r"\.kl_coeff: -0.1 is below 0"),
        ([datum([1, 2], **STABLE)], "stable_reinforce", {"ratio_cap": 0.5}, r"\.ratio_cap: 0.5 is below 1"),
        (
            [datum([1, 2], **STABLE)],
            "stable_reinforce",
            {"mode": 1},
            r"\.mode: stable_reinforce takes kl_coeff, ratio_cap",
        ),
    ],
)
def test_bad_input_is_named(data, loss_fn, config, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        batch_of(request(data, loss_fn, config=config), LIMITS)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (datum([1, 100], **GOOD), r"^data\[2\]\.model_input: token id 100 at position 1 is outside"),
        (
            datum([1, 2], target_tokens=[3, -1]),
            r"^data\[2\]\.loss_fn_inputs\.target_tokens: token id -1 at position 1 is outside",
        ),
        (
            datum([1, 2], **{**GOOD, "weights": np.float32([1, np.inf])}),
            r"^data\[2\]\.loss_fn_inputs\.weights\[1\]: inf is not finite",
        ),
    ],
)
def test_a_bad_value_among_many_datums_is_named(bad: types_pb2.Datum, message: str) -> None:
    good = datum([1, 2], **GOOD)
    with pytest.raises(InvalidRequest, match=message):
        batch_of(request([good, good, bad, bad]), LIMITS)


def test_two_dimensional_targets_are_for_cross_entropy_only() -> None:
    two = np.array([[1, 2], [3, 4]])
    batch_of(request([datum([1, 2], target_tokens=two)]), LIMITS)
    policy = {"logprobs": np.zeros((2, 2), np.float32), "advantages": np.zeros((2, 2), np.float32)}
    with pytest.raises(InvalidRequest, match=r"shape \[2, 2\] must be \[2\], one row"):
        batch_of(request([datum([1, 2], target_tokens=two, **policy)], "ppo"), LIMITS)


def test_pictures_are_refused_by_kind() -> None:
    picture = types_pb2.Datum(model_input=[types_pb2.Chunk(image=types_pb2.Image(data=b"x", format="png"))])
    with pytest.raises(InvalidRequest, match="chunk kind 'image' is not supported") as refused:
        batch_of(request([picture]), LIMITS)
    assert refused.value.metadata["field"] == "data[0].model_input[0]"


def test_an_unknown_loss_has_its_own_reason() -> None:
    with pytest.raises(UnknownLossFn):
        batch_of(request([datum([1, 2], **GOOD)], "nope"), LIMITS)


def test_missing_weights_are_ones_and_missing_settings_the_published_defaults() -> None:
    batch = batch_of(request([datum([1, 2], target_tokens=[2, 3])]), LIMITS)
    assert batch.datums[0].inputs["weights"].tolist() == [1.0, 1.0]
    ppo = batch_of(request([datum([1, 2], **POLICY)], "ppo", config={"clip_high_threshold": 1.5}), LIMITS)
    assert ppo.loss_config == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}


def test_settings_on_their_bounds_are_accepted() -> None:
    bounds = {"kl_coeff": 0.0, "ratio_cap": 1.0}
    assert batch_of(request([datum([1, 2], **STABLE)], "stable_reinforce", config=bounds), LIMITS)
    equal = {"clip_low_threshold": 1.2, "clip_high_threshold": 1.2}
    assert batch_of(request([datum([1, 2], **POLICY)], "ppo", config=equal), LIMITS)
    assert batch_of(request([datum([1, 2], **POLICY, **clip([1, 1], [1, 2]))], "ppo"), LIMITS)


def test_the_second_config_map_wins_and_refuses_words() -> None:
    one = request([datum([1, 2], **POLICY)], "ppo", config={"clip_low_threshold": 0.5})
    one.loss_fn_config_v2["clip_low_threshold"].number = 0.6
    assert batch_of(one, LIMITS).loss_config["clip_low_threshold"] == 0.6
    one.loss_fn_config_v2["clip_low_threshold"].text = "low"
    with pytest.raises(InvalidRequest, match="'low' is not a number"):
        batch_of(one, LIMITS)
    stable = request([datum([1, 2], **STABLE)], "stable_reinforce", config={"kl_coeff": 0.01})
    stable.loss_fn_config_v2["mode"].text = "x"
    with pytest.raises(InvalidRequest, match=r"loss_fn_config_v2\.mode: 'x' is not a number"):
        batch_of(stable, LIMITS)


def test_thresholds_of_a_target_default_to_the_settings() -> None:
    data = [datum([1, 2], **POLICY, clip_high_threshold=np.float32([2, 3])), datum([1, 2], **POLICY)]
    first, second = batch_of(request(data, "ppo", config={"clip_low_threshold": 0.5}), LIMITS).datums
    assert first.inputs["clip_high_threshold"].tolist() == [2, 3]
    assert second.inputs["clip_high_threshold"].tolist() == pytest.approx([1.2, 1.2])
    assert first.inputs["clip_low_threshold"].tolist() == [0.5, 0.5]


def test_sparse_inputs_are_densified_each_on_its_own() -> None:
    def csr(values: np.ndarray, crow: list[int], col: list[int], dtype: types_pb2.Dtype) -> types_pb2.Tensor:
        index = np.dtype("<i8")
        return types_pb2.Tensor(
            sparse_csr=types_pb2.SparseCsr(
                values=values.tobytes(),
                crow_indices=np.array(crow, index).tobytes(),
                col_indices=np.array(col, index).tobytes(),
            ),
            dtype=dtype,
            shape=[2, 3],
        )

    one = datum([1, 2])
    # Row 0: targets 5, 0 (lost), 7; row 1: target 9 at column 1. The zero-weight cell keeps its target.
    one.loss_fn_inputs["target_tokens"].CopyFrom(csr(np.array([5, 7, 9]), [0, 2, 3], [0, 2, 1], types_pb2.DTYPE_INT64))
    one.loss_fn_inputs["weights"].CopyFrom(csr(np.float32([0.5, 0.25]), [0, 2, 2], [0, 1], types_pb2.DTYPE_FLOAT32))
    (got,) = batch_of(request([one]), LIMITS).datums
    assert got.targets.tolist() == [[5, 0, 7], [0, 9, 0]]
    assert got.inputs["weights"].tolist() == [[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]]
    del one.loss_fn_inputs["weights"]  # ones would train the absent cells towards token 0
    with pytest.raises(InvalidRequest, match=r"\.weights: missing; sparse target_tokens"):
        batch_of(request([one]), LIMITS)


@pytest.mark.parametrize(
    ("crow", "col", "message"),
    [
        ([0, 2], [0, 1], "need 2 col_indices and 3 crow"),
        ([0, 2, 1], [0, 1], "must rise"),
        ([0, 1, 2], [0, 3], r"\[0, 3\)"),
    ],
)
def test_broken_sparse_indices_are_refused(crow: list[int], col: list[int], message: str) -> None:
    one = datum([1, 2])
    one.loss_fn_inputs["target_tokens"].CopyFrom(
        types_pb2.Tensor(
            sparse_csr=types_pb2.SparseCsr(
                values=np.array([5, 7]).tobytes(),
                crow_indices=np.array(crow).tobytes(),
                col_indices=np.array(col).tobytes(),
            ),
            dtype=types_pb2.DTYPE_INT64,
            shape=[2, 3],
        )
    )
    with pytest.raises(InvalidRequest, match=message):
        batch_of(request([one]), LIMITS)


def test_half_a_number_is_refused() -> None:
    one = datum([1, 2], **GOOD)
    one.loss_fn_inputs["weights"].dense = b"\0" * 7
    with pytest.raises(InvalidRequest, match=r"\.weights: 7 bytes are not whole float32 values"):
        batch_of(request([one]), LIMITS)


def test_outputs_of_one_shape_share_a_record_and_keep_their_order() -> None:
    arrays = [np.float32([1, 2]), np.float32([3]), np.float32([[4, 5]]), np.float32([6])]
    proto = answer_of(Output(logprobs=arrays, metrics={"loss:sum": 1.0}))
    assert isinstance(proto, trainer_pb2.ForwardBackwardResponse)
    assert [record.num_datums for record in proto.loss_fn_outputs] == [2, 1, 1]
    first = proto.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(first.offsets, "<i8").tolist() == [0, 8, 12]
    assert np.frombuffer(first.data, "<f4").tolist() == [1, 2, 3]
    assert list(proto.loss_fn_outputs[1].fields["logprobs"].trailing_shape) == [2]
