"""Whatever a client sends: an error that names the field and the value, and then everything works as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack
from tests.support.wire import Failed, Wire, datum

CONTEXT = 32_768
MAX_RANK = 256
HUNDRED_MB = 100_000_000
TOKENS = [5, 6, 7, 8]
TARGETS = [6, 7, 8, 9]
ONES = [1.0, 1.0, 1.0, 1.0]
GOOD = datum(TOKENS, target_tokens=TARGETS, weights=ONES)


class Client:
    """A model and a sampling session, and the numbers that they have used."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.session_id = wire.session()
        self.model_id = wire.model(self.session_id, base_model=BASE_MODEL)
        ids = {"session_id": self.session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        self.sampling_session_id = wire.post("create_sampling_session", **ids).json()["sampling_session_id"]
        self.seq_ids, self.sample_seq_ids, self.model_seq_ids = count(1), count(), count(1)

    # Each returns the text of the error that it expects.

    def refused(self, response: httpx.Response, status: int = 400) -> str:
        """At once."""
        assert response.status_code == status, response.text
        return response.json()["detail"]

    def failed(self, response: httpx.Response) -> str:
        """By its future."""
        with pytest.raises(Failed) as failed:
            self.wire.json_result(self.wire.request_id(response))
        assert failed.value.category == "user"
        return str(failed.value)

    def forward_backward(self, *data: pb.Datum, loss_fn: str = "cross_entropy", **fields: Any) -> str:
        body = self.wire.forward_backward_body(self.model_id, next(self.seq_ids), data, loss_fn=loss_fn, **fields)
        return self.failed(self.wire.post_forward_backward(body))

    def operation(self, endpoint: str, /, **body: Any) -> str:
        return self.failed(self.wire.post(endpoint, model_id=self.model_id, seq_id=next(self.seq_ids), **body))

    def create(self, endpoint: str = "create_model", /, **body: Any) -> str:
        ids = {"session_id": self.session_id, "model_seq_id": next(self.model_seq_ids)}
        return self.failed(self.wire.post(endpoint, **ids, **body))

    def create_model(self, base_model: str = BASE_MODEL, **lora_config: Any) -> str:
        return self.create(base_model=base_model, lora_config={"rank": 4, **lora_config})

    def sampling_session(self, status: int, **weights: str) -> str:
        ids = {"session_id": self.session_id, "sampling_session_seq_id": 1}
        return self.refused(self.wire.post("create_sampling_session", **ids, **weights), status)

    def post_sample(self, tokens: list[int], *, params: dict[str, Any] | None = None, **body: Any) -> httpx.Response:
        asked = {
            "sampling_session_id": self.sampling_session_id,
            "seq_id": next(self.sample_seq_ids),
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "sampling_params": {"max_tokens": 2, "stop": [], **(params or {})},
        }
        return self.wire.post("asample", **{**asked, **body})

    def sample(self, tokens: list[int] | None = None, **asked: Any) -> str:
        return self.failed(self.post_sample(TOKENS if tokens is None else tokens, **asked))

    def assert_works(self) -> None:
        """The next valid requests of the same model and of the same sampling session."""
        wire = self.wire
        wire.output(wire.forward_backward(self.model_id, next(self.seq_ids), [GOOD]))
        assert wire.grad_norm(wire.optim_step(self.model_id, next(self.seq_ids))) > 0
        assert len(wire.sampled(wire.request_id(self.post_sample(TOKENS))).sequences) == 1


@pytest.fixture(scope="module")
def client(wire: Wire) -> Iterator[Client]:
    client = Client(wire)
    yield client
    wire.post(f"sessions/{client.session_id}/finish", reason={"type": "success"})


def policy(**inputs: object) -> pb.Datum:
    """A good datum of the policy losses, but for `inputs`; one that is None is left out."""
    given = {"target_tokens": TARGETS, "logprobs": [-1.0] * 4, "advantages": ONES, **inputs}
    return datum(TOKENS, **{name: value for name, value in given.items() if value is not None})


def with_tensor(name: str, value: pb.Tensor) -> pb.Datum:
    made = pb.Datum()
    made.CopyFrom(GOOD)
    made.loss_fn_inputs[name].CopyFrom(value)
    return made


def raw(content: bytes, **headers: str) -> dict[str, Any]:
    return {"content": content, "headers": {"Content-Type": "application/x-protobuf", **headers}}


IMAGE = pb.Datum(model_input=[pb.Chunk(image=pb.ImageChunk(data=b"PNG", format="png"))])
BROKEN_CSR = pb.Tensor(
    dtype=pb.DTYPE_INT64,
    shape=[4, 2],
    sparse_csr=pb.SparseCsr(
        values=np.ones(1, "<i8").tobytes(),
        crow_indices=np.array([0, 1, 1, 1, 1], "<i8").tobytes(),
        col_indices=np.array([7], "<i8").tobytes(),
    ),
)

CASES: dict[str, tuple[Callable[[Client], str], tuple[str, ...]]] = {
    # Each case: a request, and the words that its error must have (the field and the value, or the allowed values).
    "unknown loss": (lambda c: c.forward_backward(GOOD, loss_fn="sft"), ("loss_fn", "'sft'", "cross_entropy")),
    "missing advantages": (
        lambda c: c.forward_backward(policy(advantages=None), loss_fn="ppo"),
        ("data[0]", "advantages", "missing"),
    ),
    "missing targets": (lambda c: c.forward_backward(datum(TOKENS, weights=ONES)), ("target_tokens", "missing")),
    "an input that the loss does not take": (
        lambda c: c.forward_backward(datum(TOKENS, target_tokens=TARGETS, mask=ONES)),
        ("data[0]", "loss_fn_inputs.mask:", "weights"),
    ),
    "weights of another shape": (
        lambda c: c.forward_backward(GOOD, datum(TOKENS, target_tokens=TARGETS, weights=ONES[:3])),
        ("data[1]", "weights", "[3]", "[4]"),
    ),
    "too few targets": (
        lambda c: c.forward_backward(datum(TOKENS, target_tokens=TARGETS[:2], weights=ONES)),
        ("target_tokens", "[2]", "[4]"),
    ),
    "two dimensions where one is taken": (
        lambda c: c.forward_backward(policy(target_tokens=[[t, t] for t in TARGETS]), loss_fn="dro"),
        ("target_tokens", "[4, 2]"),
    ),
    "a shape that does not hold the values": (
        lambda c: c.forward_backward(
            with_tensor("weights", pb.Tensor(dense=b"\0" * 16, dtype=pb.DTYPE_FLOAT32, shape=[9]))
        ),
        ("weights", "[9]", "4"),
    ),
    "no values in a shape that no array has": (
        lambda c: c.forward_backward(
            with_tensor("weights", pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2**63 - 1, 4, 0], dense=b""))
        ),
        ("weights.shape", "[9223372036854775807, 4, 0]", "67108864"),
    ),
    "more dimensions than a tensor has": (
        lambda c: c.forward_backward(
            with_tensor("weights", pb.Tensor(dense=b"\0" * 4, dtype=pb.DTYPE_FLOAT32, shape=[1] * 70))
        ),
        ("weights", "70 dimensions"),
    ),
    "half a number": (
        lambda c: c.forward_backward(with_tensor("weights", pb.Tensor(dense=b"\0" * 15, dtype=pb.DTYPE_FLOAT32))),
        ("weights", "15 bytes"),
    ),
    "a sparse column outside": (
        lambda c: c.forward_backward(with_tensor("target_tokens", BROKEN_CSR)),
        ("target_tokens", "7"),
    ),
    "targets that are not integers": (
        lambda c: c.forward_backward(datum(TOKENS, target_tokens=ONES, weights=ONES)),
        ("target_tokens", "float32", "int64"),
    ),
    "a token id out of range": (
        lambda c: c.forward_backward(datum([5, 999_999, 7, 8], target_tokens=TARGETS)),
        ("data[0].model_input", "999999"),
    ),
    "a negative target": (
        lambda c: c.forward_backward(datum(TOKENS, target_tokens=[6, 7, -1, 9])),
        ("data[0]", "target_tokens", "-1"),
    ),
    "an input that is too long": (
        lambda c: c.forward_backward(datum([1] * (CONTEXT + 1), target_tokens=[1] * (CONTEXT + 1))),
        ("model_input", str(CONTEXT + 1), str(CONTEXT)),
    ),
    "an empty input": (lambda c: c.forward_backward(datum([], target_tokens=np.array([], int))), ("model_input", "0")),
    "no data": (lambda c: c.forward_backward(), ("data", "0")),
    "an image": (lambda c: c.forward_backward(IMAGE), ("data[0].model_input", "image")),
    "NaN advantages": (
        lambda c: c.forward_backward(policy(advantages=[1.0, np.nan, 1.0, 1.0]), loss_fn="importance_sampling"),
        ("advantages", "[1]", "nan"),
    ),
    "infinite weights": (
        lambda c: c.forward_backward(datum(TOKENS, target_tokens=TARGETS, weights=[np.inf, 1, 1, 1])),
        ("weights", "[0]", "inf"),
    ),
    "logprobs that overflow the ratio": (
        lambda c: c.forward_backward(policy(logprobs=[-1e30] * 4), loss_fn="importance_sampling"),
        ("importance_sampling", "not finite"),
    ),
    "an unknown setting of the loss": (
        lambda c: c.forward_backward(policy(), loss_fn="ppo", loss_fn_config={"epsilon": 0.2}),
        ("loss_fn_config.epsilon:", "clip_low_threshold"),
    ),
    "thresholds the wrong way round": (
        lambda c: c.forward_backward(
            policy(), loss_fn="ppo", loss_fn_config={"clip_low_threshold": 1.2, "clip_high_threshold": 0.8}
        ),
        ("clip_low_threshold", "1.2", "0.8"),
    ),
    "rank 0": (lambda c: c.create_model(rank=0), ("lora_config.rank", "0", "--full-training")),
    "a rank above the limit": (lambda c: c.create_model(rank=MAX_RANK + 1), ("rank", str(MAX_RANK + 1), str(MAX_RANK))),
    "a rank that is no number": (lambda c: c.create_model(rank="big"), ("rank", "'big'")),
    "nothing to train": (
        lambda c: c.create_model(train_attn=False, train_mlp=False, train_unembed=False),
        ("train_attn", "train_mlp", "train_unembed"),
    ),
    "an unknown base model": (lambda c: c.create_model("nobody/nothing"), ("base_model", "nobody/nothing", BASE_MODEL)),
    "an unknown optimizer": (
        lambda c: c.create(base_model=BASE_MODEL, lora_config={"rank": 4}, optimizer_config={"type": "sgd"}),
        ("optimizer", "'sgd'", "adamw", "dimuon"),
    ),
    "an unknown model": (
        lambda c: c.failed(c.wire.post("optim_step", model_id=f"{c.session_id}:train:99", seq_id=1, adam_params={})),
        ("model_id", ":train:99"),
    ),
    "beta1 of 1.5": (lambda c: c.operation("optim_step", adam_params={"beta1": 1.5}), ("beta1", "1.5", "[0.0, 1.0)")),
    "a negative learning rate": (
        lambda c: c.operation("optim_step", adam_params={"learning_rate": -1.0}),
        ("learning_rate", "-1.0"),
    ),
    "a learning rate that is no number": (
        lambda c: c.operation("optim_step", adam_params={"learning_rate": "much"}),
        ("learning_rate", "'much'"),
    ),
    "a learning rate that is not finite, in JSON": (
        lambda c: c.operation("optim_step", adam_params={"learning_rate": None}),
        ("learning_rate", "null", "nan and inf"),
    ),
    "no optimizer settings": (lambda c: c.operation("optim_step"), ("adam_params", "missing")),
    "a checkpoint name with a slash": (lambda c: c.operation("save_weights", path="a/b"), ("path", "'a/b'")),
    "a checkpoint name of dots": (lambda c: c.operation("save_weights", path=".."), ("path", "'..'")),
    "a lifetime that is too short": (
        lambda c: c.operation("save_weights", path="x", ttl_seconds=10),
        ("ttl_seconds", "10", "3600"),
    ),
    "an unknown path": (
        lambda c: c.operation("load_weights", path=f"tinker://{c.model_id}/weights/nowhere", optimizer=True),
        ("path", "/weights/nowhere"),
    ),
    "an unknown path to a new model": (
        lambda c: c.create("load_weights", path=f"tinker://{c.model_id}/weights/nowhere", optimizer=False),
        ("path", "/weights/nowhere"),
    ),
    "a path with ..": (
        lambda c: c.operation("load_weights", path="tinker://../weights/passwd", optimizer=False),
        ("path", "'..'"),
    ),
    "a path with .. to a sampler": (
        lambda c: c.sampling_session(400, model_path=f"tinker://{c.model_id}/sampler_weights/.."),
        ("model_path", "'..'"),
    ),
    "a path of another form": (
        lambda c: c.sampling_session(400, model_path="tinker://a/b"),
        ("model_path", "tinker://a/b", "tinker://RUN_ID/KIND/NAME"),
    ),
    "an unknown path to a sampler": (
        lambda c: c.sampling_session(404, model_path=f"tinker://{c.model_id}/sampler_weights/nowhere"),
        ("model_path", "/sampler_weights/nowhere"),
    ),
    "an unknown path to look at": (
        lambda c: c.refused(c.wire.post("weights_info", tinker_path=f"tinker://{c.model_id}/weights/nowhere"), 404),
        ("tinker_path", "/weights/nowhere"),
    ),
    "no weights to sample": (lambda c: c.sampling_session(400), ("base_model", "model_path")),
    "an unknown base model to sample": (
        lambda c: c.sampling_session(400, base_model="nobody/nothing"),
        ("base_model", "nobody/nothing", BASE_MODEL),
    ),
    "malformed protobuf": (
        lambda c: c.refused(c.wire.http.post("forward_backward", **raw(b"\xff\xff\xff not protobuf"))),
        ("protobuf", "ForwardBackwardRequest"),
    ),
    "broken zstd": (
        lambda c: c.refused(
            c.wire.http.post(
                "forward_backward", **raw(zstandard.compress(b"x" * 999)[:-9], **{"Content-Encoding": "zstd"})
            )
        ),
        ("zstd",),
    ),
    "an unknown encoding": (
        lambda c: c.refused(c.wire.http.post("forward_backward", **raw(b"x", **{"Content-Encoding": "br"}))),
        ("content-encoding", "'br'", "zstd"),
    ),
    "a body of 100 MB": (
        lambda c: c.refused(c.wire.http.post("forward_backward", **raw(bytes(HUNDRED_MB))), 413),
        (str(HUNDRED_MB), "max_body_bytes"),
    ),
    "a body of 100 MB after decompression": (
        lambda c: c.refused(
            c.wire.http.post(
                "forward_backward", **raw(zstandard.compress(bytes(HUNDRED_MB)), **{"Content-Encoding": "zstd"})
            ),
            413,
        ),
        (str(HUNDRED_MB), "max_body_bytes"),
    ),
    "a batch of 100 MB": (
        lambda c: c.forward_backward(datum(np.arange(HUNDRED_MB // 4))),
        ("data", "max_body_bytes"),
    ),
    "no JSON": (lambda c: c.refused(c.wire.http.post("optim_step", content=b"{not json")), ("JSON",)),
    "JSON that is no object": (lambda c: c.refused(c.wire.http.post("asample", content=b"[]")), ("object", "list")),
    "a negative temperature": (lambda c: c.sample(params={"temperature": -1.0}), ("temperature", "-1.0")),
    "top_p of 0": (lambda c: c.sample(params={"top_p": 0.0}), ("top_p", "0.0", "(0, 1]")),
    "num_samples of 0": (lambda c: c.sample(num_samples=0), ("num_samples", "0")),
    "far too many samples": (lambda c: c.sample(num_samples=10**6), ("num_samples", "1000000")),
    "max_tokens of 0": (lambda c: c.sample(params={"max_tokens": 0}), ("max_tokens", "0")),
    "an empty prompt": (lambda c: c.sample([]), ("prompt", "empty")),
    "a prompt that is too long": (lambda c: c.sample([1] * CONTEXT), (f"{CONTEXT} + 2 > {CONTEXT}",)),
    "a prompt's token out of range": (lambda c: c.sample([5, 999_999]), ("prompt", "999999")),
    "a token that is no integer": (
        lambda c: c.sample(prompt={"chunks": [{"type": "encoded_text", "tokens": [1, "x"]}]}),
        ("prompt.chunks[0]", "'x'"),
    ),
    "an image in a prompt": (
        lambda c: c.sample(prompt={"chunks": [{"type": "image", "data": "", "format": "png"}]}),
        ("prompt", "image"),
    ),
    "an empty stop string": (lambda c: c.sample(params={"stop": [""]}), ("stop", "empty")),
    "a stop token out of range": (lambda c: c.sample(params={"stop": [999_999]}), ("stop", "999999")),
    "too wide a top-k table": (lambda c: c.sample(topk_prompt_logprobs=10**6), ("topk_prompt_logprobs", "1000000")),
    "a number of last logprobs without logprobs": (
        lambda c: c.sample(prompt_logprobs_last_n=2),
        ("prompt_logprobs_last_n", "2", "prompt_logprobs"),
    ),
    "targets of the wrong length": (
        lambda c: c.sample(target_prompt_logprobs={"data": [1, 2], "dtype": "int64", "shape": [2, 1]}),
        ("target_prompt_logprobs", "[2, 1]", "3"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named_and_hurts_nobody(case: str, client: Client, stack: Stack) -> None:
    send, names = CASES[case]
    processes = {process.pid for process in stack.processes()}
    error = send(client)
    assert [name for name in names if name not in error] == [], error
    client.assert_works()
    assert {process.pid for process in stack.processes()} == processes
