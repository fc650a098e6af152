"""Clients that are slow, and clients that die: nobody else notices, and nothing of them is left."""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest
import tinker

from tests.faults.cluster import Cluster
from tests.faults.moments import ALL_FAULTS, EVERY, in_mode, repeated
from tests.faults.runs import SEEDS, Outcome, check_all, run_all, under_way
from tests.support.examples import BASE_MODEL, random_tokens
from tests.support.waiting import wait_until
from tests.support.wire import Wire, logprobs, next_token_datum, pb
from tinsmith_cli.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SLOW_CLIENTS = 16
"""That send slowly, and as many that read slowly."""
PAUSE_S = 0.1
DEATHS = EVERY if ALL_FAULTS else 8
"""Requests of one repetition in whose middle a client dies."""
SESSION_TIMEOUT_S = 20.0
"""The SDK's heartbeats come every 10 s."""

BUSY_CLIENT = """
import sys, tinker
from pathlib import Path
from tests.faults.runs import run_all
with tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-test") as service:
    while True:
        run_all(service, Path(sys.argv[2]))
"""

SAMPLES_TIMEOUT_S = 8.0
"""Four polls of a client, each of 2 s."""
LONG_SAMPLES = 300
"""64 sequences of 100 tokens each: minutes of work."""

PENDING = 'gateway_pending_futures{kind="asample"}'

SAMPLING_CLIENT = """
import sys, tinker
from tests.support.examples import BASE_MODEL, PROMPT
params = tinker.SamplingParams(max_tokens=int(sys.argv[4]))
with tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-test") as service:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    prompt = tinker.ModelInput.from_ints(PROMPT)
    futures = [sampler.sample(prompt, int(sys.argv[3]), params) for _ in range(int(sys.argv[2]))]
    for future in futures:
        future.result()
"""


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def running(
    model: Path, tmp_path_factory: pytest.TempPathFactory, metrics_port: int, exactly: bool
) -> Iterator[Cluster]:
    trainer_env = {"TRAINER_METRICS_PORT": str(metrics_port), "TRAINER_DETERMINISTIC": str(exactly)}
    with Cluster(tmp_path_factory.mktemp("cluster"), model, num_samplers=1, trainer_env=trainer_env) as cluster:
        yield cluster


@pytest.fixture
def wire(cluster: Cluster) -> Iterator[Wire]:
    with Wire(cluster.url) as wire:
        yield wire


def num_models(metrics_port: int) -> float:
    lines = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", trust_env=False).text.splitlines()
    (value,) = (float(line.split()[1]) for line in lines if line.startswith("trainer_models "))
    return value


def num_open(cluster: Cluster) -> int:
    """Connections of clients that the gateway holds."""
    port = int(cluster.gateway.address.rpartition(":")[2])
    connections = psutil.Process(cluster.gateway.pid).net_connections(kind="tcp")
    return sum(one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in connections)


