from __future__ import annotations

import base64
import json
import math
import struct
import time
from typing import Any

import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_proto_response
from tinker.types.sample_response import SampleResponse

from gateway import json_forms
from gateway.assets import pointers
from gateway.convert import chunk, num_tokens
from tests.unit.gateway.stack import Client, Stack, sample_body
from tinsmith.errors import InvalidRequest, ServiceError, Unsupported
from tinsmith.pictures.counting import ByArea
from tinsmith.rpc.tensors import batched, to_numpy
from tinsmith.v1 import sampler_pb2, trainer_pb2, types_pb2

TEXT = {"type": "encoded_text", "tokens": [1, 2, 3]}


def png_header(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBBI", 13, b"IHDR", width, height, 8, 2, 0, 0, 0, 0)


def tensor(data: list[Any], dtype: str = "float32", **fields: Any) -> dict[str, Any]:
    return {"data": data, "dtype": dtype, **fields}


def datum(**inputs: Any) -> dict[str, Any]:
    targets = tensor([2, 3, 4], "int64", shape=[3])
    return {"model_input": {"chunks": [TEXT]}, "loss_fn_inputs": {"target_tokens": targets, **inputs}}


def batch(*data: Any, **fields: Any) -> dict[str, Any]:
    return {"data": list(data) or [datum()], "loss_fn": "cross_entropy", **fields}


def body(model_id: str, seq_id: Any, content: Any = None, *, key: str = "forward_backward_input") -> dict[str, Any]:
    return {key: batch() if content is None else content, "model_id": model_id, "seq_id": seq_id}


def read(content: Any, *, forward_only: bool = False) -> trainer_pb2.ForwardBackwardRequest:
    key = "forward_input" if forward_only else "forward_backward_input"
    return json_forms.forward_backward({key: content}, model_id="m", seq_id=7, forward_only=forward_only)


def test_a_batch_becomes_what_the_protobuf_form_says() -> None:
    weights = tensor([0, 0.5, 1], shape=[3])
    message = read(batch(datum(weights=weights), datum(), loss_fn_config={"clip": 0.9, "n": 2, "mode": "a"}))
    assert (message.model_id, message.seq_id, message.loss_fn, message.forward_only) == ("m", 7, "cross_entropy", False)
    assert np.frombuffer(message.data[0].model_input[0].encoded_text.tokens, "<i4").tolist() == [1, 2, 3]
    inputs = message.data[0].loss_fn_inputs
    assert to_numpy(inputs["target_tokens"], field="").tolist() == [2, 3, 4]
    assert inputs["weights"].dtype == types_pb2.DTYPE_FLOAT32
    assert to_numpy(inputs["weights"], field="").tolist() == [0, 0.5, 1]
    config = message.loss_fn_config_v2
    assert (config["clip"].number, config["n"].number, config["mode"].text) == (0.9, 2.0, "a")
    assert len(message.data) == 2
    assert read(batch(), forward_only=True).forward_only


def test_a_tensor_without_shape_has_one_dimension() -> None:
    message = read(batch(datum(weights=tensor([1.0, 0.0, 2.0]))))
    assert to_numpy(message.data[0].loss_fn_inputs["weights"], field="").shape == (3,)


def test_two_dimensional_and_sparse_tensors_keep_their_shape() -> None:
    dense = tensor([1, 2, 3, 4, 5, 6], "int64", shape=[3, 2])
    sparse = tensor([7, 8], shape=[3, 2], sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[1, 0])
    inputs = read(batch(datum(target_tokens=dense, weights=sparse))).data[0].loss_fn_inputs
    assert to_numpy(inputs["target_tokens"], field="").tolist() == [[1, 2], [3, 4], [5, 6]]
    assert to_numpy(inputs["weights"], field="").tolist() == [[0, 7], [0, 0], [8, 0]]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "forward_backward_input: nothing is not an object"),
        (batch(loss_fn=3), "loss_fn: 3 "),
        (batch(data={}), "data: {} is not a list"),
        (batch([]), "data[0]: [] is not an object"),
        (batch({"loss_fn_inputs": {}}), "data[0].model_input: nothing"),
        (batch({"model_input": {"chunks": [TEXT]}}), "data[0].loss_fn_inputs: nothing"),
        (batch(datum(weights=[1, 2])), "data[0].loss_fn_inputs.weights: [1, 2] is not an object"),
        (batch(datum(), datum(weights=tensor([1], "float64"))), "data[1].loss_fn_inputs.weights.dtype: 'float64'"),
        (batch(datum(weights=tensor([1], "int64") | {"data": [1.5]})), "weights.data: [1.5] is not a flat list of int"),
        (batch(datum(weights=tensor([2**64], "int64"))), "integers of 64 bits"),
        (batch(datum(weights=tensor([2**63], "int64"))), "integers of 64 bits"),
        (batch(datum(weights=tensor([[1.0], [2.0]]))), "flat list of numbers"),
        (batch(datum(weights=tensor([[1.0], 2.0]))), "flat list of numbers"),
        (batch(datum(weights=tensor([1.0, None]))), "flat list of numbers"),
        (batch(datum(weights=tensor(["1"]))), "flat list of numbers"),
        (batch(datum(weights=tensor([True]))), "flat list of numbers"),
        (batch(datum(weights={"data": "x", "dtype": "float32"})), "weights.data: 'x' is not a list"),
        (batch(datum(weights=tensor([1.0], shape=[1.5]))), "weights.shape: [1.5]"),
        (batch(datum(weights=tensor([1.0], sparse_crow_indices=[0, 1]))), "go together"),
        (batch(loss_fn_config={"a": None}), "loss_fn_config.a: nothing"),
        (batch(loss_fn_config={"a": math.inf}), "loss_fn_config.a: inf"),
        (batch(loss_fn_config={"a": 10**400}), "loss_fn_config.a: 1000"),
        (batch(datum(weights=tensor([1.0], []))), "data[0].loss_fn_inputs.weights.dtype: []"),  # type: ignore[arg-type]
        (batch(datum(weights=tensor([1.0], {}))), "data[0].loss_fn_inputs.weights.dtype: {}"),  # type: ignore[arg-type]
        (batch(loss_fn_config=[1]), "loss_fn_config: [1] is not an object"),
        (batch(datum() | {"model_input_spans": [{}]}), "data[0].model_input_spans"),
        (batch({"model_input": {"chunks": [{"type": "song"}]}, "loss_fn_inputs": {}}), "chunks[0].type: 'song'"),
    ],
)
def test_what_is_wrong_is_named(content: Any, part: str) -> None:
    with pytest.raises(ServiceError) as caught:
        read(content)
    assert part in caught.value.message
    assert caught.value.category == "user"


