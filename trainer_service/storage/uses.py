"""Locks for writers of checkpoints, by location."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from trainer_service.storage.locations import Location


class Uses:
    """A writer of a checkpoint excludes all other writers of that checkpoint, and of no other. Readers wait for nobody
    and hold up nobody: see the storages.

    The internal lock is never held while files are read or written.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._written: set[Location] = set()

    @contextlib.contextmanager
    def writing(self, location: Location) -> Iterator[None]:
        """A context that excludes other writers. It waits for one that came before."""
        with self._changed:
            self._changed.wait_for(lambda: location not in self._written)
            self._written.add(location)
        try:
            yield
        finally:
            with self._changed:
                self._written.discard(location)
                self._changed.notify_all()
