"""Every hostile request that is known, all at once, against a server with its defaults, beside 16 good clients.

A good client sees no error, and waits no longer than WAIT_LIMIT_S for any answer. A hostile one sees a refusal that
says why, and never a 5xx. docs/security.md names what each of them attacks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb

from tests.support.examples import BASE_MODEL, NUM_WORDS
from tests.support.stack import Stack
from tests.support.wire import Failed, Wire, datum

NUM_GOOD_CLIENTS = 16
WAIT_LIMIT_S = 1.0
QUIET_S = 10.0
"""How long the good clients are alone, which tells how long they wait on this machine in any case."""
REFUSED = {400, 404, 413, 422, 429}
GOOD_KEY, HOSTILE_KEY = "tml-good", "tml-hostile"
MB = 10**6


@dataclass(frozen=True, slots=True)
class Waits:
    """Longest wait of the good clients before and during the attack, in seconds, by operation."""

    before: dict[str, float]
    during: dict[str, float]

    def excess(self) -> float:
        """The longest wait over its limit. A machine on which the good clients alone wait for long tells nothing about
        the attack."""
        return max(self.during.values()) / max(WAIT_LIMIT_S, 5 * max(self.before.values()))


@dataclass(slots=True)
class Neighbours:
    """16 good clients in a process of their own, so that they do not wait for this one's work.

    Without the SDK's telemetry. Its first batch, 10 s after a client began, makes a TLS context, which reads all
    authorities: on the one event loop that 16 clients of a process share, this is half a second in which none sends.
    """

    waits: list[tuple[float, str, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

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
        self.waits, self.errors = found["waits"], found["errors"]

    def longest(self, since: float, until: float) -> dict[str, float]:
        """Seconds, by operation, of those that were under way between the two moments."""
        longest: dict[str, float] = {}
        for began, operation, seconds in self.waits:
            if began + seconds >= since and began <= until:
                longest[operation] = max(longest.get(operation, 0.0), seconds)
        return longest


class Hostile:
    """A client with a session, a model and a sampling session of its own. Answers are statuses and errors, as texts."""

    def __init__(self, base_url: str) -> None:
        self.wire = Wire(base_url)
        self.wire.http.headers["X-API-Key"] = HOSTILE_KEY
        self.base_url = base_url
        self.session_id = self.wire.session()
        self.model_id = self.wire.model(self.session_id, base_model=BASE_MODEL)
        body = {"session_id": self.session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        self.sampling_session_id = self.wire.post("create_sampling_session", **body).json()["sampling_session_id"]
        self.seq_ids = count(1)

    def close(self) -> None:
        self.wire.post(f"sessions/{self.session_id}/finish", reason={"type": "success"})
        self.wire.http.close()

    def end_of(self, response: httpx.Response) -> str:
        """The outcome of a submission: "200", or its error."""
        if response.status_code != 200:
            return f"{response.status_code} {response.text[:300]}"
        try:
            self.wire.json_result(response.json()["request_id"])
        except Failed as failed:
            return str(failed)
        return "200"

    def train(self, data: Sequence[pb.Datum], **fields: Any) -> httpx.Response:
        body = self.wire.forward_backward_body(self.model_id, next(self.seq_ids), data, **fields)
        return self.wire.post_forward_backward(body, zstd=True)

    def step(self, **adam_params: float) -> httpx.Response:
        params = {"learning_rate": 1e-3, **adam_params}
        return self.wire.post("optim_step", model_id=self.model_id, seq_id=next(self.seq_ids), adam_params=params)

    def sample(self, seq_id: int, tokens: Sequence[int], **fields: Any) -> httpx.Response:
        params = {"max_tokens": 1, "stop": [], **fields.pop("params", {})}
        asked = {
            "sampling_session_id": self.sampling_session_id,
            "seq_id": seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
            "sampling_params": params,
        }
        return self.wire.post("asample", **{**asked, **fields})

    def poll(self, clone_id: int) -> httpx.Response:
        """Asks for completed samples as one more client of the sampling session, and does not wait."""
        target = {
            "type": "sampling_session",
            "sampling_session_id": self.sampling_session_id,
            "cloned_sampler_id": clone_id,
        }
        return self.wire.post("retrieve_futures", target=target, timeout=0)

    def openai(self, content: bytes) -> httpx.Response:
        headers = {"Authorization": f"Bearer {HOSTILE_KEY}", "Content-Type": "application/json"}
        with httpx.Client(timeout=120, trust_env=False) as http:
            return http.post(f"{self.base_url}/v1/completions", content=content, headers=headers)


def wide_targets() -> pb.Datum:
    """One value in a sparse matrix of 1 x 67,108,864 targets: 256 MB as logprobs."""
    csr = pb.SparseCsr(crow_indices=np.array([0, 1], "<i8").tobytes(), col_indices=np.array([0], "<i8").tobytes())
    csr.values = np.array([5], "<i8").tobytes()
    made = datum([5], weights=[1.0])
    made.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_INT64, shape=[1, 2**26]))
    return made


def policy(logprob: float) -> pb.Datum:
    return datum([5, 6], target_tokens=[6, 7], logprobs=[logprob] * 2, advantages=[1.0, 1.0])


# Each attack returns what the server said.


def targets_of_millions_of_columns(hostile: Hostile) -> list[str]:
    ends = [hostile.end_of(hostile.train([wide_targets()])) for _ in range(8)]
    assert all("target_tokens" in end for end in ends), ends
    return ends


def steps_that_divide_by_zero(hostile: Hostile) -> list[str]:
    hostile.end_of(hostile.train([datum([5, 6], target_tokens=[6, 7], weights=[0.0, 0.0])]))
    end = hostile.end_of(hostile.step(eps=0.0))
    assert "eps" in end
    return [end]


def gradients_that_overflow(hostile: Hostile) -> list[str]:
    hostile.end_of(hostile.train([policy(-87.0)], loss_fn="importance_sampling"))
    return [hostile.end_of(hostile.step())]


def bodies_that_unpack_to_gigabytes(hostile: Hostile) -> list[str]:
    """64 of 17 MB each, 2 kB on the wire: 4,096 texts of 256 equal tokens.

    The texts are short, because nobody overtakes a pass of the base model, and the longest one allowed takes as long
    as it takes on this machine, whoever sent it.
    """
    tokens = [5] * 256
    data = [datum(tokens, target_tokens=tokens, weights=np.ones(256, np.float32))] * 4096
    return [f"{hostile.train(data).status_code}" for _ in range(64)]


def token_ids_that_do_not_exist(hostile: Hostile) -> list[str]:
    ids = np.random.default_rng(0).integers(10**6, 10**9, size=4_000_000)
    body = b'{"model": "%s", "max_tokens": 1, "prompt": [%s]}' % (
        BASE_MODEL.encode(),
        b",".join(b"%d" % token for token in ids.tolist()),
    )
    return [f"{hostile.openai(body).status_code}" for _ in range(2)]


def a_body_of_unknown_keys(hostile: Hostile) -> list[str]:
    keys = b",".join(b'"key%d": 1' % number for number in range(300_000))
    body = b'{"model": "%s", "max_tokens": 1, "prompt": "hello", %s}' % (BASE_MODEL.encode(), keys)
    answers = [hostile.openai(body)]
    sessions = b'{"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", %s}' % keys
    json_type = {"Content-Type": "application/json"}
    answers.append(hostile.wire.http.post("create_session", content=sessions, headers=json_type))
    return [f"{answer.status_code}" for answer in answers]


def steps_of_models_that_do_not_exist(hostile: Hostile) -> list[str]:
    params = {"learning_rate": 1e-3}
    return [
        f"{hostile.wire.post('optim_step', model_id=f'{n}:train:0', seq_id=1, adam_params=params).status_code}"
        for n in range(200)
    ]


def numbers_that_no_column_holds(hostile: Hostile) -> list[str]:
    answers = [
        hostile.sample(2**62, [5, 6]),
        hostile.sample(2**70, [5, 6]),
        hostile.poll(2**53 - 1),
        hostile.poll(2**63),
        hostile.wire.post("optim_step", model_id=hostile.model_id, seq_id=2**63, adam_params={"learning_rate": 1e-3}),
        hostile.wire.post("optim_step", model_id=hostile.model_id, seq_id=2**70, adam_params={"learning_rate": 1e-3}),
    ]
    return [f"{answer.status_code}" for answer in answers]


def clones_without_end(hostile: Hostile) -> list[str]:
    return [f"{hostile.poll(number).status_code}" for number in range(1, 500)]


def ranks_that_no_sampler_serves(hostile: Hostile) -> list[str]:
    answers = [
        hostile.wire.post(
            "create_model",
            session_id=hostile.session_id,
            model_seq_id=number,
            base_model=BASE_MODEL,
            lora_config={"rank": rank},
        )
        for number, rank in enumerate((257, 10**6, 2**62), start=1)
    ]
    ends = [hostile.end_of(answer) for answer in answers]
    assert all("rank" in end for end in ends), ends
    return ends


def scorings_of_long_prompts(hostile: Hostile) -> list[str]:
    """300 at once, each of 512 tokens."""
    prompts = np.random.default_rng(1).integers(NUM_WORDS, size=(300, 512)).tolist()
    with ThreadPoolExecutor(16) as threads:
        answers = threads.map(
            lambda n: hostile.sample(10 + n, prompts[n], prompt_logprobs=True, params={"max_tokens": 1}),
            range(len(prompts)),
        )
        return [f"{answer.status_code}" for answer in answers]


def dashboards_in_many_tabs(hostile: Hostile) -> list[str]:
    address = f"{hostile.base_url}/dashboard/api/overview"
    headers = {"X-API-Key": HOSTILE_KEY}

    def tab(_: int) -> str:
        with httpx.Client(timeout=30, trust_env=False, headers=headers) as http:
            return f"{[http.get(address).status_code for _ in range(20)][-1]}"

    with ThreadPoolExecutor(5) as threads:
        return list(threads.map(tab, range(5)))


def bodies_that_never_end(hostile: Hostile) -> list[str]:
    """48 connections that each announce 60 MB and send 8 MB: 384 MB that nobody will ever use."""
    host, port = urlsplit(hostile.base_url).hostname, urlsplit(hostile.base_url).port
    head = (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: {host}:{port}\r\nX-API-Key: {HOSTILE_KEY}\r\n"
        "Content-Type: application/x-protobuf\r\nContent-Length: 60000000\r\n\r\n"
    )
    opened = []
    for _ in range(48):
        connection = socket.create_connection((host, port), timeout=5)
        opened.append(connection)
        try:
            connection.sendall(head.encode() + b"\0" * 8 * MB)
        except OSError:  # refused, or not read any more
            continue
    time.sleep(2)
    for connection in opened:
        connection.close()
    return ["200"]


ATTACKS: list[Callable[[Hostile], list[str]]] = [
    targets_of_millions_of_columns,
    steps_that_divide_by_zero,
    gradients_that_overflow,
    bodies_that_unpack_to_gigabytes,
    token_ids_that_do_not_exist,
    a_body_of_unknown_keys,
    steps_of_models_that_do_not_exist,
    numbers_that_no_column_holds,
    clones_without_end,
    ranks_that_no_sampler_serves,
    scorings_of_long_prompts,
    dashboards_in_many_tabs,
    bodies_that_never_end,
]


def yield_the_cores() -> None:
    """Attackers compute elsewhere in life: their own work must not take this machine's cores from the server. Linux may
    divide the cores among sessions, so the process gets one of its own, of the lowest priority."""
    os.setsid()
    os.nice(19)
    with suppress(OSError):  # this kernel does not group by session
        Path("/proc/self/autogroup").write_text("19")


def attack(base_url: str, run: Callable[[Hostile], list[str]]) -> list[str]:
    hostile = Hostile(base_url)
    try:
        return run(hostile)
    finally:
        hostile.close()


def attack_all_at_once(base_url: str) -> dict[str, list[str]]:
    """The answers of the server, by attack."""
    with ThreadPoolExecutor(len(ATTACKS)) as threads:
        running = {one.__name__: threads.submit(attack, base_url, one) for one in ATTACKS}
        return {name: attack.result() for name, attack in running.items()}


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """With its defaults, and a key for each of the two owners."""
    flags = ["--api-key", GOOD_KEY, "--api-key", HOSTILE_KEY]
    folder = tmp_path_factory.mktemp("hostile")
    with Stack(folder, base_models=[f"{BASE_MODEL}={model}"], flags=flags, threads=None) as stack:
        yield stack


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hostile_requests_all_at_once_disturb_no_good_client(stack: Stack) -> None:
    """Attacked a second time where the first waits were too long: something else may have taken the machine then."""
    first = attacked(stack)
    assert first.excess() <= 1 or attacked(stack).excess() <= 1


def attacked(stack: Stack) -> Waits:
    """Waits of the good clients; asserts that they see no error, and the hostile ones no 5xx."""
    neighbours = Neighbours()
    spawn = multiprocessing.get_context("spawn")
    attackers = ProcessPoolExecutor(1, spawn, initializer=yield_the_cores)
    with attackers, neighbours.running(stack):
        attackers.submit(os.getpid).result()  # it has started
        quiet = time.monotonic()
        time.sleep(QUIET_S)
        began = time.monotonic()
        said = attackers.submit(attack_all_at_once, stack.base_url).result()
        ended = time.monotonic()
        time.sleep(2.0)
    waits = Waits(neighbours.longest(quiet, began), neighbours.longest(began, ended))
    print(f"{ended - began:.1f} s; {waits}")
    assert neighbours.errors == []
    for name, answers in said.items():
        bad = [answer for answer in answers if answer[:1] == "5" and answer[:3].isdigit()]
        assert not bad, (name, bad)
    assert set(waits.during) == {"forward_backward", "optim_step", "sample"}
    return waits