def test_a_picture_counts_as_its_sender_expects_or_as_its_header_says() -> None:
    broken = {"type": "image", "data": "AAAA", "format": "png"}
    picture = {**broken, "data": base64.b64encode(png_header(37, 21)).decode()}
    thin = {**broken, "data": base64.b64encode(png_header(1, 9999)).decode()}
    sent = [TEXT, {**picture, "expected_tokens": 4}, {**picture, "expected_tokens": -9}, picture, broken, thin]
    chunks = [chunk(one, field="c") for one in sent]
    assert num_tokens(chunks, None) == 3 + 4
    assert num_tokens(chunks, ByArea(4, 2, min_pixels=128, max_pixels=2048)) == 3 + 4 + 15


def test_the_type_of_a_chunk_may_be_left_out() -> None:
    assert chunk({"tokens": [5]}, field="c").encoded_text.tokens == b"\5\0\0\0"
    assert chunk({"data": "AAAA", "format": "png"}, field="c").image.data == b"\0\0\0"
    with pytest.raises(Unsupported, match="image_asset_pointer"):  # assets.py makes a picture of it before
        chunk({"location": "x", "format": "png"}, field="c")
    with pytest.raises(InvalidRequest, match=r"c\.tokens\[1\]: 4294967296"):
        chunk({"tokens": [1, 2**32]}, field="c")


