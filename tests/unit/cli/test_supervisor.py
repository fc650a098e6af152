"""The supervisor with stand-in commands. It runs in a process of its own, as it owns that process's signals."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from tinsmith_cli.log_files import bound, for_people, last_lines

# argv: folder, then one Python program per service; those that begin with "# restarts" are started again. Prints what
# is reported, and READY.
SUPERVISOR = """
import asyncio, importlib.util, os, sys
from pathlib import Path

# Without the imports of the package itself: they are those of every command, and take 0.3 s of a core.
sys.modules["tinsmith_cli"] = importlib.util.module_from_spec(importlib.util.find_spec("tinsmith_cli"))
from tinsmith_cli import supervisor
from tinsmith_cli.supervisor import Service, supervise

folder = Path(sys.argv[1])

def waiter(name):
    async def wait():
        while not (folder / f"{name}.up").exists():
            await asyncio.sleep(0.02)
    return wait

services = [
    Service(
        name, [sys.executable, "-c", program, str(folder / name)], folder / "logs" / f"{name}.log", waiter(name),
        restarts=program.startswith("# restarts"),
    )
    for name, program in ((f"s{i}", program) for i, program in enumerate(sys.argv[2:]))
]
report = lambda line: print(line, flush=True)
timeout_s = float(os.environ.get("READY_TIMEOUT_S", "20"))

def ready():
    (folder / "ready").touch()
    report("READY")

supervisor._LOG_INTERVAL_S = 0.05
supervisor._FIRST_PAUSE_S = 0.25
supervisor._FIRST_GRACE_S = 0.5
supervisor.STOP_GRACE_S = float(os.environ.get("STOP_GRACE_S", "1"))
running = supervise(services, on_ready=ready, report=report, startup_timeout_s=timeout_s, log_max_bytes=10_000)
sys.exit(asyncio.run(running))
"""

PRELUDE = """
import os, pathlib, signal, sys, time
me = sys.argv[1]
def up():
    pathlib.Path(me + ".pid").write_text(str(os.getpid()))
    pathlib.Path(me + ".up").touch()
def wait_until_all_are_ready():
    while not pathlib.Path(me).with_name("ready").exists():
        time.sleep(0.01)
def stopped(*_):
    pathlib.Path(me + ".stopped").write_text(str(time.monotonic_ns()))
    sys.exit(0)
"""
POLITE = PRELUDE + "signal.signal(signal.SIGTERM, stopped); up(); time.sleep(100)"
DEAF = PRELUDE + "signal.signal(signal.SIGTERM, signal.SIG_IGN); up(); time.sleep(100)"
DIES_EARLY = PRELUDE + "print('no such model'); sys.exit(3)"
DIES_LATER = PRELUDE + "up(); wait_until_all_are_ready(); print('out of memory'); os.kill(os.getpid(), signal.SIGKILL)"
LEAVES_A_CHILD = PRELUDE + textwrap.dedent(
    """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    pathlib.Path(me + ".child").write_text(str(child.pid))
    up(); time.sleep(100)
    """
)


DIES_ONCE = (
    "# restarts"
    + PRELUDE
    + textwrap.dedent(
        """
    first = not pathlib.Path(me + ".pid").exists()
    up()
    if first:
        wait_until_all_are_ready()
        print("segmentation fault", flush=True)
        pathlib.Path(me + ".up").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, stopped)
    time.sleep(100)
    """
    )
)


ONLY_ONCE = (
    "# restarts"
    + PRELUDE
    + textwrap.dedent(
        """
    if pathlib.Path(me + ".pid").exists():
        {again}
    up()
    wait_until_all_are_ready()
    pathlib.Path(me + ".up").unlink()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    )
)
LEAVES_A_CHILD_ONCE = (
    "# restarts"
    + PRELUDE
    + textwrap.dedent(
        """
    import subprocess
    child = pathlib.Path(me + ".child")
    if not child.exists():
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        child.write_text(str(left.pid))
        up()
        wait_until_all_are_ready()
        pathlib.Path(me + ".up").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    up(); time.sleep(100)
    """
    )
)
TALKS = PRELUDE + textwrap.dedent(
    """
    signal.signal(signal.SIGTERM, stopped)
    up()
    for n in range(100_000):
        print(n, flush=True)
        time.sleep(0.0002)
    """
)
NEVER_AGAIN = ONLY_ONCE.format(again="print('the disk is gone'); sys.exit(3)")
HANGS_AGAIN = ONLY_ONCE.format(again="pathlib.Path(me + '.pid').write_text(str(os.getpid())); time.sleep(100)")


