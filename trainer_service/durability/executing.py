"""Which operations are being executed, as the next process finds it when this one has died.

An operation is being executed while its request becomes a batch, while the compute thread works at it, and while its
answer becomes a message. Meanwhile its name lies in a slot of a file beside the journal. Writing a slot is one `pwrite`
without a sync: the slot survives the end of the process, and need not survive that of the machine, because no operation
cuts the power.

Each operation that was being executed when the process ended is a suspect. A suspect runs again while nothing else
does. Once its answer is stored it is a suspect no longer. If the process ends before, the suspect alone was being
executed: it is condemned, and does not run a third time. An operation with an answer, which runs again for what it does
to its model, has run through before, and without it the model is lost: it is condemned after more deaths.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tinsmith.rpc.errors import ServiceError

logger = logging.getLogger(__name__)

NAME = "executing"
MOST_DEATHS = 2
MOST_DEATHS_ANSWERED = 5
_SLOT_BYTES = 256
"""A model id has 200 at most."""
_POLL_S = 0.005
"""Between two looks of an operation that waits for a suspect, or of a suspect that waits for all others."""

Name = tuple[str, int]
"""model_id and seq_id."""


class Executing:
    """Thread safe. A file that cannot be written is logged once: the next process then suspects nobody."""

    def __init__(self, folder: Path) -> None:
        """Reads what the process before has left in the folder of the journal, and counts its death."""
        self._path = folder / NAME
        self._lock = threading.Lock()
        self._num_deaths: dict[Name, int] = {}
        """How often the process has ended in the execution of each suspect or condemned operation."""
        self._slots: dict[Name, int] = {}
        self._free: list[int] = []
        self._num_entered = 0
        """Executions that go on."""
        self._alone: Name | None = None
        """The suspect that is being executed, or that waits until nothing else is."""
        self._file: int | None = None
        try:
            self._num_deaths = _counted(self._path)
            self._file = self._rewritten()
        except OSError as error:
            self._give_up(error)
        for (model_id, seq_id), count in self._num_deaths.items():
            logger.warning("the trainer has ended %d times while it ran %s, seq_id %d", count, model_id, seq_id)

    def close(self) -> None:
        """Forgets what is being executed: the process is about to end by no fault of an operation."""
        with self._lock:
            for name in list(self._slots):
                self._write(name, is_executing=False)
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def is_suspect(self, model_id: str, seq_id: int) -> bool:
        """True for an operation that is to be executed while nothing else is."""
        return (model_id, seq_id) in self._num_deaths

    def check(self, model_id: str, seq_id: int, *, answered: bool = False) -> None:
        """Raises the error of an operation that is not executed any more. `answered`: it has an answer."""
        num_deaths = self._num_deaths.get((model_id, seq_id), 0)
        if num_deaths < (MOST_DEATHS_ANSWERED if answered else MOST_DEATHS):
            return
        times = "twice" if num_deaths == 2 else f"{num_deaths} times"
        raise ServiceError(
            f"the trainer ended {times} while it ran this; the log of the trainer, before it was started again, has "
            "the cause",
            model_id=model_id,
            seq_id=seq_id,
        )

    def forget(self, model_id: str, seq_id: int) -> None:
        """The answer of this operation is stored, or it has run again after a restart."""
        self._forget(lambda name: name == (model_id, seq_id))

    def forget_model(self, model_id: str) -> None:
        self._forget(lambda name: name[0] == model_id)

    def keep_models(self, model_ids: Collection[str]) -> None:
        """Forgets the operations of all other models."""
        self._forget(lambda name: name[0] not in model_ids)

    @asynccontextmanager
    async def stage(self, model_id: str, seq_id: int) -> AsyncIterator[None]:
        """Around a part of an execution that is not the compute thread's."""
        names = [(model_id, seq_id)]
        try:
            while not self._enter(names):  # noqa: ASYNC110 - the compute thread, too, is waited for
                await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            self._stand_back(names)
            raise
        try:
            yield
        finally:
            self.end(names)

    def begin(self, names: Sequence[Name]) -> None:
        """Of the compute thread, which waits here for a suspect, or with a suspect for the others."""
        while not self._enter(names):
            time.sleep(_POLL_S)

    def end(self, names: Sequence[Name]) -> None:
        with self._lock:
            self._num_entered -= 1
            if self._alone in names:
                self._alone = None
            for name in names:
                self._write(name, is_executing=False)

    def _enter(self, names: Sequence[Name]) -> bool:
        with self._lock:
            suspect = next((name for name in names if name in self._num_deaths), None)
            if self._alone is not None and self._alone != suspect:
                return False
            self._alone = suspect  # from here on nobody else enters
            if suspect is not None and self._num_entered:
                return False
            self._num_entered += 1
            for name in names:
                self._write(name, is_executing=True)
            return True

    def _stand_back(self, names: Sequence[Name]) -> None:
        with self._lock:
            if self._alone in names:
                self._alone = None

    def _forget(self, which: Callable[[Name], bool]) -> None:
        if not self._num_deaths:  # as nearly always
            return
        with self._lock:
            for name in [name for name in self._num_deaths if which(name)]:
                del self._num_deaths[name]
                if self._alone == name:
                    self._alone = None
                self._write(name, is_executing=False)

    # The file

    def _write(self, name: Name, *, is_executing: bool) -> None:
        """Called with the lock. A suspect keeps its slot, in which its deaths are counted."""
        if self._file is None:
            return
        deaths = self._num_deaths.get(name, 0)
        if not is_executing and not deaths and name not in self._slots:
            return
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = self._free.pop() if self._free else len(self._slots)
        data = _packed(name, deaths, is_executing=is_executing) if is_executing or deaths else b""
        if not data:
            self._free.append(self._slots.pop(name))
        try:
            os.pwrite(self._file, data.ljust(_SLOT_BYTES, b"\0"), slot * _SLOT_BYTES)
        except OSError as error:
            self._give_up(error)

    def _rewritten(self) -> int:
        """The file with the suspects, on the disk before any of them runs again."""
        new = self._path.with_name(f"{NAME}.new")
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        for slot, (name, count) in enumerate(self._num_deaths.items()):
            self._slots[name] = slot
            os.pwrite(file, _packed(name, count, is_executing=False).ljust(_SLOT_BYTES, b"\0"), slot * _SLOT_BYTES)
        os.fsync(file)
        new.rename(self._path)
        return file

    def _give_up(self, error: OSError) -> None:
        self._file = None
        logger.warning(
            "%s cannot be written, so that an operation which ends the trainer again and again will not be noticed: %s",
            *(self._path, error),
        )


def _packed(name: Name, deaths: int, *, is_executing: bool) -> bytes:
    model_id, seq_id = name
    return f"{int(is_executing)} {deaths} {seq_id} {model_id}".encode()


def _counted(path: Path) -> dict[Name, int]:
    """For each operation in the file, the deaths in whose moment it was being executed."""
    if not path.exists():
        return {}
    counted: dict[Name, int] = {}
    data = path.read_bytes()
    for start in range(0, len(data), _SLOT_BYTES):
        fields = data[start : start + _SLOT_BYTES].rstrip(b"\0").decode(errors="replace").split(" ", 3)
        if len(fields) != 4 or not all(field.isdecimal() for field in fields[:3]):
            continue  # empty, or damaged: nobody is suspected for that
        is_executing, deaths, seq_id = map(int, fields[:3])
        counted[fields[3], seq_id] = deaths + is_executing
    return counted
