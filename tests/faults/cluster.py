"""A trainer, samplers and a gateway as processes of their own, which a test may kill, stop and start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support import warm_services
from tests.support.examples import BASE_MODEL
from tests.support.stack import STOP_LIMIT_S
from tests.support.waiting import wait_until
from tinsmith_cli.ports import free_ports

START_LIMIT_S = 120.0
_LOG_LINES_SHOWN = 60


class Process:
    """One service. It has a session of its own, so that a signal reaches all of its processes."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        address: str,
        log: Path,
        env: Mapping[str, str],
        forked: bool = True,
    ) -> None:
        """`forked`: from a process that has the imports, which saves 5 s of a core; its command line is then that
        process's."""
        self.name = name
        self.address = address
        self.log = log
        self._argv = ["-m", *argv]
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:2", **env}
        self._forked = forked
        self._process: subprocess.Popen[bytes] | warm_services.Forked | None = None

    def run_instead(self, script: Path) -> None:
        """From the next start on, with the same flags."""
        self._argv[:2] = [str(script)]

    def set_env(self, **env: str) -> None:
        """From the next start on, over its own."""
        self._env |= env

    def set_flag(self, flag: str, value: str) -> None:
        """From the next start on, instead of its own value."""
        self._argv[self._argv.index(flag) + 1] = value

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """With which it has ended; None while it runs, and when it never did."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Begins to start; wait_serving() waits for it."""
        assert not self.is_running, f"{self.name} runs already"
        output: IO[bytes]
        with self.log.open("ab") as output:
            if self._forked:
                self._process = warm_services.start(self._argv, env=self._env, output=output)
                return
            self._process = subprocess.Popen(
                [sys.executable, "-P", *self._argv],
                env=self._env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def send(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """kill -9, also of a paused one; returns when it is gone."""
        if self.is_running:
            self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """SIGTERM, as containers and systemd stop it; raises AssertionError unless it ends in time, with status 0."""
        assert self._process is not None
        self.send(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end {STOP_LIMIT_S:g} s after SIGTERM") from None
        assert status == 0, f"{self.name} ended with status {status} after SIGTERM"

    def restart(self, env: Mapping[str, str]) -> None:
        """With these variables over its own; returns when it serves."""
        self.kill()
        self._env |= env
        self.start()
        self.wait_serving()

    def pause(self) -> None:
        """SIGSTOP: its connections stay open, and nothing answers."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def is_serving(self) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods are made at run time
            try:
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            except grpc.RpcError:
                return False
            return reply.status == health_pb2.HealthCheckResponse.SERVING

    def wait_serving(self) -> None:
        def is_there() -> bool:
            assert self.is_running, f"{self.name} ended while it was starting:\n{self.tail()}"
            return self.is_serving()

        wait_until(is_there, what=f"{self.name} serves", limit_s=START_LIMIT_S)

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"-- {self.log.name}", *lines[-_LOG_LINES_SHOWN:]])


class _Gateway(Process):
    def is_serving(self) -> bool:
        try:
            return httpx.get(f"http://{self.address}/api/v1/healthz", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


class Cluster:
    """`with Cluster(folder, model, num_samplers=2) as cluster:` runs it; leaving the block ends all of it."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        num_samplers: int,
        trainer_env: Mapping[str, str] | None = None,
        sampler_env: Mapping[str, str] | None = None,
        gateway_env: Mapping[str, str] | None = None,
        num_gateways: int = 1,
        num_trainers: int = 1,
        checkpoint_dir: str = "",
        forked: bool = True,
    ) -> None:
        """Several gateways need a database that they share, in gateway_env. `checkpoint_dir`: the trainers' store;
        empty means the folder `checkpoints`. `forked`: as that of Process."""
        ports = iter(free_ports(num_trainers + num_gateways + num_samplers))
        trainers, gateways, samplers = (
            [f"127.0.0.1:{next(ports)}" for _ in range(count)] for count in (num_trainers, num_gateways, num_samplers)
        )
        common = ["--base-model", str(model), "--model-names", json.dumps([BASE_MODEL]), "--num-threads", "1"]
        self.folder = folder
        self.samplers = [
            Process(
                f"sampler-{n}",
                ["sampler_service", *common, "--listen", address],
                address=address,
                log=folder / f"sampler-{n}.log",
                env=sampler_env or {},
                forked=forked,
            )
            for n, address in enumerate(samplers, start=1)
        ]
        self.trainers = [
            Process(
                name,
                [
                    "trainer_service",
                    *common,
                    *("--listen", address, "--samplers", json.dumps(samplers), "--journal-name", name),
                    *("--checkpoint-dir", checkpoint_dir or str(self.checkpoints), "--state-dir", str(folder / name)),
                ],
                address=address,
                log=folder / f"{name}.log",
                env=trainer_env or {},
                forked=forked,
            )
            for name, address in ((f"trainer-{n}" if n > 1 else "trainer", one) for n, one in enumerate(trainers, 1))
        ]
        self.trainer = self.trainers[0]
        self.gateways = [
            _Gateway(
                f"gateway-{n}" if n > 1 else "gateway",
                [
                    "gateway",
                    *("--host", address.rpartition(":")[0], "--port", address.rpartition(":")[2]),
                    *("--state-dir", str(folder / "gateway")),
                    *("--trainers", json.dumps(trainers), "--samplers", json.dumps(samplers)),
                    *(("--peer-url", f"http://{address}") if num_gateways > 1 else ()),
                ],
                address=address,
                log=folder / (f"gateway-{n}.log" if n > 1 else "gateway.log"),
                env={"GATEWAY_LONG_POLL_S": "2", **(gateway_env or {})},
                forked=forked,
            )
            for n, address in enumerate(gateways, start=1)
        ]
        self.gateway = self.gateways[0]

    @property
    def processes(self) -> list[Process]:
        return [*self.samplers, *self.trainers, *self.gateways]

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def journal(self) -> Path:
        """Its write-ahead log is beside it."""
        return self.folder / "trainer" / "journal.sqlite"

    def heal(self) -> None:
        """Starts what does not run, lets go on what was paused, and returns when all of it serves."""
        for process in self.processes:
            if process.is_running:
                process.resume()
            else:
                process.start()
        for process in self.processes:
            process.wait_serving()

    def metrics(self) -> dict[str, float]:
        """The gateway's metrics: each sample's value, by its name with its labels as Prometheus writes them."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def report(self) -> str:
        return "\n".join(process.tail() for process in self.processes)

    def __enter__(self) -> Self:
        try:
            self.heal()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        for process in self.processes[::-1]:
            process.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
