"""Known secrets, wherever a service takes one, are in nothing that real processes write or show at DEBUG.

Looked at are the whole output of `tinsmith up`, every file below its state folder (logs, the gateway's database and the
trainer's journal with their write-ahead logs, snapshots) and below its TMPDIR, the objects of its bucket, /metrics of
each service, the traces that are sent, and the command lines of all processes. Not the environment: there the secrets
are given, and the system shows it to the same user only.

Not asked here: what a client sends as a name (of a model, a session, a field, in a path) is told to it in the answer,
and may be in logs and traces, be it a key.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_connection
from typing import Any, ClassVar
from unittest import mock
from urllib.parse import urlsplit

import asyncpg
import grpc
import httpx
import psutil
import pytest
import tinker
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from tinker.types.generic_event import GenericEvent

from tests.faults.cluster import Cluster
from tests.support import warm_services
from tests.support.certificates import Made, make
from tests.support.examples import BASE_MODEL, PROMPT, batch, new_model, sample, train
from tests.support.postgres import running as running_postgres
from tests.support.round_robin import balanced
from tests.support.stack import Stack
from tests.support.stores import BUCKET, file_system, s3
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

KEY = "tml-known-api-key-0001"
GRPC_KEY = "tml-known-grpc-key-0002"
WRONG_KEY = "tml-known-wrong-key-0003"
JWT_SECRET = "known-jwt-secret-0004-" + "x" * 32
DOWNLOAD_SECRET = "known-download-secret-0005"
AWS_SECRET = "known-aws-secret-0006"
AWS_TOKEN = "known-aws-session-token-0007"
HUB_TOKEN = "hf_knownHubToken0008"
OTLP_TOKEN = "known-otlp-token-0009"
PASSWORD = "known-database-password-0010"
SERVICE_KEY = "known-service-key-0011"
"""Where a test starts the services itself; `tinsmith up` makes its own."""
ANY_JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9."
"""How every JWT of the gateway begins: {"alg":"HS256","typ":"JWT"}."""

SECRETS = {
    "KEY": KEY,
    "GRPC_KEY": GRPC_KEY,
    "WRONG_KEY": WRONG_KEY,
    "JWT_SECRET": JWT_SECRET[:21],  # a part is too much
    "DOWNLOAD_SECRET": DOWNLOAD_SECRET,
    "AWS_SECRET": AWS_SECRET,
    "AWS_TOKEN": AWS_TOKEN,
    "HUB_TOKEN": HUB_TOKEN,
    "OTLP_TOKEN": OTLP_TOKEN,
    "PASSWORD": PASSWORD,
    "SERVICE_KEY": SERVICE_KEY,
    "ANY_JWT": ANY_JWT,
}

SETTINGS = {
    "GATEWAY_API_KEYS": json.dumps([{"key": KEY, "name": "laptop", "note": "of the tests"}]),
    "TRAINER_API_KEYS": json.dumps([GRPC_KEY]),
    "SAMPLER_API_KEYS": json.dumps([GRPC_KEY]),
    "GATEWAY_JWT_AUTH": "true",
    "GATEWAY_JWT_SECRET": JWT_SECRET,
    "GATEWAY_DOWNLOAD_SECRET": DOWNLOAD_SECRET,
    "AWS_SECRET_ACCESS_KEY": AWS_SECRET,
    "AWS_SESSION_TOKEN": AWS_TOKEN,
    "HF_TOKEN": HUB_TOKEN,
    "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{OTLP_TOKEN}",
}
SERVICES = {"gateway": "gateway", "trainer": "trainer_service", "sampler": "sampler_service"}
"""Their logs and their modules."""

Places = dict[str, bytes]


def leaks(secrets: Mapping[str, str], places: Mapping[str, bytes]) -> list[str]:
    """The secrets that the places hold: "NAME in PLACE" for each."""
    return [f"{name} in {place}" for place, text in places.items() for name, secret in secrets.items()
            if secret.encode() in text]  # fmt: skip


def files(*folders: Path) -> Places:
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def command_lines(processes: Iterable[psutil.Process]) -> Places:
    return {f"command line of {process.pid}": " ".join(process.cmdline()).encode() for process in processes}


def private_keys(made: Made) -> dict[str, str]:
    """The first line of each, after its title."""
    return {path.name: path.read_text().splitlines()[1] for path in made.good.glob("*-key.pem")}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector of OpenTelemetry traces that keeps every request, with its metadata."""

    def __init__(self) -> None:
        self.received = b""
        self.authorizations: set[str] = set()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        self.received += request.SerializeToString()
        self.authorizations.add(dict(context.invocation_metadata()).get("authorization", ""))
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(None).wait()