class Run:
    def __init__(self, folder: Path, programs: list[str]) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(folder), *programs], stdout=subprocess.PIPE, text=True
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == "READY\n":
                return
        raise AssertionError("the supervisor ended before it was ready")

    def read_until(self, line: str) -> str:
        """The output from here on, up to a line that begins with `line`."""
        assert self.process.stdout is not None
        told = ""
        for one in self.process.stdout:
            told += one
            if one.startswith(line):
                return told
        raise AssertionError(f"never reported: {line}\n{told}")

    def finish(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output

    def pid(self, name: str) -> int:
        return int((self.folder / name).read_text())


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*programs: str) -> Run:
        runs.append(Run(tmp_path, list(programs)))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        run.process.communicate()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_dead(pid: int) -> None:
    wait_until(lambda: not is_alive(pid), what=f"process {pid} ends")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_ends_all_services_the_last_one_first(
    start: Start, number: signal.Signals, tmp_path: Path
) -> None:
    run = start(POLITE, POLITE, POLITE)
    run.wait_ready()
    os.kill(run.process.pid, number)
    code, output = run.finish()
    assert code == 0
    assert output.endswith("stopping\n")
    at = [int((tmp_path / f"s{i}.stopped").read_text()) for i in range(3)]
    assert at[2] < min(at[:2])
    assert not any(is_alive(run.pid(f"s{i}.pid")) for i in range(3))


def test_a_service_deaf_to_sigterm_is_killed(start: Start) -> None:
    run = start(POLITE, DEAF)
    run.wait_ready()
    run.process.terminate()
    assert run.finish()[0] == 0
    assert not is_alive(run.pid("s1.pid"))


