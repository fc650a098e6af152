"""Read and write locks of checkpoints, by location."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from trainer_service.storage.locations import Location


class Uses:
    """A writer of a checkpoint excludes all other readers and writers of that checkpoint, and of no other.

    The internal lock is never held while files are read or written.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: Counter[Location] = Counter()
        self._written: set[Location] = set()

    @contextlib.contextmanager
    def reading(self, location: Location) -> Iterator[None]:
        """A context that excludes writers. It waits for a writer that came before. Not to be nested."""
        with self._changed:
            self._changed.wait_for(lambda: location not in self._written)
            self._readers[location] += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers[location] -= 1
                if not self._readers[location]:
                    del self._readers[location]
                    self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self, location: Location) -> Iterator[None]:
        """A context that excludes readers and other writers. It waits for those that came before; later ones wait for
        it."""
        with self._changed:
            self._changed.wait_for(lambda: location not in self._written)
            self._written.add(location)
        try:
            with self._changed:
                self._changed.wait_for(lambda: location not in self._readers)
            yield
        finally:
            with self._changed:
                self._written.discard(location)
                self._changed.notify_all()
