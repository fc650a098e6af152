"""Records which operations are being executed, so that an operation that kills the process is not run for ever.

An operation is being executed while its request becomes a batch, while the compute thread works on it, while its
answer becomes a message, and while the journal stores the answer. During that time its name is in a slot of a file
beside the journal. Writing a slot is one `pwrite` without a sync, which survives the end of the process. The end of the
machine does not count, because no operation cuts the power: the file begins with the kernel's boot id, and slots of an
earlier boot are ignored.

Other work has a name of its own, because it is no operation of the journal, or not yet: a request that is being packed
for the journal and appended to it, for example, or a model that is being parked or deleted. The client sends such a
request again after a restart. Its deaths are forgotten when the work has ended without one.

All work that was in progress when the process ended is a suspect. A suspect runs again while nothing else runs. Once
its answer is stored, or the work has ended, it is a suspect no longer. If the process ends again before that, the
suspect must be the cause, and does not run a third time. Work that a model depends on is given up only after more
deaths: an operation that has an answer and runs again after a restart to change its model, and the reading and writing
of the model's snapshots.

Reading or writing a checkpoint may take minutes, and a storage that hangs must not delay all other operations. So such
work has deaths of another kind, and its suspects make only other work on checkpoints wait, for a limited time. They
themselves wait until the suspects that compute have ended, so that none of them is blamed in their place. A death while
a suspect is executed is the suspect's alone. It also explains the suspect's first death, so it takes one death back
from all work that read or wrote a checkpoint then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tinsmith.errors import ServiceError

logger = logging.getLogger(__name__)

NAME = "executing"
MOST_DEATHS = 2
"""Deaths of the process in some work after which it does not run again."""
MOST_DEATHS_OF_MODEL = 5
"""The limit for work without which a model is lost."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SLOT_BYTES = 256
"""Size of a slot. It fits any operation: a model id has at most 200 bytes."""
_POLL_S = 0.005
"""Pause between two attempts of a waiting operation to begin, in seconds. Operations wait for a suspect, and a suspect
waits for all operations."""
_PATIENCE_S = 30.0
"""Longest wait for suspects, or of a suspect for others, before a checkpoint is read or written. The suspect's model
may never come back, and a storage may hang."""

_MOST_OTHERS = 1000
"""Names of other work than operations that are kept over a restart. Without a limit, requests that nobody sends again
would stay in the file for ever."""

Name = tuple[str, int]
"""An operation: (model_id, seq_id). Other work: ("WORD MODEL_ID", number), or without a model ("WORD WORD", number);
no model id has a space."""

_IDLE, _EXECUTING, _STORING = "idle", "executing", "storing"
"""What an operation does, as written in its slot."""


@dataclass(slots=True)
class Deaths:
    """How often the process has ended during one operation."""

    executing: int = 0
    """Deaths while it was being executed."""
    storing: int = 0
    """Deaths while it read or wrote a checkpoint."""