def connect(cluster: Cluster) -> socket.socket:
    """Takes little at once, so that what it does not read stays with the gateway."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, _, port = cluster.gateway.address.rpartition(":")
    raw.connect((host, int(port)))
    return raw


def http_request(cluster: Cluster, endpoint: str, body: bytes, content_type: str) -> bytes:
    lines = [
        f"POST /api/v1/{endpoint} HTTP/1.1",
        f"Host: {urlsplit(cluster.url).netloc}",
        "X-API-Key: tml-test",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Accept: application/json",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def json_of(reply: bytes) -> Any:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), reply[:500]
    return json.loads(body)


def send_slowly(raw: socket.socket, request: bytes, hurry: Event) -> bytes:
    """A byte at a time, until it is told to hurry. Returns the answer."""
    sent = 0
    while not hurry.wait(PAUSE_S):
        raw.sendall(request[sent : sent + 1])
        sent += 1
    assert sent < len(request), "it was not slow"
    raw.sendall(request[sent:])
    return read_all(raw)


def read_slowly(raw: socket.socket, request: bytes, hurry: Event) -> bytes:
    raw.sendall(request)
    reply = b""
    while not hurry.wait(PAUSE_S):
        reply += raw.recv(1)
    return reply + read_all(raw)


def read_all(raw: socket.socket) -> bytes:
    return b"".join(iter(lambda: raw.recv(65536), b""))


def data_of(n: int) -> list[pb.Datum]:
    tokens = random_tokens(200, n)
    return [next_token_datum(tokens, weights=np.ones(len(tokens) - 1, np.float32))]


@in_mode("deterministic")
@repeated
def test_slow_clients_delay_nobody(
    cluster: Cluster, service: tinker.ServiceClient, wire: Wire, undisturbed: list[Outcome], exactly: bool
) -> None:
    """While they send and read byte after byte, others train and sample; and they get what they have asked for."""
    model_id = wire.model(wire.session(), base_model=BASE_MODEL)
    answers = [wire.forward_backward(model_id, n, data_of(n), forward_only=True) for n in range(1, SLOW_CLIENTS + 1)]
    for answer in answers:
        wire.output(answer)
    sends = [
        http_request(
            cluster,
            "forward_backward",
            wire.forward_backward_body(model_id, n, data_of(n - SLOW_CLIENTS), forward_only=True),
            "application/x-protobuf",
        )
        for n in range(SLOW_CLIENTS + 1, 2 * SLOW_CLIENTS + 1)
    ]
    reads = [
        http_request(cluster, "retrieve_future", json.dumps({"request_id": one}).encode(), "application/json")
        for one in answers
    ]
    hurry = Event()
    sockets = [connect(cluster) for _ in range(2 * SLOW_CLIENTS)]
    with ThreadPoolExecutor(2 * SLOW_CLIENTS) as threads:
        try:
            sending = [
                threads.submit(send_slowly, raw, request, hurry)
                for raw, request in zip(sockets[:SLOW_CLIENTS], sends, strict=True)
            ]
            reading = [
                threads.submit(read_slowly, raw, request, hurry)
                for raw, request in zip(sockets[SLOW_CLIENTS:], reads, strict=True)
            ]
            check_all(run_all(service, cluster.checkpoints), undisturbed, exactly=exactly)
            assert not any(one.done() for one in (*sending, *reading))
        finally:
            hurry.set()
        read = [json_of(one.result()) for one in reading]
        sent = [json_of(one.result())["request_id"] for one in sending]
    for raw in sockets:
        raw.close()
    for answer, slowly, request_id in zip(answers, read, sent, strict=True):
        assert slowly == wire.json_result(answer)
        (mine,), (theirs,) = logprobs(wire.output(request_id)), logprobs(wire.output(answer))
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=0 if exactly else 1e-5)


@in_mode("deterministic")
@repeated
def test_a_request_whose_client_died_in_its_middle_is_submitted_again_and_counts_once(
    cluster: Cluster,
    wire: Wire,
    rng: random.Random,
    exactly: bool,
) -> None:
    """Some die while they send, and others before they read the answer. Gradients are those of a model whose clients
    live."""
    before = num_open(cluster)
    expected, model_id = (wire.model(wire.session(), base_model=BASE_MODEL) for _ in range(2))
    for n in range(1, DEATHS + 1):
        request = http_request(
            cluster, "forward_backward", wire.forward_backward_body(model_id, n, data_of(n)), "application/x-protobuf"
        )
        with closing(connect(cluster)) as raw:
            raw.sendall(request[: rng.choice([rng.randrange(len(request)), len(request)])])
            time.sleep(rng.choice([0, 0.02]))
            if rng.random() < 0.5:  # a reset, as when its machine is gone, instead of an end in good order
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for model in (expected, model_id):
        for n in range(1, DEATHS + 1):
            wire.output(wire.forward_backward(model, n, data_of(n)))
    norms = [wire.grad_norm(wire.optim_step(model, DEATHS + 1)) for model in (expected, model_id)]
    assert norms[1] == pytest.approx(norms[0], rel=0 if exactly else 1e-5, abs=0)
    wait_until(lambda: num_open(cluster) <= before + 1, what="no connection of the dead is left")
    wait_until(
        lambda: not any(value for name, value in cluster.metrics().items() if "pending_futures{" in name),
        what="nothing waits for the dead",
    )


@contextmanager
def busy_clients(cluster: Cluster, count: int) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-c", BUSY_CLIENT, cluster.url, str(cluster.checkpoints)]
    clients = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield clients
    finally:
        for client in clients:
            client.kill()
            client.wait()


@in_mode("deterministic")
@repeated
def test_clients_that_die_in_the_middle_of_training_leave_nothing(
    cluster: Cluster, metrics_port: int, undisturbed: list[Outcome], rng: random.Random, exactly: bool
) -> None:
    """Their sessions end for want of heartbeats, and what the trainer and the disk held for them is free again. The
    runs beside them, and those after them, end as if they had never been there."""
    cluster.gateway.restart({"GATEWAY_SESSION_TIMEOUT_S": str(SESSION_TIMEOUT_S), "GATEWAY_REAP_INTERVAL_S": "1"})
    wait_until(lambda: num_models(metrics_port) == 0, what="the models of other tests are gone")
    with busy_clients(cluster, 3) as clients:
        wait_until(lambda: num_models(metrics_port) >= len(SEEDS) * len(clients), what="all train")
        with (
            tinker.ServiceClient(base_url=cluster.url, api_key="tml-test") as service,
            under_way(service, cluster.checkpoints) as outcomes,
        ):
            for client in clients:
                time.sleep(rng.uniform(0, 1))
                client.send_signal(signal.SIGKILL)
            assert num_models(metrics_port) > len(SEEDS), "nothing of the dead is left already now"
            check_all(outcomes(), undisturbed, exactly=exactly)
    wait_until(lambda: num_models(metrics_port) == 0, what="their models are freed", limit_s=90)
    wait_until(
        lambda: not list(cluster.checkpoints.glob("*/ephemeral/*")), what="their unnamed saves are deleted", limit_s=30
    )
    with tinker.ServiceClient(base_url=cluster.url, api_key="tml-test") as service:
        check_all(run_all(service, cluster.checkpoints), undisturbed, exactly=exactly)


@contextmanager
def sampling_client(
    cluster: Cluster, *, requests: int, num_samples: int, tokens: int
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that samples, and returns 0 when it has all answers. The gateway has its requests already."""
    before = num_submitted(cluster)
    numbers = [str(number) for number in (requests, num_samples, tokens)]
    client = subprocess.Popen([sys.executable, "-c", SAMPLING_CLIENT, cluster.url, *numbers])
    try:
        wait_until(lambda: num_submitted(cluster) == before + requests, what="it samples")
        yield client
    finally:
        client.kill()
        client.wait()


