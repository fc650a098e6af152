"""The process of one rank: its threads, and how it ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from tinsmith.child import die_with_parent
from tinsmith.rpc import logs
from trainer_service.ranks.place import Place

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
"""Time after SIGTERM for rank 0 to end the work and stop this rank, in seconds. torchrun signals all ranks at once."""


def begin(place: Place, *, log_level: str, log_format: logs.Format = "json") -> None:
    """Sets up logging, and makes the process end with torchrun, its parent. Called once, before anything else."""
    logs.setup(log_level, log_format, **({} if place.alone else {"rank": place.rank}))
    if not place.alone:
        die_with_parent(os.getppid())


def num_threads(place: Place, wanted: int, *, cores: int) -> int:
    """Number of CPU threads of this rank; 0 means torch's default."""
    return wanted if wanted or place.alone else max(1, cores // place.local_world_size)


def follow(work: Callable[[], object]) -> NoReturn:
    """Runs the work of a rank other than 0, then ends the process.

    After a signal rank 0 ends the work of all ranks; a rank that rank 0 does not stop within _STOP_TIMEOUT_S ends
    itself. The work runs in a thread of its own, because Python handles no signal while the main thread waits for
    another rank.
    """
    failed = threading.Event()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.set()
            logger.exception("this rank has failed: %s: %s", type(error).__name__, error)

    def stop(*_: Any) -> None:
        stopping.set()
        timer = threading.Timer(_STOP_TIMEOUT_S, os._exit, [0])
        timer.daemon = True
        timer.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    thread = threading.Thread(target=run, name="compute", daemon=True)
    thread.start()
    thread.join()
    leave(1 if failed.is_set() else 0)


def leave(status: int) -> NoReturn:
    """Ends the process at once: a regular exit would wait for threads that cannot be stopped."""
    logging.shutdown()
    os._exit(status)


stopping = threading.Event()
"""Set when this rank has been told to stop. From then on a lost rank is no failure."""