def test_a_second_signal_does_not_wait_for_the_deaf(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOP_GRACE_S", "30")
    run = start(DEAF, DEAF, POLITE)
    run.wait_ready()
    run.process.terminate()
    wait_until((tmp_path / "s2.stopped").exists, what="the polite service stops")
    began = time.monotonic()
    run.process.terminate()
    assert run.finish()[0] == 0
    assert time.monotonic() - began < 20  # the grace alone is 30 s
    assert not is_alive(run.pid("s0.pid"))


def test_a_death_while_starting_is_reported_with_the_log_and_stops_the_others(start: Start) -> None:
    run = start(POLITE, DIES_EARLY)
    code, output = run.finish()
    assert code == 1
    assert "s1 ended with exit status 3" in output
    assert "    no such model" in output
    assert "READY" not in output


def test_only_lines_of_the_process_that_ended_are_shown(start: Start, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "s1.log").write_text("an error of yesterday\n")
    code, output = start(POLITE, DIES_EARLY).finish()
    assert code == 1
    assert "    no such model" in output
    assert "yesterday" not in output


def test_services_that_are_not_ready_in_time_are_named_with_their_logs(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READY_TIMEOUT_S", "1")
    status, told = start(POLITE, "import time; time.sleep(60)").finish()
    assert status == 1
    assert "not ready after 1 s (--startup-timeout): s1; see " in told
    assert told.rstrip().endswith("logs/s1.log")


def test_a_death_later_is_reported_and_nothing_is_restarted(start: Start) -> None:
    run = start(POLITE, DIES_LATER)
    run.wait_ready()
    code, output = run.finish()
    assert code == 1
    assert "s1 was killed by SIGKILL" in output
    assert "    out of memory" in output
    assert not is_alive(run.pid("s0.pid"))


def test_a_service_that_the_others_can_do_without_is_started_again(start: Start) -> None:
    run = start(POLITE, DIES_ONCE, POLITE)
    run.wait_ready()
    first = run.pid("s1.pid")
    told = run.read_until("s1: ready again")
    assert "s1 was killed by SIGKILL" in told
    assert "    segmentation fault" in told
    assert "s1: starting again in 0.25 s; the others go on" in told
    assert run.pid("s1.pid") != first
    assert all(is_alive(run.pid(f"s{i}.pid")) for i in range(3))
    run.process.terminate()
    assert run.finish()[0] == 0
    assert not any(is_alive(run.pid(f"s{i}.pid")) for i in range(3))


def test_each_of_several_services_is_started_again(start: Start) -> None:
    run = start(DIES_ONCE, DIES_ONCE, DIES_ONCE)
    run.wait_ready()
    told = run.read_until("s0: ready again")
    while not all(f"s{i}: ready again" in told for i in range(3)):
        told += run.read_until("s")
    run.process.terminate()
    assert run.finish()[0] == 0
    assert not any(is_alive(run.pid(f"s{i}.pid")) for i in range(3))


def test_one_that_never_gets_ready_again_is_reported_each_time_and_the_pause_grows(start: Start) -> None:
    run = start(POLITE, NEVER_AGAIN)
    run.wait_ready()
    told = run.read_until("s1: starting again in 1 s (it was not ready after the last 2 starts); the others go on")
    assert "s1: starting again in 0.25 s; the others go on" in told
    assert "s1: starting again in 0.5 s; the others go on" in told
    assert told.count("s1 ended with exit status 3") == 2
    assert "    the disk is gone" in told
    assert is_alive(run.pid("s0.pid"))
    run.process.terminate()
    assert run.finish()[0] == 0


def test_one_that_hangs_when_it_is_started_again_is_killed_and_started_once_more(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READY_TIMEOUT_S", "2")
    run = start(POLITE, HANGS_AGAIN)
    run.wait_ready()
    told = run.read_until("s1: starting again in 0.5 s")
    assert "s1: not ready after 2 s; it is killed\ns1 was killed by SIGKILL" in told
    run.process.terminate()
    assert run.finish()[0] == 0
    assert not is_alive(run.pid("s1.pid"))


def test_processes_of_a_dead_service_are_gone_before_it_is_started_again(start: Start) -> None:
    run = start(LEAVES_A_CHILD_ONCE)
    run.wait_ready()
    run.read_until("s0: ready again")
    assert not is_alive(run.pid("s0.child"))
    run.process.terminate()
    run.finish()


def test_a_stop_signal_does_not_wait_for_the_pause_before_a_restart(start: Start) -> None:
    run = start(POLITE, DIES_ONCE)
    run.wait_ready()
    run.read_until("s1: starting again")
    run.process.terminate()
    code, output = run.finish()
    assert (code, output) == (0, "stopping\n")
    assert not is_alive(run.pid("s0.pid"))


def test_processes_that_a_service_started_end_with_it(start: Start) -> None:
    run = start(LEAVES_A_CHILD)
    run.wait_ready()
    run.process.terminate()
    run.finish()
    wait_dead(run.pid("s0.child"))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children of a killed parent on Linux only")
def test_killing_the_supervisor_outright_leaves_no_service(start: Start) -> None:
    run = start(POLITE, DEAF)
    run.wait_ready()
    run.process.kill()
    run.process.wait()
    for name in ("s0.pid", "s1.pid"):
        wait_dead(run.pid(name))


def test_logs_that_are_full_begin_again_and_one_that_cannot_is_told_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "logs" / "s1.log.1").mkdir(parents=True)  # no copy can have this name
    run = start(TALKS, TALKS)
    run.wait_ready()
    failing = f"{tmp_path / 'logs' / 's1.log'} cannot be moved to s1.log.1, and grows: "
    assert "IsADirectoryError" not in run.read_until(failing)
    older, newer = tmp_path / "logs" / "s0.log.1", tmp_path / "logs" / "s0.log"
    wait_until(lambda: older.exists() and newer.stat().st_size > 0, what="the log is moved, and a new one is written")
    run.process.terminate()
    assert "cannot be moved" not in run.finish()[1]
    assert older.stat().st_size >= 10_000
    numbers = [int(line) for line in (older.read_text() + newer.read_text()).split()]
    assert numbers == sorted(numbers)
    assert (tmp_path / "logs" / "s1.log").stat().st_size >= 10_000


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_bytes(b"\xff" * 200_000 + b"".join(b"\n%d" % n for n in range(30)))
    assert last_lines(log, 3) == ["27", "28", "29"]
    assert len("".join(last_lines(log, 100))) < 70_000
    log.write_text("only\n")
    assert last_lines(log, 3) == ["only"]


def test_a_log_is_read_from_where_a_process_started_unless_it_began_again(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_text("before\nafter\n")
    assert last_lines(log, 3, start=len("before\n")) == ["after"]
    assert last_lines(log, 3, start=100) == ["before", "after"]


def test_a_terminal_shows_json_as_text_and_errors_before_all_else() -> None:
    info = json.dumps({"level": "INFO", "message": "listening"})
    error = json.dumps({"level": "ERROR", "message": "cannot serve x", "traceback": "Traceback:\n  in y"})
    assert for_people([info]) == ["INFO listening"]
    assert for_people([info, error, "Killed"]) == ["ERROR cannot serve x", "Traceback:", "  in y", "Killed"]
    assert for_people(["[1]", "{}", "7"]) == ["[1]", "{}", "7"]
    long = json.dumps({"level": "INFO", "message": "config: " + "x" * 5000})
    assert for_people([long, info])[1:] == ["INFO listening"]
    assert len(for_people([long])[0]) < 400


def test_a_log_whose_copy_fails_stays_whole(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_bytes(b"x" * 100)
    for room in (101, math.inf):
        bound(log, max_bytes=room)
    assert log.stat().st_size == 100
    log.with_name("service.log.1").mkdir()
    with pytest.raises(OSError, match=r"service\.log\.1"):
        bound(log, max_bytes=100)
    assert log.stat().st_size == 100