def num_submitted(cluster: Cluster) -> float:
    """Samples that the gateway has taken, in work or ended."""
    ended = 'gateway_future_seconds_count{kind="asample",'
    metrics = cluster.metrics()
    return metrics.get(PENDING, 0.0) + sum(value for name, value in metrics.items() if name.startswith(ended))


@in_mode("deterministic")
def test_samples_of_a_client_that_is_killed_stop_and_one_that_comes_back_samples_again(cluster: Cluster) -> None:
    """The samples of a third client, which waits behind them and lives, are not touched."""
    cluster.gateway.restart(
        {
            "GATEWAY_SAMPLE_CLIENT_TIMEOUT_S": str(SAMPLES_TIMEOUT_S),
            "GATEWAY_LONG_POLL_S": "2",
            "GATEWAY_REAP_INTERVAL_S": "1",
        }
    )
    with (
        sampling_client(cluster, requests=LONG_SAMPLES, num_samples=64, tokens=100) as killed,
        sampling_client(cluster, requests=1, num_samples=64, tokens=100) as stopped,
        sampling_client(cluster, requests=1, num_samples=64, tokens=100) as alive,
    ):
        killed.send_signal(signal.SIGKILL)
        stopped.send_signal(signal.SIGSTOP)
        dropped = 'gateway_future_seconds_count{kind="asample",outcome="dropped"}'
        wait_until(lambda: cluster.metrics().get(PENDING, 0) <= 1, what="their samples are stopped")
        assert cluster.metrics()[dropped] > LONG_SAMPLES / 2
        assert alive.wait(30) == 0
        assert stopped.poll() is None
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(30) == 0
        assert cluster.metrics()[PENDING] == 0