def test_arrays_and_types_that_are_null_are_absent() -> None:
    """Clients whose data model has a field for each array send null for those that a datum lacks."""
    message = read(batch(datum(weights=None, logprobs=None, advantages=tensor([1.0, 0.0, 2.0]))))
    assert set(message.data[0].loss_fn_inputs) == {"target_tokens", "advantages"}
    assert chunk({"type": None, "tokens": [5], "data": None}, field="c").encoded_text.tokens == b"\5\0\0\0"
    assert chunk({"tokens": None, "data": "AAAA", "format": "png"}, field="c").image.data == b"\0\0\0"
    pointer = {"type": None, "tokens": None, "location": "x", "format": "png"}
    assert list(pointers([pointer], field="chunks")) == [("chunks[0]", pointer)]


def test_half_a_million_numbers_are_read_in_no_time() -> None:
    """A loop over them in Python takes seconds."""
    size = 250_000
    text = {"type": "encoded_text", "tokens": list(range(size))}
    inputs = {"target_tokens": tensor(list(range(size)), "int64"), "weights": tensor([0.5] * size)}
    started_at = time.process_time()
    message = read(batch({"model_input": {"chunks": [text]}, "loss_fn_inputs": inputs}))
    assert time.process_time() - started_at < 1.0
    assert len(message.data[0].model_input[0].encoded_text.tokens) == 4 * size


def test_results_are_split_by_datum() -> None:
    one, two = np.array([-0.5, -1.5], np.float32), np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    records = [
        types_pb2.ArrayRecord(num_datums=2, fields={"logprobs": batched([one, one[:1]])}),
        types_pb2.ArrayRecord(num_datums=1, fields={"logprobs": batched([two]), "n": batched([np.array([7])])}),
    ]
    response = trainer_pb2.ForwardBackwardResponse(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=records, metrics={"loss:sum": 2.5, "x:max": math.nan}
    )
    found = json.loads(json_forms.forward_backward_result(response.SerializeToString()))
    assert found == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": tensor([-0.5, -1.5], shape=[2])},
            {"logprobs": tensor([-0.5], shape=[1])},
            {"logprobs": tensor([1, 2, 3, 4, 5, 6], shape=[3, 2]), "n": tensor([7], "int64", shape=[1])},
        ],
        "metrics": {"loss:sum": 2.5, "x:max": "nan"},
    }


def test_bfloat16_results_are_widened_and_nan_stays_nan() -> None:
    halves = (np.array([1.5, -2.0, np.nan], np.float32).view(np.uint32) >> 16).astype("<u2")
    field = types_pb2.BatchedTensor(
        data=halves.tobytes(), offsets=np.array([0, 2, 6], "<i8").tobytes(), dtype=types_pb2.DTYPE_BFLOAT16
    )
    record = types_pb2.ArrayRecord(num_datums=2, fields={"logprobs": field})
    response = trainer_pb2.ForwardBackwardResponse(loss_fn_outputs=[record])
    outputs = json.loads(json_forms.forward_backward_result(response.SerializeToString()))["loss_fn_outputs"]
    assert outputs == [{"logprobs": tensor([1.5], shape=[1])}, {"logprobs": tensor([-2.0, "nan"], shape=[2])}]


def topk(cells: list[list[tuple[int, float]]]) -> types_pb2.TopkLogprobs:
    ids, values = ([[cell[n] for cell in row] for row in cells] for n in (0, 1))
    return types_pb2.TopkLogprobs(
        token_ids=np.array(ids, "<i4").tobytes(),
        logprobs=np.array(values, "<f4").tobytes(),
        k=len(cells[0]),
        length=len(cells),
    )