@dataclass
class Subject:
    """A stack, and what is known of it."""

    stack: Stack
    made: Made
    collector: Collector
    secrets: dict[str, str]
    seen: Places = field(default_factory=dict)
    statuses: set[int] = field(default_factory=set)
    """Statuses of HTTP answers."""
    codes: set[grpc.StatusCode] = field(default_factory=set)

    def http(self, key: str) -> httpx.Client:
        def keep(response: httpx.Response) -> None:
            self.statuses.add(response.status_code)

        return httpx.Client(
            base_url=self.stack.base_url,
            headers={"x-api-key": key} if key else {},
            verify=ssl.create_default_context(cafile=self.made.good / "ca.pem"),
            timeout=60,
            trust_env=False,
            event_hooks={"response": [keep]},
        )

    def look_at_processes(self, when: str) -> None:
        processes = [psutil.Process(self.stack.process.pid), *self.stack.processes()]
        self.seen |= {f"{place}, {when}": text for place, text in command_lines(processes).items()}

    def look_at_metrics(self) -> None:
        with self.http("") as http:
            for service in SERVICES:
                self.seen[f"metrics of the {service}"] = http.get(self.stack.metrics_url(service)).content


def train_publish_and_sample(url: str, key: str) -> str:
    """The path of a checkpoint."""
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        client = new_model(service, rank=4)
        train(client, batch(1), steps=2)
        path = client.save_state("saved").result().path
        sample(client.save_weights_and_get_sampling_client().result(), PROMPT, max_tokens=3)
    return path


def ask_wrongly(subject: Subject, path: str) -> None:
    """Over HTTP: what is refused, what is broken, and a key where none belongs."""
    event = GenericEvent(event_id="e", event="GENERIC_EVENT", event_name="x", event_session_index=0,
                         severity="DEBUG", timestamp=datetime.now(UTC), event_data={"api_key": KEY})  # fmt: skip
    telemetry = {"session_id": "s", "platform": "linux", "sdk_version": "0", "events": [event.model_dump(mode="json")]}
    protobuf = {"content-type": "application/x-protobuf"}
    with subject.http(KEY) as http:
        assert http.post("/api/v1/telemetry", json=telemetry).status_code == 200
        token = http.post("/api/v1/auth/token", json={}).json()["jwt"]
        assert token.startswith(ANY_JWT)
        run, name = path.removeprefix("tinker://").split("/", 1)
        address = http.get(f"/api/v1/training_runs/{run}/checkpoints/{name}/archive").json()["url"]
        subject.secrets |= {"token": token, "signature": address.partition("signature=")[2]}
        for body in (f'{{"tags": "{KEY}"', f'["{KEY}"]', f'{{"tags": "{KEY}"}}', f'{{"unknown": "{KEY}"}}'):
            http.post("/api/v1/create_session", content=body)
        http.post("/api/v1/asample", json={"sampling_session_id": "s", "seq_id": 0, "prompt": KEY, "num_samples": 1})
        http.post("/api/v1/forward_backward", content=b"\xff" + KEY.encode(), headers=protobuf)
        http.post("/api/v1/forward_backward", content=KEY.encode(), headers=protobuf | {"content-encoding": "zstd"})
        http.post("/v1/chat/completions", json={"model": BASE_MODEL, "messages": KEY})
        for asked in ("/nowhere", "/api/v1/sessions", "/api/v1/training_runs/none", "/api/v1/samplers/none"):
            headers = {"cookie": KEY, "referer": f"https://example.org/?{KEY}", "user-agent": KEY}
            http.get(asked, params={"api_key": KEY}, headers=headers)
    with subject.http("") as http:
        assert http.get(address).status_code == 200
        http.get(address.replace("signature=", "signature=0"))
        http.get("/api/v1/sessions", headers={"authorization": f"Bearer {token}"})
        for headers in ({"x-api-key": WRONG_KEY}, {"authorization": f"Bearer {WRONG_KEY}"}, {"x-api-key": token[:-4]}):
            http.get("/api/v1/sessions", headers=headers)
    with pytest.raises(httpx.TransportError):  # in clear, to a port of HTTPS
        httpx.get(f"http{subject.stack.base_url.removeprefix('https')}/", headers={"x-api-key": KEY}, trust_env=False)
    where = urlsplit(subject.stack.base_url)
    context = ssl.create_default_context(cafile=subject.made.good / "ca.pem")
    with (
        create_connection((where.hostname or "", where.port or 0), 10) as plain,
        context.wrap_socket(plain, server_hostname=where.hostname) as encrypted,
    ):
        encrypted.sendall(f"GET /{KEY} HTTP/x\r\nx-api-key: {KEY}\r\n\r\n".encode())
        encrypted.recv(100)


