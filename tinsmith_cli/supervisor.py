"""Runs child processes, and restarts children that end.

The children start in the given order, each in a session of its own. Ctrl-C therefore reaches only this process, which
stops them in order. If a child ends before all of them have been ready once, all are stopped and the reason is
reported, so that a wrong flag is not retried forever. Later, a child that ends by itself is restarted with the same
command, and hence the same ports, after a pause that grows with every end. The end of a child without `restarts` stops
all children. If this process is killed, the kernel kills the children (on Linux).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith import child
from tinsmith.tasks import Pause, cancel_all
from tinsmith.threads import in_pool
from tinsmith_cli import log_files

STOP_GRACE_S = 7.0
"""Time from the first SIGTERM to SIGKILL, in seconds. The documentation promises a stop within 10 s."""

_FIRST_GRACE_S = 2.5
"""Time that the service which is stopped first has to end, before the others are asked to stop, in seconds."""
_LOG_LINES_SHOWN = 20
"""Number of lines of a log that are shown when its service has ended."""
_LOG_INTERVAL_S = 10.0
"""Pause between two checks of the sizes of the logs, in seconds."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_LASTED_S = 60.0
"""A service that was ready for this time, in seconds, is restarted after _FIRST_PAUSE_S again."""
_FEW_STARTS = 2
"""The number of failed starts is reported if it is at least this."""


@dataclass(frozen=True, slots=True)
class Service:
    """A child process to run."""

    name: str
    argv: Sequence[str]
    """Command line."""
    log: Path
    """File to which stdout and stderr are appended. A full log is moved to NAME.1, and begins again."""
    wait_ready: Callable[[], Awaitable[None]]
    """Returns once the service is ready."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to this process's environment."""
    restarts: bool = False
    """Whether the service is restarted if it ends after all services were ready once, while the others go on."""


@dataclass(frozen=True, slots=True)
class _Running:
    service: Service
    process: subprocess.Popen[bytes]
    exited: asyncio.Future[int]
    log_start: int
    """Size of the log in bytes when the process started."""


async def supervise(
    services: Sequence[Service],
    *,
    on_ready: Callable[[], None],
    report: Callable[[str], None],
    startup_timeout_s: float,
    log_max_bytes: float,
) -> int:
    """Runs the services until SIGINT, SIGTERM or SIGHUP, and returns 0. Returns 1 if a service fails at the first
    start, or ends and is not to be restarted.

    `services`: in the order in which they start; they are stopped in reverse order. `startup_timeout_s`: time in which
    a service must be ready. If a service is late at the first start, all are stopped; if it is late at a restart, it is
    killed and restarted. `log_max_bytes`: largest size of each log. No service is left when this returns or raises.
    """
    running: list[_Running] = []
    paths = [service.log for service in services]
    logs = asyncio.create_task(_bound_logs(paths, max_bytes=log_max_bytes, report=report))
    async with _signals(running) as stop:
        try:
            for service in services:
                running.append(_start(service))
                report(f"{service.name}: starting (log: {service.log})")
            return await _watch(running, stop, on_ready=on_ready, report=report, startup_timeout_s=startup_timeout_s)
        finally:
            logs.cancel()
            stop.clear()  # a further signal makes the stop hurry
            await _stop_all(running[::-1], hurry=stop)


async def _bound_logs(logs: Sequence[Path], *, max_bytes: float, report: Callable[[str], None]) -> None:
    failing: set[Path] = set()
    while True:
        await asyncio.sleep(_LOG_INTERVAL_S)
        for log in logs:
            try:
                await in_pool(log_files.bound, log, max_bytes=max_bytes)
            except OSError as error:
                if log not in failing:
                    report(f"{log} cannot be moved to {log.name}.1, and grows: {error}")
                failing.add(log)
            else:
                failing.discard(log)


async def _watch(
    running: list[_Running],
    stop: asyncio.Event,
    *,
    on_ready: Callable[[], None],
    report: Callable[[str], None],
    startup_timeout_s: float,
) -> int:
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(_wait_all_ready(running, report=report, timeout_s=startup_timeout_s))
    waiting: set[asyncio.Future[object]] = {stopping, starting, *(one.exited for one in running)}  # type: ignore[arg-type]
    restarting: list[asyncio.Task[None]] = []
    try:
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                report("stopping")
                return 0
            if dead := [one for one in running if one.exited in done]:
                for one in dead:
                    report(_end_report(one, code=one.exited.result()))
                return 1
            for task in restarting:
                if task in done:
                    task.result()
            try:
                starting.result()
            except TimeoutError as error:
                report(str(error))
                return 1
            on_ready()
            for place, one in enumerate(running):
                if one.service.restarts:
                    waiting.discard(one.exited)  # type: ignore[arg-type]
                    task = _keep_running(running, place, report=report, timeout_s=startup_timeout_s)
                    restarting.append(asyncio.create_task(task))
            waiting.update(restarting)  # type: ignore[arg-type]  # such a task ends only with an error, to be raised here
    finally:
        await cancel_all([stopping, starting, *restarting])