class Executing:
    """Records executions and limits suspects. Thread safe.

    A failure to write slots, as on a full disk, is logged once. A death of the process is then not counted.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the file that the previous process left in the journal's folder, and counts its death."""
        self._path = folder / NAME
        self._lock = threading.Lock()
        self.deaths: dict[Name, Deaths] = {}
        """Deaths of the process during each operation; operations without deaths are absent."""
        self._executing: Counter[Name] = Counter()
        """Executions in progress. A request that is sent twice may be packed twice at a time."""
        self._storing: Counter[Name] = Counter()
        """Operations that read or write a checkpoint. A save may also be in `_executing`: its version is scored while
        its files are written."""
        self._slots: dict[Name, int] = {}
        """Slots in use, by operation."""
        self._free: list[int] = []
        """Slots that are free again."""
        self._num_entered = 0
        """Number of executions in progress."""
        self._alone: Name | None = None
        """The suspect that is being executed, or that waits until nothing else is being executed."""
        self._storing_alone: Name | None = None
        """The suspect that reads or writes a checkpoint, or that waits until no other model's work does."""
        self._file: int | None = None
        self._has_failed = False
        try:
            self.deaths = _counted(self._path)
            self._file = self._rewritten()
        except OSError as error:
            self._warn(error)
        for (model_id, seq_id), deaths in self.deaths.items():
            logger.warning(
                "the trainer has ended %d times while it ran %s, seq_id %d, and %d times while it read or wrote its "
                "checkpoint",
                *(deaths.executing, model_id, seq_id, deaths.storing),
            )

    def close(self) -> None:
        """Clears all executions from the file: the process is about to end, but not because of an operation."""
        with self._lock:
            self._executing.clear()
            self._storing.clear()
            for name in list(self._slots):
                self._write(name)
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def is_suspect(self, model_id: str, seq_id: int) -> bool:
        """True for an operation that must be executed while nothing else is."""
        return self.deaths.get((model_id, seq_id), Deaths()).executing > 0

    def check(self, model_id: str, seq_id: int, *, of_model: bool = False) -> None:
        """Raises ServiceError for work that has been given up, because the process has ended while it was executed.
        `of_model`: without the work its model is lost."""
        times = self.deaths.get((model_id, seq_id), Deaths()).executing
        if times >= _most(of_model):
            raise _given_up(model_id, seq_id, times, "ran this")

    def check_storing(self, model_id: str, seq_id: int, *, of_model: bool = False) -> None:
        """As `check`, for work that reads or writes a checkpoint. Before it runs, call `turn_to_store` instead: the
        work may lose a death while it waits there."""
        times = self.deaths.get((model_id, seq_id), Deaths()).storing
        if times >= _most(of_model):
            raise _given_up(model_id, seq_id, times, "read or wrote the checkpoint of this")

    def forget(self, model_id: str, seq_id: int) -> None:
        """Forgets an operation's deaths: its answer is stored, or it has run again after a restart."""
        self._forget(lambda name: name == (model_id, seq_id))

    def forget_model(self, model_id: str) -> None:
        """Forgets the deaths of a model's operations, and of other work for the model."""
        self._forget(lambda name: _model_of(name) == model_id)

    def keep_models(self, model_ids: Collection[str]) -> None:
        """Forgets the deaths of operations of all other models. Deaths in other work are kept: the model of a request
        that is not in the journal may not exist yet."""
        others = [name for name in self.deaths if " " in name[0]]
        others.sort(key=lambda name: self.deaths[name].executing + self.deaths[name].storing, reverse=True)
        kept = set(others[:_MOST_OTHERS])
        self._forget(lambda name: name not in kept and name[0] not in model_ids)

    @asynccontextmanager
    async def stage(self, model_id: str, seq_id: int) -> AsyncIterator[None]:
        """A context for a part of an execution outside the compute thread. It waits as `begin` does."""
        names = [(model_id, seq_id)]
        try:
            while not self._enter(names):  # noqa: ASYNC110 - it may wait for the compute thread, which sets no event
                await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            self._stand_back(names)
            raise
        try:
            yield
        finally:
            self.end(names)

    async def turn_to_store(self, model_id: str, seq_id: int, *, of_model: bool = False) -> None:
        """Waits, at most _PATIENCE_S, until work may read or write its checkpoint. All work waits while a suspect of
        another model reads or writes one. A suspect also waits until the suspects of other models have been executed,
        and until no other model's work reads or writes a checkpoint. Then raises ServiceError for work that has been
        given up. Call `storing` or `other` at once afterwards."""
        name = model_id, seq_id
        until = time.monotonic() + _PATIENCE_S
        try:
            while not self._may_store(name) and time.monotonic() < until:  # noqa: ASYNC110 - as in `stage`
                await asyncio.sleep(_POLL_S)
            self.check(*name, of_model=of_model)
            self.check_storing(*name, of_model=of_model)
        except BaseException:
            self._stand_back([name])
            raise

    def turn_to_store_on_thread(self, model_id: str, seq_id: int) -> None:
        """As `turn_to_store`, and blocks its thread."""
        name = model_id, seq_id
        until = time.monotonic() + _PATIENCE_S
        while not self._may_store(name) and time.monotonic() < until:
            time.sleep(_POLL_S)
        try:
            self.check(*name)
            self.check_storing(*name)
        except ServiceError:
            self._stand_back([name])
            raise

    @contextmanager
    def storing(self, model_id: str, seq_id: int) -> Iterator[None]:
        """A context in which work reads or writes a checkpoint, after `turn_to_store`."""
        name = (model_id, seq_id)
        with self._lock:
            self._storing[name] += 1
            self._write(name)
        try:
            yield
        finally:
            with self._lock:
                self._storing -= Counter([name])  # drops what is 0
                if self._storing_alone == name:
                    self._storing_alone = None
                self._write(name)

    @contextmanager
    def other(self, name: Name) -> Iterator[None]:
        """A context for work on a checkpoint that belongs to no operation, as `storing`. At its end, the deaths in this
        work are forgotten."""
        try:
            with self.storing(*name):
                yield
        except ServiceError:
            self.forget(*name)
            raise
        self.forget(*name)  # not after another error: a fault of the device is a death, too

    def blame(self, name: Name) -> None:
        """Records the work as being executed until the process ends, so that the end of the process counts as a death
        in this work."""
        with self._lock:
            self._executing[name] += 1
            self._write(name)

    def begin(self, names: Sequence[Name]) -> None:
        """Begins to execute operations on the compute thread. Waits while a suspect is being executed; for a suspect,
        waits until nothing else is."""
        while not self._enter(names):
            time.sleep(_POLL_S)

    def end(self, names: Sequence[Name]) -> None:
        """Ends what `begin` has begun with the same names."""
        with self._lock:
            self._num_entered -= 1
            if self._alone in names:
                self._alone = None
            self._executing -= Counter(names)  # drops what is 0
            for name in names:
                self._write(name)

    def _enter(self, names: Sequence[Name]) -> bool:
        """Begins the executions and returns True, or returns False when they have to wait."""
        with self._lock:
            suspect = next((name for name in names if self.is_suspect(*name)), None)
            if self._alone is not None and self._alone != suspect:
                return False
            self._alone = suspect  # no other operation begins from here on
            if suspect is not None and self._num_entered:
                return False
            self._num_entered += 1
            self._executing.update(names)
            for name in names:
                self._write(name)
            return True

    def _may_store(self, name: Name) -> bool:
        """Whether the work may read or write its checkpoint now; see `turn_to_store`."""
        own = _model_of(name)
        with self._lock:
            if self._storing_alone is not None and _model_of(self._storing_alone) != own:
                return False
            if not self.deaths.get(name, Deaths()).storing:
                return True
            if any(
                deaths.executing > 0 and " " not in model_id and model_id != own
                for (model_id, _), deaths in self.deaths.items()
            ):
                return False
            self._storing_alone = name  # from here on no other model's work begins
            return all(_model_of(other) == own for other in self._storing)

    def _stand_back(self, names: Sequence[Name]) -> None:
        """Gives up waiting: a suspect among the operations no longer makes others wait."""
        with self._lock:
            if self._alone in names:
                self._alone = None
            if self._storing_alone in names:
                self._storing_alone = None

    def _forget(self, which: Callable[[Name], bool]) -> None:
        if not self.deaths:  # nearly always; saves the lock
            return
        with self._lock:
            for name in [name for name in self.deaths if which(name)]:
                del self.deaths[name]
                if self._alone == name:
                    self._alone = None
                if self._storing_alone == name:
                    self._storing_alone = None
                self._write(name)

    # The file

    def _write(self, name: Name) -> None:
        """Writes an operation's slot, or clears it. An operation with deaths keeps its slot. Called with the lock."""
        if self._file is None:
            return
        doing = _EXECUTING if name in self._executing else _STORING if name in self._storing else _IDLE
        deaths = self.deaths.get(name)
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
        """Writes a new file with the deaths so far, synced before any suspect runs again. Returns its descriptor."""
        new = self._path.with_name(f"{NAME}.new")
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        _put(file, -1, _boot_id())
        for slot, (name, deaths) in enumerate(self.deaths.items()):
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