def test_sample_results_have_null_where_nothing_was_computed() -> None:
    empty = (0, -99999.0)
    sequence = types_pb2.SampledSequence(
        public_stop_reason=types_pb2.PUBLIC_STOP_REASON_LENGTH,
        tokens=np.array([5, 6], "<i4").tobytes(),
        logprobs=np.array([-0.5, -np.inf], "<f4").tobytes(),
        topk_sampled_logprobs=topk([[(5, -0.5)], [(6, -0.25)]]),
    )
    targets = types_pb2.Tensor(
        sparse_csr=types_pb2.SparseCsr(
            values=np.array([-1.0], "<f4").tobytes(),
            crow_indices=np.array([0, 1], "<i8").tobytes(),
            col_indices=np.array([0], "<i8").tobytes(),
        ),
        dtype=types_pb2.DTYPE_FLOAT32,
        shape=[1, 1],
    )
    ids = types_pb2.Tensor(dense=np.array([9], "<i8").tobytes(), dtype=types_pb2.DTYPE_INT64, shape=[1, 1])
    response = sampler_pb2.SampleResponse(
        sequences=[sequence, types_pb2.SampledSequence()],
        prompt_logprobs=np.array([np.nan, -1.0], "<f4").tobytes(),
        topk_prompt_logprobs=topk([[empty, empty], [(0, -1.0), empty]]),
        target_prompt_logprobs=targets,
        prompt_alt_tokens=types_pb2.PromptAltTokens(tokens=ids, logprobs=targets),
    )
    found = json.loads(json_forms.sample_result(response.SerializeToString()))
    assert found["sequences"] == [
        {
            "stop_reason": "length",
            "tokens": [5, 6],
            "logprobs": [-0.5, "-inf"],
            "topk_logprobs": [[[5, -0.5]], [[6, -0.25]]],
        },
        {"stop_reason": "stop", "tokens": []},
    ]
    assert found["prompt_logprobs"] == [None, -1.0]
    assert found["topk_prompt_logprobs"] == [None, [[0, -1.0]]]
    sparse = tensor([-1.0], shape=[1, 1], sparse_crow_indices=[0, 1], sparse_col_indices=[0])
    assert found["target_prompt_logprobs"] == sparse
    assert found["prompt_alt_tokens"] == {"tokens": tensor([9], "int64", shape=[1, 1]), "logprobs": sparse}


def test_spans_of_versions_are_an_addition_that_the_sdk_passes_over() -> None:
    sequence = types_pb2.SampledSequence(
        tokens=np.array([5, 6, 7], "<i4").tobytes(), logprobs=np.array([-0.5, -0.25, -1.0], "<f4").tobytes()
    )
    plain = sampler_pb2.SampleResponse(sequences=[sequence])
    spans = [types_pb2.VersionSpan(version_id="a:train:0@1", num_tokens=2), types_pb2.VersionSpan(num_tokens=1)]
    spanned = sampler_pb2.SampleResponse()
    spanned.CopyFrom(plain)
    spanned.sequences[0].version_spans.extend(spans)
    one, other = (
        deserialize_proto_response(message.SerializeToString(), SampleResponse) for message in (plain, spanned)
    )
    assert isinstance(other, SampleResponse)
    assert other.sequences[0].tokens == [5, 6, 7]
    assert repr(other) == repr(one)
    (found,) = json.loads(json_forms.sample_result(spanned.SerializeToString()))["sequences"]
    assert found.pop("version_spans") == [
        {"version": "a:train:0@1", "num_tokens": 2},
        {"version": "", "num_tokens": 1},
    ]
    assert [found] == json.loads(json_forms.sample_result(plain.SerializeToString()))["sequences"]


# Over HTTP


async def json_result(client: Client, request_id: str) -> dict[str, Any]:
    """As SDKs poll that know of no protobuf."""
    reply = await client.post(
        "/api/v1/retrieve_future", json={"request_id": request_id}, headers={"accept": "application/json"}
    )
    assert reply.headers["content-type"] == "application/json"
    return reply.json()