async def _wait_all_ready(running: Sequence[_Running], *, report: Callable[[str], None], timeout_s: float) -> None:
    started = time.monotonic()
    waiting_for = [one.service.name for one in running]

    async def wait_one(service: Service) -> None:
        await service.wait_ready()
        waiting_for.remove(service.name)
        report(f"{service.name}: ready after {time.monotonic() - started:.1f} s")

    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            for one in running:
                group.create_task(wait_one(one.service))
    except TimeoutError:
        logs = ", ".join(str(one.service.log) for one in running if one.service.name in waiting_for)
        raise TimeoutError(
            f"not ready after {timeout_s:g} s (--startup-timeout): {', '.join(waiting_for)}; see {logs}"
        ) from None


async def _keep_running(
    running: list[_Running], place: int, *, report: Callable[[str], None], timeout_s: float
) -> None:
    """Restarts the service at `place` whenever it ends."""
    service = running[place].service
    pause, ready_at, in_vain = Pause(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), time.monotonic(), 0
    while True:
        code = await asyncio.shield(running[place].exited)
        _kill_group(running[place])  # processes that the service left behind may hold its port and its files
        report(_end_report(running[place], code=code))
        if not in_vain and time.monotonic() - ready_at >= _LASTED_S:
            pause = Pause(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        so_far = f" (it was not ready after the last {in_vain} starts)" if in_vain >= _FEW_STARTS else ""
        report(f"{service.name}: starting again in {pause.next_s:g} s{so_far}; the others go on")
        await pause.wait()
        started = time.monotonic()
        running[place] = one = _start(service)
        if await _is_ready(one, timeout_s=timeout_s):
            ready_at, in_vain = time.monotonic(), 0
            report(f"{service.name}: ready again after {ready_at - started:.1f} s")
            continue
        in_vain += 1
        if not one.exited.done():
            report(f"{service.name}: not ready after {timeout_s:g} s; it is killed")
            _kill_group(one)


async def _is_ready(one: _Running, *, timeout_s: float) -> bool:
    """Waits until the service is ready. Returns False if it ends before that, or takes longer than `timeout_s`."""
    ready = asyncio.ensure_future(one.service.wait_ready())
    try:
        done, _ = await asyncio.wait({ready, one.exited}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all([ready])
    if ready in done:
        ready.result()
    return ready in done and not one.exited.done()


def _start(service: Service) -> _Running:
    service.log.parent.mkdir(parents=True, exist_ok=True)
    with service.log.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", child.__file__, str(os.getpid()), *service.argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **service.env},
            start_new_session=True,
        )
    return _Running(service, process, asyncio.get_running_loop().create_future(), log_start)


@asynccontextmanager
async def _signals(running: Sequence[_Running]) -> AsyncIterator[asyncio.Event]:
    """Handles signals within the block: a stop signal sets the returned event, and SIGCHLD resolves `exited` of each
    process that has ended."""
    stop = asyncio.Event()

    def reap() -> None:
        for one in running:
            if not one.exited.done() and one.process.poll() is not None:
                one.exited.set_result(one.process.returncode)

    handlers = {signal.SIGINT: stop.set, signal.SIGTERM: stop.set, signal.SIGHUP: stop.set, signal.SIGCHLD: reap}
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield stop
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


async def _stop_all(running: Sequence[_Running], *, hurry: asyncio.Event) -> None:
    """Sends SIGTERM to the first service, then to the others, then SIGKILL to all. `hurry`: event, set by a second
    Ctrl-C, after which SIGKILL is sent at once."""

    async def ask_all() -> None:
        for one in running[:1]:
            _terminate(one)
            await asyncio.wait({one.exited}, timeout=_FIRST_GRACE_S)
        for one in running[1:]:
            _terminate(one)
        if running:
            await asyncio.wait({one.exited for one in running})

    asking, hurrying = asyncio.create_task(ask_all()), asyncio.create_task(hurry.wait())
    await asyncio.wait({asking, hurrying}, timeout=STOP_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    hurrying.cancel()
    for one in running:
        _kill_group(one)
        one.process.wait()


def _kill_group(one: _Running) -> None:
    """Kills the service's process group, which includes processes that it left behind."""
    with suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)


def _terminate(one: _Running) -> None:
    if one.process.poll() is None:
        one.process.terminate()


def _end_report(one: _Running, *, code: int) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    log = one.service.log
    lines = log_files.for_people(log_files.last_lines(log, _LOG_LINES_SHOWN, start=one.log_start))
    return "\n".join([f"{one.service.name} {how}; the end of {log}:", *(f"    {line}" for line in lines)])