def _model_of(name: Name) -> str:
    """The model_id in a name, or its last word."""
    return name[0].rpartition(" ")[2]


def _most(of_model: bool) -> int:
    return MOST_DEATHS_OF_MODEL if of_model else MOST_DEATHS


def _given_up(model_id: str, seq_id: int, times: int, what: str) -> ServiceError:
    often = "twice" if times == 2 else f"{times} times"
    return ServiceError(
        f"the trainer ended {often} while it {what}; the log of the trainer, before it was started again, has "
        "the cause",
        model_id=_model_of((model_id, seq_id)),
        seq_id=seq_id,
    )


def arriving(kind: str, model_id: str) -> str:
    """First part of the name of a request that is being packed for the journal. `kind`: kind of its operation. A skip
    has another name, so that it can take the place of a request that is given up."""
    return f"{kind} {model_id}"


def other_work(what: str, content: bytes) -> Name:
    """Name of work that belongs to no operation. `what`: a word for the work, and a model_id or another word."""
    return what, xxhash.xxh3_64_intdigest(content) >> 1


def deletion(model_id: str) -> Name:
    """Name of a model's deletion. It does not end with the model's id, because all other names of the model are
    forgotten before the deletion ends."""
    return other_work("delete model", model_id.encode())


def _boot_id() -> str:
    """The kernel's id of the machine's current boot; empty where the kernel has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _put(file: int, slot: int, text: str) -> None:
    """Writes a slot of the file. Slot -1, at the file's beginning, holds the boot id."""
    os.pwrite(file, text.encode().ljust(_SLOT_BYTES, b"\0"), (slot + 1) * _SLOT_BYTES)


