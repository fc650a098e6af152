"""A PostgreSQL cluster of the tests' own, in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from tinsmith_cli.ports import free_ports

REQUIRED = "TINSMITH_REQUIRE_POSTGRES"
"""Set in CI: there a missing PostgreSQL is a failure."""
_USER = "nobody"


def installed() -> Path | None:
    """The folder of initdb, if there is one: Debian keeps it out of PATH, one for each version."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(folders, key=lambda folder: float(folder.parent.name), default=None)


class Postgres:
    """A running cluster. `new_database` makes an empty database."""

    def __init__(
        self,
        programs: Path,
        folder: Path,
        *,
        address: str = "127.0.0.1",
        within: Sequence[str] = (),
        fsync: bool = False,
    ) -> None:
        """`within`: before its commands, where `address` is another machine's, or as good as that. `fsync`: for
        measurements; nothing here outlives the machine."""
        self._programs = programs
        self._data = folder / "data"
        # PostgreSQL does not run as root, which tests in a container often are.
        # By runuser: subprocess, told the user, forks, and the child of a process with gRPC at work dies then.
        self._as_user = [*within, *(["runuser", "-u", _USER, "--"] if os.geteuid() == 0 else [])]
        self._address = address
        (self.port,) = free_ports(1)
        if os.geteuid() == 0:
            shutil.chown(folder, _USER)
        self._run("initdb", "--pgdata", str(self._data), "--auth", "trust", "--username", "tests", "--no-sync")
        settings = {
            "port": str(self.port),
            "listen_addresses": f"'{address}'",
            "unix_socket_directories": f"'{folder}'",
            "fsync": "on" if fsync else "off",
            "max_connections": "200",
        }
        lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
        with (self._data / "postgresql.conf").open("a") as conf:
            conf.write(lines)
        with (self._data / "pg_hba.conf").open("a") as hba:
            hba.write("host all all samenet trust\n")
        self._log = folder / "log"
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as_user, str(self._programs / program), *arguments]
        done = subprocess.run(command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stdout}\n{done.stderr}")

    def start(self) -> None:
        self._run("pg_ctl", "--pgdata", str(self._data), "--log", str(self._log), "--wait", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "--pgdata", str(self._data), "--mode", "immediate", "--wait", "stop")

    def new_database(self) -> str:
        """Its SQLAlchemy URL."""
        name = f"t{uuid4().hex}"
        where = ["--host", self._address, "--port", str(self.port), "--username", "tests"]
        self._run("createdb", *where, name)
        return f"postgresql+asyncpg://tests@{self._address}:{self.port}/{name}"


@contextlib.contextmanager
def running(*, address: str = "127.0.0.1", within: Sequence[str] = (), fsync: bool = False) -> Iterator[Postgres]:
    """Skips the test where there is no PostgreSQL, except where REQUIRED is set."""
    programs = installed()
    if programs is None:
        reason = "PostgreSQL is not installed: apt-get install postgresql"
        pytest.fail(reason) if os.environ.get(REQUIRED) else pytest.skip(reason)
    # Not pytest's tmp_path: its parents are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-postgres-"))
    try:
        cluster = Postgres(programs, folder, address=address, within=within, fsync=fsync)
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """For a conftest.py to import: one cluster for the run."""
    with running() as cluster:
        yield cluster
