"""How refusals name what is wrong: one path from the root of the request, for programs as for people."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from sampler_service.core.request import Params, Penalties, Request, RequestLimits, StopCondition
from tests.support.batches import datum, request
from tinsmith.errors import InvalidRequest, NotReady, RateLimited, ServiceError, Unsupported, about, within
from tinsmith.lora_config import config_from_proto
from tinsmith.rpc.errors import to_proto
from tinsmith.rpc.paths import check_run_id
from tinsmith.rpc.times import check_ttl
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.engine.batch import BatchLimits
from trainer_service.requests import batch_of, params_of

LIMITS = BatchLimits(vocab_size=100, max_context_length=64)
SAMPLING = RequestLimits(100, max_context_length=64, max_kv_tokens=64, max_num_samples=8, max_topk_logprobs=4)
ONES = np.ones(3, np.float32)
ONE = np.array([1, 0, 0], np.float32)
NUMBER = types_pb2.LossConfigValue(number=1)


def batch(change: Callable[[types_pb2.Datum], Any]) -> None:
    message = request([datum([1, 2, 3], target_tokens=[2, 3, 4], weights=np.ones(3, np.float32)) for _ in range(2)])
    change(message.data[1])
    batch_of(message, LIMITS)


def loss(name: str, **inputs: np.ndarray) -> None:
    one = datum([1, 2, 3], target_tokens=[2, 3, 4], logprobs=-ONES, advantages=ONES, **inputs)
    batch_of(request([one], name), LIMITS)


def setting(**fields: Any) -> None:
    one = datum([1, 2, 3], target_tokens=[2, 3, 4])
    message = request([one])
    message.MergeFrom(pb.ForwardBackwardRequest(**fields))
    batch_of(message, LIMITS)


def step(**fields: float) -> None:
    params_of(pb.OptimStepRequest(adam_params=pb.AdamParams(**fields)))  # type: ignore[arg-type]


def sample(**fields: Any) -> None:
    SAMPLING.check(Request(prompt=np.array([1, 2], np.int32), params=Params(**fields)))


def targets(one: types_pb2.Datum) -> types_pb2.Tensor:
    return one.loss_fn_inputs["target_tokens"]


REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("adam_params.eps", lambda: step(eps=0)),
    ("adam_params.beta1", lambda: step(beta1=1)),
    ("adam_params.learning_rate", lambda: step(learning_rate=-1)),
    ("data", lambda: batch_of(pb.ForwardBackwardRequest(loss_fn="cross_entropy"), LIMITS)),
    ("loss_fn", lambda: batch_of(pb.ForwardBackwardRequest(loss_fn="none"), LIMITS)),
    ("data[1].model_input", lambda: batch(lambda one: one.ClearField("model_input"))),
    ("data[1].loss_fn_inputs.target_tokens", lambda: batch(lambda one: one.loss_fn_inputs.pop("target_tokens"))),
    (
        "data[1].loss_fn_inputs.target_tokens.dtype",
        lambda: batch(lambda one: targets(one).ClearField("dtype")),
    ),
    ("data[0].loss_fn_inputs.advantages", lambda: loss("stable_reinforce", sampled_mask=0 * ONES)),
    ("data[0].loss_fn_inputs.sequence_ratio_mask", lambda: loss("gspo", sequence_ratio_mask=0 * ONES)),
    ("data[0].loss_fn_inputs.weights", lambda: loss("gspo", weights=ONE, sequence_ratio_mask=ONES - ONE)),
    (
        "data[0].loss_fn_inputs.clip_low_threshold",
        lambda: loss("ppo", clip_low_threshold=2 * ONES, clip_high_threshold=ONES),
    ),
    ("sampling_params.temperature", lambda: sample(temperature=-1)),
    ("sampling_params.top_p", lambda: sample(top_p=2)),
    ("sampling_params.top_k", lambda: sample(top_k=-2)),
    ("sampling_params.min_p", lambda: sample(min_p=2)),
    ("sampling_params.frequency_penalty", lambda: sample(penalties=Penalties(frequency=3))),
    ("sampling_params.logit_bias", lambda: sample(penalties=Penalties(logit_bias=[(1, 101)]))),
    ("sampling_params.logit_bias", lambda: sample(penalties=Penalties(logit_bias=[(100, 1)]))),
    ("sampling_params.max_tokens", lambda: sample(max_tokens=0)),
    ("sampling_params.max_tokens", lambda: sample(max_tokens=100)),
    ("sampling_params.stop.strings", lambda: sample(stop=StopCondition(("",), ()))),
    ("lora_config.rank", lambda: config_from_proto(types_pb2.LoraConfig(rank=99, train_mlp=True), max_rank=8)),
    ("sampling_params.stop.token_ids", lambda: sample(stop=StopCondition((), (100,)))),
    ("lora_config.train_mlp", lambda: config_from_proto(types_pb2.LoraConfig(train_attn=True), max_rank=8)),
    ("loss_fn_config.beta", lambda: setting(loss_fn_config={"beta": 1.0})),
    ("loss_fn_config.beta", lambda: setting(loss_fn_config={"beta": 1.0}, loss_fn_config_v2={"beta": NUMBER})),
    ("loss_fn_config_v2.x", lambda: setting(loss_fn_config_v2={"x": NUMBER})),
    (
        "data[1].model_input[1].encoded_text.tokens",
        lambda: batch(lambda one: one.model_input.add().encoded_text.MergeFrom(types_pb2.EncodedText(tokens=b"abc"))),
    ),
    ("data[1].model_input", lambda: batch(lambda one: one.model_input[0].CopyFrom(datum([1, 2, 100]).model_input[0]))),
    ("model_id", lambda: check_run_id("a/b", field="model_id")),
    ("ttl", lambda: check_ttl(Duration(), field="ttl")),
    ("ttl.nanos", lambda: check_ttl(Duration(seconds=5, nanos=2_000_000_000), field="ttl")),
]


@pytest.mark.parametrize(("path", "refused"), REFUSED)
def test_a_refusal_names_its_field_by_one_path_from_the_root_of_the_request(
    path: str, refused: Callable[[], Any]
) -> None:
    with pytest.raises(ServiceError) as caught:
        refused()
    status = to_proto(caught.value)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    (violation,) = bad.field_violations
    assert info.metadata["field"] == violation.field == path
    assert violation.description == status.message
    # The message may name the element of an array of the loss. The third is the hosted service's own wording.
    element = f"{path}[" if "loss_fn_inputs" in path else f"{path}: "
    assert status.message.startswith((f"{path}: ", element, "Prompt length plus max_tokens"))
    assert re.fullmatch(r"[a-z_]\w*(\[\d+\])?(\.[a-z_]\w*(\[\d+\])?)*", path)


def test_no_refusal_offers_the_unspecified_value_of_an_enum() -> None:
    with pytest.raises(ServiceError, match=r"dtype: 0 is not one of DTYPE_FLOAT32, ") as caught:
        batch(lambda one: targets(one).ClearField("dtype"))
    assert "UNSPECIFIED" not in caught.value.message


def test_a_refused_run_id_tells_the_whole_rule() -> None:
    with pytest.raises(ServiceError, match=r"not a training run id, which is 1 to 200 of A-Z a-z 0-9 \. _ - in parts"):
        check_run_id("..", field="run_id")


def test_errors_that_may_pass_say_when_to_retry_and_others_do_not() -> None:
    delays = []
    for error in (NotReady("loading"), RateLimited("too much", retry_after_s=7)):
        retry = error_details_pb2.RetryInfo()
        assert to_proto(error).details[1].Unpack(retry)
        delays.append(retry.retry_delay.seconds)
    assert delays == [1, 7]
    unsupported = to_proto(Unsupported("audio: no", field="prompt[0].dmel"))
    assert [detail.TypeName() for detail in unsupported.details] == ["google.rpc.ErrorInfo", "google.rpc.BadRequest"]


def test_an_error_in_a_nested_message_is_named_from_the_root_of_the_request_and_back() -> None:
    with pytest.raises(ServiceError) as caught, within("request"):
        raise InvalidRequest("sampling_params.stop: no", field="sampling_params.stop.strings", value=1)
    error = caught.value
    metadata = {"field": "request.sampling_params.stop.strings", "value": "1"}
    assert (error.message, str(error), error.metadata) == (
        (words := "request.sampling_params.stop: no"),
        words,
        metadata,
    )
    error.move("chat.", "")
    assert error.message == words
    error.move("request.", "")
    assert (error.message, error.metadata["field"]) == ("sampling_params.stop: no", "sampling_params.stop.strings")


def test_words_that_do_not_begin_with_the_field_stay() -> None:
    with pytest.raises(ServiceError, match="The prompt is too long") as caught, within("request"):
        raise InvalidRequest("The prompt is too long", field="prompt")
    assert caught.value.metadata["field"] == "request.prompt"
    with pytest.raises(ServiceError, match="no field") as caught, within("request"):
        raise InvalidRequest("no field")
    assert caught.value.metadata == {}


def test_an_error_in_the_content_of_a_field_is_about_the_field() -> None:
    with pytest.raises(ServiceError, match="r: -1") as caught, about("archive"):
        raise InvalidRequest("adapter_config.json: r: -1", field="r")
    assert caught.value.metadata == {"field": "archive"}
