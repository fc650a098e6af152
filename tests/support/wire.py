"""The Tinker API without the SDK: plain HTTP, with bodies made by the SDK's own protobuf module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import numpy as np
import zstandard
from google.protobuf.message import Message
from tinker.proto import tinker_public_pb2 as pb

Result = dict[str, Any]
M = TypeVar("M", bound=Message)

_DTYPES = {"f": (pb.DTYPE_FLOAT32, "<f4"), "i": (pb.DTYPE_INT64, "<i8")}
_PROTOBUF = "application/x-protobuf"


def tensor(values: object) -> pb.Tensor:
    array = np.asarray(values)
    number, dtype = _DTYPES[array.dtype.kind]
    return pb.Tensor(dense=array.astype(dtype).tobytes(), dtype=number, shape=array.shape)


def datum(tokens: Sequence[int] | np.ndarray, **inputs: object) -> pb.Datum:
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array(tokens, "<i4").tobytes()))
    return pb.Datum(model_input=[chunk], loss_fn_inputs={name: tensor(value) for name, value in inputs.items()})


def next_token_datum(tokens: Sequence[int], **inputs: object) -> pb.Datum:
    """Predict each token from those before it."""
    return datum(tokens[:-1], target_tokens=list(tokens[1:]), **inputs)


def logprobs(output: pb.ForwardBackwardOutput) -> list[np.ndarray]:
    """1-D logprobs of each datum."""
    arrays = []
    for record in output.loss_fn_outputs:
        field = record.fields["logprobs"]
        offsets = np.frombuffer(field.offsets, "<i8")
        arrays += [np.frombuffer(field.data[i:j], "<f4") for i, j in pairwise(offsets)]
    return arrays


class Failed(Exception):
    """A future that failed."""

    def __init__(self, error: str, category: str) -> None:
        super().__init__(error)
        self.category = category


class Wire:
    def __init__(self, base_url: str, *, api_key: str = "tml-test") -> None:
        self.base_url = base_url
        self.http = httpx.Client(
            base_url=f"{base_url}/api/v1", timeout=60.0, headers={"X-API-Key": api_key}, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.http.close()

    # Sessions and models

    def post(self, endpoint: str, /, **body: Any) -> httpx.Response:
        return self.http.post(endpoint, json=body)

    def session(self) -> str:
        return self._ok(self.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0"))["session_id"]

    def model(self, session_id: str, *, base_model: str, model_seq_id: int = 0, rank: int = 4, seed: int = 0) -> str:
        """A model_id, once the model is there."""
        response = self.post(
            "create_model",
            session_id=session_id,
            model_seq_id=model_seq_id,
            base_model=base_model,
            lora_config={"rank": rank, "seed": seed, "train_unembed": True, "train_mlp": True, "train_attn": True},
        )
        return self.json_result(self.request_id(response))["model_id"]

    # Submissions

    def forward_backward_body(
        self, model_id: str, seq_id: int, data: Sequence[pb.Datum], *, loss_fn: str = "cross_entropy", **fields: Any
    ) -> bytes:
        """`fields`: loss_fn_config, forward_only."""
        return pb.ForwardBackwardRequest(
            model_id=model_id, seq_id=seq_id, data=data, loss_fn=loss_fn, **fields
        ).SerializeToString()

    def post_forward_backward(self, body: bytes, *, zstd: bool = False) -> httpx.Response:
        headers = {"Content-Type": _PROTOBUF, "Accept": "application/json"}
        if zstd:
            body, headers = zstandard.compress(body), {**headers, "Content-Encoding": "zstd"}
        return self.http.post("forward_backward", content=body, headers=headers)

    def forward_backward(
        self, model_id: str, seq_id: int, data: Sequence[pb.Datum], *, loss_fn: str = "cross_entropy", **fields: Any
    ) -> str:
        """The request id. `fields`: loss_fn_config, forward_only."""
        body = self.forward_backward_body(model_id, seq_id, data, loss_fn=loss_fn, **fields)
        return self.request_id(self.post_forward_backward(body))

    def optim_step(self, model_id: str, seq_id: int, **adam_params: float) -> str:
        """The request id."""
        params = {"learning_rate": 1e-3, **adam_params}
        return self.request_id(self.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params=params))

    # Answers

    def request_id(self, response: httpx.Response) -> str:
        return self._ok(response)["request_id"]

    def _ok(self, response: httpx.Response) -> Result:
        assert response.status_code == 200, f"{response.status_code}: {response.text}"
        return response.json()

    def poll(self, request_id: str, *, accept: str = "application/json") -> httpx.Response:
        """One long poll."""
        body = {"request_id": request_id, "allow_metadata_only": False}
        return self.http.post("retrieve_future", json=body, headers={"Accept": accept})

    def _finished(self, request_id: str, *, accept: str) -> httpx.Response:
        """Raises Failed for a failed future."""
        while True:
            response = self.poll(request_id, accept=accept)
            if response.status_code == 200 and response.headers["content-type"].startswith("application/json"):
                body = self._ok(response)
                if body.get("type") == "try_again":
                    continue
                if "error" in body:
                    raise Failed(body["error"], body["category"])
            assert response.status_code == 200, f"{response.status_code}: {response.text}"
            return response

    def json_result(self, request_id: str) -> Result:
        return self._finished(request_id, accept="application/json").json()

    def output(self, request_id: str) -> pb.ForwardBackwardOutput:
        """Result of a forward_backward."""
        return self._parse(request_id, pb.ForwardBackwardOutput())

    def sampled(self, request_id: str) -> pb.SampleResponse:
        """Result of a sample."""
        return self._parse(request_id, pb.SampleResponse())

    def _parse(self, request_id: str, message: M) -> M:
        response = self._finished(request_id, accept=_PROTOBUF)
        assert response.headers["content-type"].startswith(_PROTOBUF)
        message.ParseFromString(response.content)
        return message

    def grad_norm(self, request_id: str) -> float:
        """Gradient norm of an optim_step."""
        return self.json_result(request_id)["metrics"]["grad_norm:mean"]

    # Others

    def metrics(self, url: str) -> Mapping[str, float]:
        """Value of each sample, by its name with its labels as Prometheus writes them."""
        lines = self.http.get(url).text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