def call_wrongly(subject: Subject) -> None:
    """Wrong calls straight over gRPC."""
    credentials = subject.made.certificates("client").client()
    services = {"Trainer": (subject.stack.trainers[0], "GetModel"), "Sampler": (subject.stack.samplers[0], "Sample")}
    for service, (address, method) in services.items():
        with grpc.secure_channel(address, credentials) as channel:
            call: Any = channel.unary_unary(f"/tinsmith.v1.{service}Service/{method}")
            a_name = b"\n\x04none"  # field 1
            for key, body in (
                ("", a_name),
                (WRONG_KEY, a_name),
                (KEY, a_name),  # good for the gateway only
                (GRPC_KEY, b"\xff" + GRPC_KEY.encode()),
                (GRPC_KEY, a_name),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call(body, metadata=[("x-api-key", key)] if key else [], timeout=60)
                subject.codes.add(refused.value.code())  # type: ignore[attr-defined]


def kill_all(subject: Subject) -> None:
    """With -9, one after the other; returns when all are back."""
    for number, module in enumerate(SERVICES.values(), start=1):
        (process,) = subject.stack.processes(module)
        process.kill()
        wait_until(
            lambda n=number: subject.stack.report().count(": ready again after") == n,
            what=f"{module} is started again",
            limit_s=120,
        )


@pytest.fixture
def subject(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    made = make(tmp_path / "certificates")
    monkeypatch.setenv("SSL_CERT_FILE", str(made.good / "ca.pem"))
    (tmp_path / "tmp").mkdir()
    command = ["keys", "create", "--owner", "bea", "--state-dir", str(tmp_path / "state")]
    done = subprocess.run([sys.executable, "-m", "tinsmith_cli", *command], capture_output=True, text=True, check=True)
    flags = ["--certificates", str(made.good), "--checkpoint-dir", f"s3://{BUCKET}/secrets"]
    flags += ["--log-level", "DEBUG", "--tracing"]
    with closing(Collector()) as collector, s3() as bucket, mock.patch.dict(os.environ, bucket):
        env = bucket | SETTINGS | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "TMPDIR": str(tmp_path / "tmp"),
        }  # fmt: skip
        with Stack(tmp_path / "state", base_models=[f"{BASE_MODEL}={toy}"], flags=flags, env=env) as stack:
            secrets = SECRETS | private_keys(made) | {"key of `keys create`": done.stdout.strip()}
            yield Subject(stack, made, collector, secrets)


DEBUG_LINE = '"level": "DEBUG"'
REACHED = {
    "command line of": ("--log-level DEBUG", "tinsmith_cli up", *SERVICES.values()),
    "metrics of": ("gateway_sampler_state", "sampler_kl_nats", "running_sequences"),
    "gateway.log": (
        DEBUG_LINE,
        "starting with",
        "asample: ok",
        "save_weights: ok",
        "Invalid HTTP request",
        "serves tests/",
    ),
    "trainer.log": (DEBUG_LINE, '"config: {', "forward_backward of", "save_checkpoint of", "weight group"),
    "sampler.log": (DEBUG_LINE, '"configuration: {', "is visible", "sample of version", "INVALID_REQUEST"),
    "gateway.db": ("bea", "saved"),
    "gateway.db-wal, at work": ("bea",),
    "journal.sqlite-wal, at work": (":train:0",),
    "output of `up`": ("Tinsmith is ready", "was killed by SIGKILL", "starting again"),
    "traces": ("tinsmith-gateway", "tinsmith-trainer", "tinsmith-sampler", "ForwardBackward"),
    "s3://": ("lora_alpha",),
}
"""Words that each kind of place must hold: they prove that the test wrote there, and that the search sees it."""


def test_no_secret_is_written_or_shown_by_any_process(subject: Subject, tmp_path: Path) -> None:
    stack, secrets = subject.stack, subject.secrets
    environments = [process.environ() for process in stack.processes()]
    for name, value in SETTINGS.items():
        assert all(environment[name] == value for environment in environments)
    made = {env["GATEWAY_SERVICE_KEY"] for env in environments if "GATEWAY_SERVICE_KEY" in env}
    (secrets["service key of `up`"],) = made
    subject.look_at_processes("at first")
    path = train_publish_and_sample(stack.base_url, KEY)
    train_publish_and_sample(stack.base_url, secrets["key of `keys create`"])
    ask_wrongly(subject, path)
    call_wrongly(subject)
    assert subject.statuses >= {200, 400, 401, 403, 404}
    codes = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert subject.codes == codes
    subject.look_at_metrics()
    subject.seen |= {f"{place}, at work": text for place, text in files(stack.state_dir, tmp_path / "tmp").items()}
    kill_all(subject)
    train_publish_and_sample(stack.base_url, KEY)
    subject.look_at_processes("in the end")
    stack.stop()

    subject.seen |= files(stack.state_dir, tmp_path / "tmp")
    subject.seen["output of `up`"] = stack.report().encode()
    subject.seen["traces"] = subject.collector.received
    objects = file_system("s3")
    subject.seen |= {f"s3://{name}": objects.cat_file(name) for name in objects.find(f"{BUCKET}/secrets")}
    for kind, markers in REACHED.items():
        places = {place: text for place, text in subject.seen.items() if kind in place}
        missing = [marker for marker in markers if not leaks({marker: marker}, places)]
        assert not missing, kind
    assert subject.collector.authorizations == {f"Bearer {OTLP_TOKEN}"}
    assert leaks(secrets, subject.seen) == []


# Gateways that share a database


def made_by_gateways(url: str) -> dict[str, str]:
    """The secrets in their database."""

    async def read() -> dict[str, str]:
        connection = await asyncpg.connect(url.replace("+asyncpg", ""))
        try:
            return {row["name"]: row["value"] for row in await connection.fetch("SELECT name, value FROM settings")}
        finally:
            await connection.close()

    found = asyncio.run(read())
    return {name: found[name] for name in ("jwt_secret", "download_secret", "peer_secret")}


def test_neither_are_the_secrets_of_gateways_that_share_a_database(toy: Path, tmp_path: Path) -> None:
    """The password of the database, also when it is away, and what the gateways make themselves and show each other."""
    with running_postgres() as postgres:
        url = postgres.new_database().replace("tests@", f"tests:{PASSWORD}@")
        envs = {
            service: {f"{service.upper()}_SERVICE_KEY": SERVICE_KEY, f"{service.upper()}_LOG_LEVEL": "DEBUG"}
            for service in SERVICES
        }
        settings = {"GATEWAY_DATABASE_URL": url, "GATEWAY_API_KEYS": json.dumps([KEY]), "GATEWAY_JWT_AUTH": "true"}
        cluster = Cluster(
            tmp_path,
            toy,
            num_samplers=1,
            num_gateways=2,
            trainer_env=envs["trainer"],
            sampler_env=envs["sampler"],
            gateway_env=envs["gateway"] | settings,
            forked=False,  # the command lines are looked at
        )
        with cluster:
            gateways = [f"http://{gateway.address}" for gateway in cluster.gateways]
            with balanced(gateways) as (address, balancer):
                train_publish_and_sample(address, KEY)
                assert min(balancer.num_sent) > 0
            secrets = SECRETS | made_by_gateways(url)
            assert all(len(secret) >= 20 for secret in secrets.values())
            lines = command_lines(psutil.Process(process.pid) for process in cluster.processes)
            metrics = {gateway: httpx.get(f"{gateway}/metrics", trust_env=False).content for gateway in gateways}
            postgres.stop()
            for gateway in gateways:
                asked = httpx.get(f"{gateway}/api/v1/sessions", headers={"x-api-key": KEY}, timeout=60, trust_env=False)
                assert asked.status_code == 503
            postgres.start()
    seen = files(tmp_path) | lines | metrics
    for log in ("gateway.log", "gateway-2.log", "trainer.log", "sampler-1.log"):
        assert leaks({"": DEBUG_LINE}, {"": seen[str(tmp_path / log)]}), log
    logs = {place: text for place, text in seen.items() if "gateway" in place}
    for marker in ("HTTP Request: POST", "the database cannot be used", "asample: ok"):
        assert leaks({"": marker}, logs), marker
    assert leaks(secrets, seen) == []


# Starts that fail


class Hub(BaseHTTPRequestHandler):
    """Knows no model, and remembers who asked."""

    asked_by: ClassVar[set[str]] = set()

    def do_HEAD(self) -> None:
        self.asked_by.add(self.headers.get("authorization", ""))
        self.send_response(401)
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub() -> Iterator[str]:
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def forked(folder: Path, module: str, *arguments: str, **env: str) -> tuple[int, str]:
    """As `start`, from a process that has the imports. `folder` is for the output."""
    file = folder / "output"
    with file.open("wb") as output:
        process = warm_services.start(["-m", module, *arguments], env={**os.environ, **SETTINGS, **env}, output=output)
    status = process.wait(240)
    return status, file.read_text()


def start(module: str, *arguments: str, **env: str) -> tuple[int, str]:
    """Exit status and output of one that does not start."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    # A test may run where the hub is off.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        command,
        env=environment | SETTINGS | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout


AWAY = {"GATEWAY_DATABASE_URL": f"postgresql+asyncpg://tests:{PASSWORD}@127.0.0.1:1/none"}
"""Nobody listens there."""
NOT_ESCAPED = f"postgresql+asyncpg://tests:some@{PASSWORD}@127.0.0.1:1/none"
NO_HOST = f"postgresql+asyncpg://tests:{PASSWORD}/none"
"""It looks like a host and its port."""
NAMED = "the database postgresql+asyncpg://***@127.0.0.1:1/none cannot be used"


@pytest.mark.parametrize(
    ("module", "arguments", "env", "says"),
    [
        ("gateway", "", {"GATEWAY_PORT": "x"}, "--port (GATEWAY_PORT)"),
        ("gateway", "", {"GATEWAY_API_KEYS": KEY}, "GATEWAY_API_KEYS"),
        ("gateway", "", {"GATEWAY_API_KEYS": f'[{{"key": "{KEY}", "nme": 1}}]'}, "GATEWAY_API_KEYS"),
        ("gateway", "", {"GATEWAY_SERVICE_KEY": f"{SERVICE_KEY} {KEY}"}, "GATEWAY_SERVICE_KEY"),
        ("gateway", "", {"GATEWAY_JWT_SECRET": JWT_SECRET[:24]}, "GATEWAY_JWT_SECRET"),
        ("gateway", "", {"GATEWAY_DATABASE_URL": f"none://tests:{PASSWORD}@h/x"}, "GATEWAY_DATABASE_URL"),
        ("gateway", "", {"GATEWAY_DATABASE_URL": NO_HOST}, "GATEWAY_DATABASE_URL"),
        ("gateway", "--log-level DEBUG", AWAY, NAMED),
        ("trainer_service", "--base-model x", {"TRAINER_API_KEYS": GRPC_KEY}, "TRAINER_API_KEYS"),
        ("trainer_service", "--base-model x", {"TRAINER_MAX_MODELS": "x"}, "TRAINER_MAX_MODELS"),
        ("sampler_service", "--base-model x", {"SAMPLER_SERVICE_KEY": f"{SERVICE_KEY} {KEY}"}, "SAMPLER_SERVICE_KEY"),
        ("tinsmith_cli", "up --port 0", {"GATEWAY_API_KEYS": KEY}, "GATEWAY_API_KEYS"),
        ("tinsmith_cli", "up --port 0", {"SAMPLER_MAX_RUNNING": "x"}, "SAMPLER_MAX_RUNNING"),
        ("tinsmith_cli", "keys list", AWAY, NAMED),
        ("tinsmith_cli", "keys list", {"GATEWAY_DATABASE_URL": NO_HOST}, "(GATEWAY_DATABASE_URL): is no SQLAlchemy"),
        ("tinsmith_cli", "keys list", {"GATEWAY_DATABASE_URL": NOT_ESCAPED}, NAMED),
        ("tinsmith_cli", "checkpoints list --base-url http://127.0.0.1:1", {"TINKER_API_KEY": KEY}, "no Tinsmith"),
    ],
)  # fmt: skip
def test_a_start_that_fails_does_not_tell_them(
    module: str, arguments: str, env: dict[str, str], says: str, tmp_path: Path
) -> None:
    place = ["--state-dir", str(tmp_path)] if arguments.startswith(("up", "keys")) else []
    state = {"GATEWAY_STATE_DIR": str(tmp_path), "TRAINER_STATE_DIR": str(tmp_path)}
    status, output = forked(tmp_path, module, *arguments.split(), *place, **state, **env)
    assert status != 0
    assert says in output
    assert leaks(SECRETS, {"output": output.encode()} | files(tmp_path)) == []


def test_neither_does_up_when_a_service_ends(toy: Path, tmp_path: Path) -> None:
    """The output shows the end of that service's log."""
    status, output = start(
        "tinsmith_cli", "up", "--port", "0", "--state-dir", str(tmp_path), "--log-level", "DEBUG",
        "--base-model", f"{BASE_MODEL}={toy}", **AWAY,
    )  # fmt: skip
    assert status == 1
    assert NAMED in output
    assert leaks(SECRETS, {"output": output.encode()} | files(tmp_path)) == []


def test_neither_does_a_service_whose_hub_refuses_its_token(tmp_path: Path) -> None:
    with hub() as address:
        status, output = start(
            "sampler_service", "--base-model", "tests/private", "--log-level", "DEBUG", "--listen", "127.0.0.1:0",
            HF_ENDPOINT=address, HF_HOME=str(tmp_path),
        )  # fmt: skip
    assert status == 1
    assert f"Bearer {HUB_TOKEN}" in Hub.asked_by
    assert "cannot serve tests/private" in output
    assert DEBUG_LINE in output
    assert leaks(SECRETS, {"output": output.encode()} | files(tmp_path)) == []
