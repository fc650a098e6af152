"""Readers and writers of each checkpoint at this moment, by its location."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from trainer_service.storage.locations import Location


class Uses:
    """One writer of a checkpoint excludes all others of that checkpoint, and nobody of another one.

    Its lock is held for bookkeeping only, and never while anything is read or written.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: Counter[Location] = Counter()
        self._written: set[Location] = set()

    @contextlib.contextmanager
    def reading(self, location: Location) -> Iterator[None]:
        """Waits for a writer that has come before. Not to be nested."""
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
        """Waits for those who have come before, and makes those wait who come after."""
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