def _packed(name: Name, deaths: Deaths, doing: str) -> str:
    model_id, seq_id = name
    return f"{doing} {deaths.executing} {deaths.storing} {seq_id} {model_id}"


def _counted(path: Path) -> dict[Name, Deaths]:
    """Reads the file and counts the last death, except after a new boot: then the machine ended, not the process.

    Returns the deaths of each operation that has any.
    """
    if not path.exists():
        return {}
    counted: dict[Name, Deaths] = {}
    data = path.read_bytes()
    slots = [data[start : start + _SLOT_BYTES] for start in range(0, len(data), _SLOT_BYTES)]
    boot, *others = (slot.rstrip(b"\0").decode(errors="replace") for slot in slots or [b""])
    has_died = boot == _boot_id()
    noted: list[tuple[Name, Deaths, str]] = []
    for text in others:
        doing, *numbers, model_id = text.split(" ", 4) if text.count(" ") >= 4 else ("", "")
        if doing not in (_IDLE, _EXECUTING, _STORING) or not all(number.isdecimal() for number in numbers):
            continue  # the slot is empty or damaged
        executing, storing, seq_id = map(int, numbers)
        noted.append(((model_id, seq_id), Deaths(executing, storing), doing if has_died else _IDLE))
    by_suspect = any(doing == _EXECUTING and deaths.executing for _, deaths, doing in noted)
    for name, deaths, doing in noted:
        executing = deaths.executing + (doing == _EXECUTING)
        storing = max(0, deaths.storing - 1) if by_suspect else deaths.storing + (doing == _STORING)
        if executing or storing:
            counted[name] = Deaths(executing, storing)
    return counted