async def test_json_batches_run_and_answers_follow_the_accept_header(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    receipt = await client.call("forward_backward", body(model_id, 1))
    assert receipt == {"request_id": f"{model_id}:1", "model_id": model_id}
    found = await json_result(client, receipt["request_id"])
    assert found["loss_fn_outputs"] == [{"logprobs": tensor([-1.0, -1.0, -1.0], shape=[3])}]
    in_protobuf = await client.result(receipt)
    assert trainer_pb2.ForwardBackwardResponse.FromString(in_protobuf).metrics["loss:sum"] == 1
    await client.call("forward", body(model_id, 2, key="forward_input"))
    await json_result(client, f"{model_id}:2")
    requests = [
        trainer_pb2.ForwardBackwardRequest.FromString(stack.trainer.models[model_id].requests[n]) for n in (1, 2)
    ]
    assert [request.forward_only for request in requests] == [False, True]


async def test_forward_only_is_honoured_in_json(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    await client.call("forward_backward", body(model_id, 1) | {"forward_only": True})
    await json_result(client, f"{model_id}:1")
    sent = trainer_pb2.ForwardBackwardRequest.FromString(stack.trainer.models[model_id].requests[1])
    assert sent.forward_only


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("application/x-protobuf, application/json", "application/x-protobuf"),
        ("application/x-protobuf;q=0, application/json", "application/json"),
        ("application/x-protobuf;q=0.1, application/json", "application/json"),
        ("application/x-protobuf; q=nonsense", "application/x-protobuf"),
        ("*/*", "application/json"),
    ],
)
async def test_the_form_that_is_wanted_more_is_sent(client: Client, accept: str, media_type: str) -> None:
    model_id = await client.model(await client.session())
    receipt = await client.call("forward_backward", body(model_id, 1))
    reply = await client.post("/api/v1/retrieve_future", json=receipt, headers={"accept": accept})
    assert reply.headers["content-type"] == media_type


async def test_both_forms_of_one_batch_are_one_request(client: Client) -> None:
    model_id = await client.model(await client.session())
    content = body(model_id, 1)
    await client.call("forward_backward", content)
    message = read(content["forward_backward_input"])
    message.model_id, message.seq_id = model_id, 1
    headers = {"content-type": "application/x-protobuf"}
    reply = await client.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=headers)
    assert reply.status_code == 200


@pytest.mark.parametrize("thread_body_bytes", [1, 2**20])
async def test_a_bad_json_batch_fails_its_future_and_uses_up_its_number(
    stack: Stack, client: Client, thread_body_bytes: int
) -> None:
    await stack.restart_gateway(thread_body_bytes=thread_body_bytes)
    model_id = await client.model(await client.session())
    bad = batch(datum(weights=tensor([1.0], "float64")))
    receipt = await client.call("forward_backward", body(model_id, 1, bad))
    failure = await json_result(client, receipt["request_id"])
    assert failure["category"] == "user"
    assert "weights.dtype: 'float64'" in failure["error"]
    await client.call("forward_backward", body(model_id, 1, bad))
    await client.call("forward_backward", body(model_id, 2))
    assert "metrics" in await json_result(client, f"{model_id}:2")


@pytest.mark.parametrize("content", [{"seq_id": 1}, body("m", 0), body("m", "1"), body("", 1)])
async def test_json_without_ids_is_refused_at_once(client: Client, content: dict[str, Any]) -> None:
    reply = await client.post("/api/v1/forward_backward", json=content)
    assert reply.status_code == 400
    assert "_id" in reply.json()["detail"]


async def test_other_content_types_are_refused(client: Client) -> None:
    reply = await client.post("/api/v1/forward_backward", content=b"x", headers={"content-type": "text/plain"})
    assert (reply.status_code, "'text/plain'" in reply.json()["detail"]) == (400, True)


@pytest.mark.gateway(max_body_bytes=10_000)
async def test_json_that_is_too_large_uses_up_its_number(client: Client) -> None:
    model_id = await client.model(await client.session())
    large = batch(datum(weights=tensor([0.25] * 100_000)))
    receipt = await client.call("forward_backward", body(model_id, 1, large))
    failure = await json_result(client, receipt["request_id"])
    assert failure["category"] == "user"
    assert "max_body_bytes is 10000" in failure["error"]
    await client.call("forward_backward", body(model_id, 2))
    assert "metrics" in await json_result(client, f"{model_id}:2")
    await client.call("forward_backward", {"model_id": model_id, "forward_backward_input": large}, status=413)


async def test_samples_are_json_for_clients_that_do_not_name_protobuf(client: Client) -> None:
    sampling_session_id = await client.sampling_session(await client.session())
    receipt = await client.call("asample", sample_body(sampling_session_id, 0, prompt_logprobs=True))
    found = await json_result(client, receipt["request_id"])
    assert found["sequences"][1] == {"stop_reason": "length", "tokens": [5, 6], "logprobs": [-0.5, -0.25]}
    assert found["prompt_logprobs"] == [None, -1.0, -1.0]
