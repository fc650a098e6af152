"""vLLM's processes: one that has the engine, and with several workers one for each of them, started by that one.

However one of them ends, those below it end too: nothing goes on alone, and holds a GPU.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

import psutil

_TRACKER_S = 2.0


def die_with_parent() -> None:
    """Makes this process end with its parent from now on, even while it waits for another worker that is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def kill_all_below() -> None:
    """Ends all processes below this one, before it ends itself. Python's tracker of shared
    memory then removes what the others leave behind, and this waits until it has."""
    trackers: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("resource_tracker" in argument for argument in process.cmdline()):
                trackers.append(process)
            else:
                process.kill()
                process.wait()
    if trackers and (fd := resource_tracker.getfd()) is not None:
        os.close(fd)  # no other process has the pipe open any more, so the tracker ends
        psutil.wait_procs(trackers, timeout=_TRACKER_S)
