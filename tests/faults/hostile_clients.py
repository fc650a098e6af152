"""Hostile clients of one server: every hostile request that is known, over HTTP and over gRPC to trainer and sampler.

docs/security.md names what each of them attacks. `make_requests` makes them all, and `send_all_at_once` sends them;
both belong to the process of `attackers`. `Neighbours` is 16 good clients in another one.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc.aio
import numpy as np
import uvloop
import zstandard
from google.protobuf.message import Message
from tinker.proto import tinker_public_pb2 as pb

from tests.support import batches
from tests.support.examples import BASE_MODEL, NUM_WORDS
from tests.support.stack import Stack
from tests.support.wire import Failed, Wire, datum
from tinsmith.v1 import sampler_pb2, trainer_pb2, types_pb2
from tinsmith.v1.sampler_pb2_grpc import SamplerServiceStub
from tinsmith.v1.trainer_pb2_grpc import TrainerServiceStub

NUM_GOOD_CLIENTS = 16
CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1)]
TRAINER_VERBS = {"CreateModel", "DeleteModel", "ForwardBackward", "OptimStep"}
GOOD_KEY, HOSTILE_KEY = "tml-good", "tml-hostile"
KEY_FLAGS = ["--api-key", GOOD_KEY, "--api-key", HOSTILE_KEY]
"""A key for each of the two owners."""
MB = 10**6
JSON, PROTOBUF = "application/json", "application/x-protobuf"

Request = Callable[[], Coroutine[Any, Any, str]]
"""Sends a request that is made already, on a connection of its own. Its result is the status, or the operation's
error."""


@dataclass(slots=True)
class Neighbours:
    """16 good clients in a process of their own, so that they do not wait for this one's work.

    Without the SDK's telemetry. Its first batch, 10 s after a client began, makes a TLS context, which reads all
    authorities: on the one event loop that 16 clients of a process share, this is half a second in which none sends.
    """

    waits: list[tuple[float, str, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    runs: list[tuple[int, int, str]] = field(default_factory=list)

    @contextmanager
    def running(self, stack: Stack) -> Iterator[None]:
        command = [sys.executable, "-m", "tests.faults.good_clients", stack.base_url]
        process = subprocess.Popen(
            [*command, "--clients", str(NUM_GOOD_CLIENTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TINKER_API_KEY": GOOD_KEY, "TINKER_TELEMETRY": "0"},
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            output, _ = process.communicate(timeout=120)
        found = json.loads(output.splitlines()[-1])
        self.waits, self.errors, self.runs = found["waits"], found["errors"], found["runs"]

    def during(self, began: float, ended: float) -> list[tuple[float, str, float]]:
        """Waits that were under way between the two moments."""
        return [wait for wait in self.waits if wait[0] + wait[2] >= began and wait[0] <= ended]


class Hostile:
    """A client with a session, a model and a sampling session of its own. It makes requests, and sends none of them."""

    def __init__(self, base_url: str, trainer: str, sampler: str) -> None:
        """`trainer` and `sampler`: their addresses for gRPC."""
        self.trainer, self.sampler = trainer, sampler
        self.wire = Wire(base_url, api_key=HOSTILE_KEY)
        self.address = urlsplit(base_url).netloc
        self.session_id = self.wire.session()
        self.model_id = self.wire.model(self.session_id, base_model=BASE_MODEL)
        body = {"session_id": self.session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        self.sampling_session_id = self.wire.post("create_sampling_session", **body).json()["sampling_session_id"]
        self.seq_ids = count(1)
        self.grpc_model_id = f"grpc-{self.session_id}"
        self.grpc_seq_ids = count(1)

    def close(self) -> None:
        self.wire.post(f"sessions/{self.session_id}/finish", reason={"type": "success"})
        self.wire.http.close()
        asyncio.run(self.call(trainer_pb2.DeleteModelRequest(model_id=self.grpc_model_id))())

    def request(
        self,
        path: str,
        content: bytes | None = None,
        *,
        says: str | None = None,
        tries_again: bool = False,
        **headers: str,
    ) -> Request:
        """POST of the content, GET without. Its answer is the status. With `says` it is the end of the operation, whose
        error must contain that text; "" stands for any end. `tries_again`: after a 503, as the SDK does."""
        headers = {
            "Host": self.address,
            "X-API-Key": HOSTILE_KEY,
            "Authorization": f"Bearer {HOSTILE_KEY}",
            "Content-Type": JSON,
            "Content-Length": str(len(content or b"")),
            "Connection": "close",
            **headers,
        }
        lines = [f"{'GET' if content is None else 'POST'} {path} HTTP/1.1", *map(": ".join, headers.items())]
        sent = "\r\n".join([*lines, "", ""]).encode() + (content or b"")

        async def send() -> str:
            try:
                async with asyncio.timeout(120), self.connection() as (reader, writer):
                    writer.write(sent)
                    head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            except ConnectionError:
                return "refused, and the connection was closed before its answer could be read"
            status = head.split(b" ", 2)[1].decode()
            if status == "503" and tries_again:
                await asyncio.sleep(1)
                return await send()
            if says is None or status != "200":
                assert not says or status == "429", (path, status, body[:300])
                return f"{status} {body[:300]!r}"
            end = "200"
            try:
                await asyncio.to_thread(self.wire.json_result, json.loads(body)["request_id"])
            except Failed as failed:
                end = str(failed)
            assert says in end, (path, end)
            return end

        return send

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A new connection to the gateway."""
        host, port = self.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.close()

    def json(self, endpoint: str, *, says: str | None = None, **body: Any) -> Request:
        return self.request(f"/api/v1/{endpoint}", json.dumps(body).encode(), says=says)

    def train(
        self,
        data: Sequence[pb.Datum],
        *,
        more: bytes = b"",
        says: str | None = None,
        tries_again: bool = False,
        **fields: Any,
    ) -> Request:
        """`more`: a serialized request, which protobuf merges with the fields that are given."""
        body = self.wire.forward_backward_body(self.model_id, next(self.seq_ids), data, **fields) + more
        headers = {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
        content = zstandard.compress(body)
        return self.request("/api/v1/forward_backward", content, says=says, tries_again=tries_again, **headers)

    def step(self, *, seq_id: int | None = None, says: str | None = None, **adam_params: float) -> Request:
        params = {"learning_rate": 1e-3, **adam_params}
        seq_id = next(self.seq_ids) if seq_id is None else seq_id
        return self.json("optim_step", says=says, model_id=self.model_id, seq_id=seq_id, adam_params=params)

    def sample(self, seq_id: int, tokens: Sequence[int], **fields: Any) -> Request:
        return self.json(
            "asample",
            sampling_session_id=self.sampling_session_id,
            seq_id=seq_id,
            num_samples=1,
            prompt={"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
            sampling_params={"max_tokens": 1, "stop": []},
            **fields,
        )

    def poll(self, clone_id: int) -> Request:
        """Asks for completed samples as one more client of the sampling session, and does not wait."""
        target = {
            "type": "sampling_session",
            "sampling_session_id": self.sampling_session_id,
            "cloned_sampler_id": clone_id,
        }
        return self.json("retrieve_futures", target=target, timeout=0)

    def call(self, message: Message, *, says: str | None = None, timeout_s: float = 120.0) -> Request:
        """The RPC of this request message, on a channel of its own. Its answer is the status and its text. `says`: as
        for `request`."""
        verb = type(message).__name__.removesuffix("Request")
        of_trainer = verb in TRAINER_VERBS

        async def send() -> str:
            key = (("x-api-key", HOSTILE_KEY),)
            address = self.trainer if of_trainer else self.sampler
            async with grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
                stub: Any = (TrainerServiceStub if of_trainer else SamplerServiceStub)(channel)
                try:
                    await getattr(stub, verb)(message, timeout=timeout_s, metadata=key)
                    end = "OK"
                except grpc.aio.AioRpcError as error:
                    end = f"{error.code().name} {error.details()}"
            assert not says or says in end or end.startswith("RESOURCE_EXHAUSTED"), (verb, end)
            return end

        return send

    def creation(self) -> Message:
        """The request that makes the model for gRPC."""
        lora = types_pb2.LoraConfig(rank=4, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
        return trainer_pb2.CreateModelRequest(model_id=self.grpc_model_id, base_model=BASE_MODEL, lora_config=lora)

    def grpc_batch(self, data: Sequence[types_pb2.Datum], **fields: Any) -> Message:
        return batches.request(data, model_id=self.grpc_model_id, seq_id=next(self.grpc_seq_ids), **fields)

    def grpc_step(self, *, seq_id: int | None = None, model_id: str | None = None, **adam_params: float) -> Message:
        return trainer_pb2.OptimStepRequest(
            model_id=self.grpc_model_id if model_id is None else model_id,
            seq_id=next(self.grpc_seq_ids) if seq_id is None else seq_id,
            adam_params=trainer_pb2.AdamParams(**adam_params),
        )


def wide_targets() -> pb.Datum:
    """One value in a sparse matrix of 1 x 67,108,864 targets: 256 MB as logprobs."""
    csr = pb.SparseCsr(crow_indices=np.array([0, 1], "<i8").tobytes(), col_indices=np.array([0], "<i8").tobytes())
    csr.values = np.array([5], "<i8").tobytes()
    made = datum([5], weights=[1.0])
    made.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_INT64, shape=[1, 2**26]))
    return made


def policy(logprob: float) -> pb.Datum:
    return datum([5, 6], target_tokens=[6, 7], logprobs=[logprob] * 2, advantages=[1.0, 1.0])


# Each attack makes the requests that it will send.


def targets_of_millions_of_columns(hostile: Hostile) -> list[Request]:
    return [hostile.train([wide_targets()], says="target_tokens") for _ in range(8)]


def steps_that_divide_by_zero(hostile: Hostile) -> list[Request]:
    data = [datum([5, 6], target_tokens=[6, 7], weights=[0.0, 0.0])]
    return [hostile.train(data, says=""), hostile.step(eps=0.0, says="eps")]


def gradients_that_overflow(hostile: Hostile) -> list[Request]:
    return [hostile.train([policy(-87.0)], loss_fn="importance_sampling", says=""), hostile.step(says="")]


def bodies_that_unpack_to_megabytes(hostile: Hostile) -> list[Request]:
    """16 of 17 MB each, 2 kB on the wire: 4,096 texts of 256 equal tokens.

    The texts are short, because nobody overtakes a pass of the base model, and the longest one allowed takes as long
    as it takes on this machine, whoever sent it.
    """
    tokens = [5] * 256
    one = datum(tokens, target_tokens=tokens, weights=np.ones(256, np.float32))
    data = pb.ForwardBackwardRequest(data=[one] * 4096).SerializeToString()
    # Where cores are scarce, the trainer does not read all of them within the gateway's submit_timeout_s.
    return [hostile.train([], more=data, tries_again=True) for _ in range(16)]


def token_ids_that_do_not_exist(hostile: Hostile) -> list[Request]:
    ids = np.random.default_rng(0).integers(10**6, 10**9, size=4_000_000)
    body = b'{"model": "%s", "max_tokens": 1, "prompt": [%s]}' % (
        BASE_MODEL.encode(),
        b",".join(b"%d" % token for token in ids.tolist()),
    )
    return [hostile.request("/v1/completions", body)] * 2


def a_body_of_unknown_keys(hostile: Hostile) -> list[Request]:
    keys = b",".join(b'"key%d": 1' % number for number in range(300_000))
    body = b'{"model": "%s", "max_tokens": 1, "prompt": "hello", %s}' % (BASE_MODEL.encode(), keys)
    session = b'{"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", %s}' % keys
    return [hostile.request("/v1/completions", body), hostile.request("/api/v1/create_session", session)]


def steps_of_models_that_do_not_exist(hostile: Hostile) -> list[Request]:
    params = {"learning_rate": 1e-3}
    return [hostile.json("optim_step", model_id=f"{n}:train:0", seq_id=1, adam_params=params) for n in range(200)]


def numbers_that_no_column_holds(hostile: Hostile) -> list[Request]:
    return [
        hostile.sample(2**62, [5, 6]),
        hostile.sample(2**70, [5, 6]),
        hostile.poll(2**53 - 1),
        hostile.poll(2**63),
        hostile.step(seq_id=2**63),
        hostile.step(seq_id=2**70),
    ]


def clones_without_end(hostile: Hostile) -> list[Request]:
    return [hostile.poll(number) for number in range(1, 500)]


def ranks_that_no_sampler_serves(hostile: Hostile) -> list[Request]:
    return [
        hostile.json(
            "create_model",
            says="rank",
            session_id=hostile.session_id,
            model_seq_id=number,
            base_model=BASE_MODEL,
            lora_config={"rank": rank},
        )
        for number, rank in enumerate((257, 10**6, 2**62), start=1)
    ]


def scorings_of_long_prompts(hostile: Hostile) -> list[Request]:
    """100, each of 512 tokens."""
    prompts = np.random.default_rng(1).integers(NUM_WORDS, size=(100, 512)).tolist()
    return [hostile.sample(10 + n, prompt, prompt_logprobs=True) for n, prompt in enumerate(prompts)]


def dashboards_in_many_tabs(hostile: Hostile) -> list[Request]:
    return [hostile.request("/dashboard/api/overview")] * 100


def bodies_that_never_end(hostile: Hostile) -> list[Request]:
    """48 connections that each announce 60 MB and send 8 MB: 384 MB that nobody will ever use."""
    head = (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: {hostile.address}\r\nX-API-Key: {HOSTILE_KEY}\r\n"
        f"Content-Type: {PROTOBUF}\r\nContent-Length: 60000000\r\n\r\n"
    ).encode()
    sent = head + b"\0" * 8 * MB

    async def send() -> str:
        with suppress(OSError, TimeoutError):  # if it is refused, or not read any more
            async with asyncio.timeout(7), hostile.connection() as (reader, writer):
                writer.write(sent)
                await reader.read(-1)
        return "200"

    return [send] * 48


# Over gRPC.


def grpc_targets_of_millions_of_columns(hostile: Hostile) -> list[Request]:
    asyncio.run(hostile.call(hostile.creation())())
    return [hostile.call(hostile.grpc_batch([batches.wide(2**26)]), says="target_tokens") for _ in range(8)]


def grpc_batches_of_many_tokens(hostile: Hostile) -> list[Request]:
    """Eight of 262,144 tokens, 4 MB, of which nobody waits for the end."""
    asyncio.run(hostile.call(hostile.creation())())
    tokens = [5] * 256
    one = batches.datum(tokens, target_tokens=np.array(tokens), weights=np.ones(256, np.float32))
    return [hostile.call(hostile.grpc_batch([one] * 1024), timeout_s=10.0) for _ in range(8)]


def grpc_steps_that_cannot_be_made(hostile: Hostile) -> list[Request]:
    """200 of models that do not exist, 200 far ahead of the next one, and one that divides by 0."""
    asyncio.run(hostile.call(hostile.creation())())
    return [
        hostile.call(hostile.grpc_step(eps=0.0), says="eps"),
        *(hostile.call(hostile.grpc_step(model_id=f"nobody-{n}", seq_id=1), says="nobody") for n in range(200)),
        *(hostile.call(hostile.grpc_step(seq_id=2 * 10**9 + n), says="seq_id") for n in range(200)),
    ]


def grpc_long_samples(hostile: Hostile) -> list[Request]:
    """20 of 1,024 sequences each and 20 scored prompts, of 512 tokens, of which nobody waits for the end."""
    prompts = np.random.default_rng(2).integers(NUM_WORDS, size=(40, 512)).tolist()
    made = []
    for number, prompt in enumerate(prompts):
        request = sampler_pb2.SampleRequest(prompt=batches.datum(prompt).model_input, num_samples=1)
        request.sampling_params.max_tokens = 1
        if number % 2:
            request.prompt_logprobs, request.topk_prompt_logprobs = True, 128
        else:
            request.num_samples, request.sampling_params.max_tokens = 1024, 400
        made.append(hostile.call(request, timeout_s=10.0))
    return made


ATTACKS: list[Callable[[Hostile], list[Request]]] = [
    bodies_that_unpack_to_megabytes,
    targets_of_millions_of_columns,
    token_ids_that_do_not_exist,
    a_body_of_unknown_keys,
    steps_that_divide_by_zero,
    gradients_that_overflow,
    bodies_that_never_end,
    scorings_of_long_prompts,
    steps_of_models_that_do_not_exist,
    numbers_that_no_column_holds,
    clones_without_end,
    ranks_that_no_sampler_serves,
    dashboards_in_many_tabs,
    grpc_targets_of_millions_of_columns,
    grpc_batches_of_many_tokens,
    grpc_steps_that_cannot_be_made,
    grpc_long_samples,
]


HOSTILES: list[Hostile] = []
REQUESTS: dict[str, list[Request]] = {}
"""Both are filled in the attackers' process only."""


def make_requests(base_url: str, trainer: str, sampler: str) -> int:
    """Makes all bodies, before the attack. Returns the number of requests."""
    for attack in ATTACKS:
        HOSTILES.append(Hostile(base_url, trainer, sampler))
        REQUESTS[attack.__name__] = attack(HOSTILES[-1])
    return sum(map(len, REQUESTS.values()))


def send_all_at_once() -> dict[str, list[str]]:
    """The answers of the server, by attack."""
    answers = uvloop.run(_answers())
    for hostile in HOSTILES:
        hostile.close()
    return answers


async def _answers() -> dict[str, list[str]]:
    sent = {name: asyncio.gather(*(request() for request in made)) for name, made in REQUESTS.items()}
    return {name: await given for name, given in sent.items()}


def _comes_last() -> None:
    """Makes this process a session of its own, whose programs get a core when no other session wants it."""
    os.setsid()
    with suppress(OSError):  # the kernel does not divide the cores among sessions, or nobody may say how
        Path("/proc/self/autogroup").write_text("19")


@contextmanager
def attackers(stack: Stack) -> Iterator[ProcessPoolExecutor]:
    """A process that has made all requests, and is to call `send_all_at_once`. It sends from one thread with the lowest
    priority, because attackers on machines of their own would take no core from the services."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_comes_last) as process:
        addresses = (stack.base_url, stack.trainers[0], stack.samplers[0])
        print(f"{process.submit(make_requests, *addresses).result()} requests")
        yield process
