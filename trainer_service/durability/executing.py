"""Which operations are being executed, as the next process finds it when this one has died.

An operation is being executed while its request becomes a batch, while the compute thread works at it, and while its
answer becomes a message. Meanwhile its name lies in a slot of a file beside the journal. Writing a slot is one `pwrite`
without a sync: the slot survives the end of the process. The end of the machine makes no suspect, because no operation
cuts the power. So the file begins with the kernel's boot id, and slots of an earlier boot do not count.

Each operation that was being executed when the process ended is a suspect. A suspect runs again while nothing else
does. Once its answer is stored it is a suspect no longer. If the process ends before, the suspect alone was being
executed: it is condemned, and does not run a third time. An operation with an answer, which runs again for what it does
to its model, has run through before, and without it the model is lost: it is condemned after more deaths.

An operation that reads or writes a checkpoint may do so for minutes, and a store that does not answer must not keep all
others waiting. So deaths in that time make no suspect. They are counted apart, and more of them are needed to condemn.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tinsmith.rpc.errors import ServiceError

logger = logging.getLogger(__name__)

NAME = "executing"
MOST_DEATHS = 2
MOST_DEATHS_ANSWERED = 5
MOST_DEATHS_STORING = 5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SLOT_BYTES = 256
"""A model id has 200 at most."""
_POLL_S = 0.005
"""Between two looks of an operation that waits for a suspect, or of a suspect that waits for all others."""

Name = tuple[str, int]
"""model_id and seq_id."""

_IDLE, _EXECUTING, _STORING = "idle", "executing", "storing"
"""State of an operation in its slot."""


@dataclass(slots=True)
class Deaths:
    """How often the process has ended in the middle of one operation."""

    executing: int = 0
    storing: int = 0


class Executing:
    """Thread safe. A slot that cannot be written, as on a full disk, is logged once: a death then counts for nobody."""

    def __init__(self, folder: Path) -> None:
        """Reads what the process before has left in the folder of the journal, and counts its death."""
        self._path = folder / NAME
        self._lock = threading.Lock()
        self._deaths: dict[Name, Deaths] = {}
        """Deaths of the process in each operation that had any."""
        self._executing: set[Name] = set()
        self._storing: set[Name] = set()
        """A save may be both: its version is scored while its files are written."""
        self._slots: dict[Name, int] = {}
        self._free: list[int] = []
        self._num_entered = 0
        """Executions that go on."""
        self._alone: Name | None = None
        """The suspect that is being executed, or that waits until nothing else is."""
        self._file: int | None = None
        self._has_failed = False
        try:
            self._deaths = _counted(self._path)
            self._file = self._rewritten()
        except OSError as error:
            self._warn(error)
        for (model_id, seq_id), deaths in self._deaths.items():
            logger.warning(
                "the trainer has ended %d times while it ran %s, seq_id %d, and %d times while it read or wrote its "
                "checkpoint",
                *(deaths.executing, model_id, seq_id, deaths.storing),
            )

    def close(self) -> None:
        """Forgets what is being executed: the process is about to end by no fault of an operation."""
        with self._lock:
            self._executing.clear()
            self._storing.clear()
            for name in list(self._slots):
                self._write(name)
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def is_suspect(self, model_id: str, seq_id: int) -> bool:
        """True for an operation that is to be executed while nothing else is."""
        return self._deaths.get((model_id, seq_id), Deaths()).executing > 0

    def check(self, model_id: str, seq_id: int, *, answered: bool = False) -> None:
        """Raises the error of an operation that is not executed any more. `answered`: it has an answer."""
        deaths = self._deaths.get((model_id, seq_id), Deaths())
        if deaths.executing >= (MOST_DEATHS_ANSWERED if answered else MOST_DEATHS):
            times, what = deaths.executing, "ran this"
        elif deaths.storing >= MOST_DEATHS_STORING:
            times, what = deaths.storing, "read or wrote the checkpoint of this"
        else:
            return
        often = "twice" if times == 2 else f"{times} times"
        raise ServiceError(
            f"the trainer ended {often} while it {what}; the log of the trainer, before it was started again, has "
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

    @contextmanager
    def storing(self, model_id: str, seq_id: int) -> Iterator[None]:
        """Notes that an operation reads or writes a checkpoint. Waits for no suspect, and holds up no operation."""
        name = (model_id, seq_id)
        with self._lock:
            self._storing.add(name)
            self._write(name)
        try:
            yield
        finally:
            with self._lock:
                self._storing.discard(name)
                self._write(name)

    def begin(self, names: Sequence[Name]) -> None:
        """Of the compute thread, which waits here for a suspect, or with a suspect for the others."""
        while not self._enter(names):
            time.sleep(_POLL_S)

    def end(self, names: Sequence[Name]) -> None:
        with self._lock:
            self._num_entered -= 1
            if self._alone in names:
                self._alone = None
            self._executing.difference_update(names)
            for name in names:
                self._write(name)

    def _enter(self, names: Sequence[Name]) -> bool:
        with self._lock:
            suspect = next((name for name in names if self.is_suspect(*name)), None)
            if self._alone is not None and self._alone != suspect:
                return False
            self._alone = suspect  # from here on nobody else enters
            if suspect is not None and self._num_entered:
                return False
            self._num_entered += 1
            self._executing.update(names)
            for name in names:
                self._write(name)
            return True

    def _stand_back(self, names: Sequence[Name]) -> None:
        with self._lock:
            if self._alone in names:
                self._alone = None

    def _forget(self, which: Callable[[Name], bool]) -> None:
        if not self._deaths:  # as nearly always
            return
        with self._lock:
            for name in [name for name in self._deaths if which(name)]:
                del self._deaths[name]
                if self._alone == name:
                    self._alone = None
                self._write(name)

    # The file

    def _write(self, name: Name) -> None:
        """Called with the lock. An operation with deaths keeps its slot, in which they are counted."""
        if self._file is None:
            return
        doing = _EXECUTING if name in self._executing else _STORING if name in self._storing else _IDLE
        deaths = self._deaths.get(name)
        is_kept = doing != _IDLE or deaths is not None
        if not is_kept and name not in self._slots:
            return
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = self._free.pop() if self._free else len(self._slots)
        if not is_kept:
            self._free.append(self._slots.pop(name))
        try:
            _put(self._file, slot, _packed(name, deaths or Deaths(), doing) if is_kept else "")
        except OSError as error:
            self._warn(error)

    def _rewritten(self) -> int:
        """The file with the suspects, on the disk before any of them runs again."""
        new = self._path.with_name(f"{NAME}.new")
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        _put(file, -1, _boot_id())
        for slot, (name, deaths) in enumerate(self._deaths.items()):
            self._slots[name] = slot
            _put(file, slot, _packed(name, deaths, _IDLE))
        os.fsync(file)
        new.rename(self._path)
        return file

    def _warn(self, error: OSError) -> None:
        if not self._has_failed:
            logger.warning(
                "%s cannot be written, so that an operation which ends the trainer again and again may go unnoticed: "
                "%s",
                *(self._path, error),
            )
        self._has_failed = True


def _boot_id() -> str:
    """The kernel's id of this boot of the machine; empty where the kernel has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _put(file: int, slot: int, text: str) -> None:
    """Writes a slot of the file. Slot -1 holds the boot id."""
    os.pwrite(file, text.encode().ljust(_SLOT_BYTES, b"\0"), (slot + 1) * _SLOT_BYTES)


def _packed(name: Name, deaths: Deaths, doing: str) -> str:
    model_id, seq_id = name
    return f"{doing} {deaths.executing} {deaths.storing} {seq_id} {model_id}"


def _counted(path: Path) -> dict[Name, Deaths]:
    """Deaths in the middle of each operation in the file. After a new boot the machine has ended, not the process."""
    if not path.exists():
        return {}
    counted: dict[Name, Deaths] = {}
    data = path.read_bytes()
    slots = [data[start : start + _SLOT_BYTES] for start in range(0, len(data), _SLOT_BYTES)]
    boot, *others = (slot.rstrip(b"\0").decode(errors="replace") for slot in slots or [b""])
    has_died = boot == _boot_id()
    for text in others:
        doing, *numbers, model_id = text.split(" ", 4) if text.count(" ") >= 4 else ("", "")
        if doing not in (_IDLE, _EXECUTING, _STORING) or not all(number.isdecimal() for number in numbers):
            continue  # empty, or damaged: nobody is suspected for that
        executing, storing, seq_id = map(int, numbers)
        deaths = Deaths(executing + (has_died and doing == _EXECUTING), storing + (has_died and doing == _STORING))
        if deaths != Deaths():
            counted[model_id, seq_id] = deaths
    return counted
