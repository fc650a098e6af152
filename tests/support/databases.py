"""An up-to-date database without rows, made once for a process: migrating takes most of a gateway's start."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from gateway.config import DATABASE
from gateway.database.connection import Database
from gateway.metrics import Metrics

_migrated = b""


async def lay_migrated_database(state_dir: Path) -> bool:
    """Puts the file where a gateway with this state folder looks for it. A file that is there stays: then it returns
    False."""
    global _migrated
    if not _migrated:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / DATABASE
            database = Database(f"sqlite+aiosqlite:///{file}", Metrics())
            await database.migrate()
            await database.close()  # which empties the write-ahead log into the file
            _migrated = await asyncio.to_thread(file.read_bytes)
    return _lay(state_dir / DATABASE)


def _lay(file: Path) -> bool:
    if file.exists():
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(_migrated)
    return True
