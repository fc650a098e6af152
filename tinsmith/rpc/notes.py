"""Limits on the notes that clients attach to their runs, sessions and checkpoints: `user_metadata` and tags."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tinsmith.errors import InvalidRequest

MAX_ENTRIES = 1024
"""Largest number of tags, and of entries in `user_metadata`, of one session, run or checkpoint."""
MAX_CHARACTERS = 64 * 2**10
"""Largest number of characters in all tags, or in all of `user_metadata`, of one object. Also the limit of other texts
that are stored. Lists and searches read such texts by the thousand, and the trainer holds those of all live models in
memory."""


def texts_of(notes: Mapping[str, str] | Collection[str]) -> Iterable[str]:
    """All texts of `notes`: the keys and values of a mapping, or the tags themselves."""
    return [*notes, *notes.values()] if isinstance(notes, Mapping) else notes


def check_notes(notes: Mapping[str, str], *, field: str) -> None:
    """Raises InvalidRequest, naming `field`, for more entries or characters than are stored."""
    if len(notes) > MAX_ENTRIES:
        raise InvalidRequest(
            f"{field}: {len(notes)} entries are above {MAX_ENTRIES}, the most that is kept", field=field
        )
    if (number := sum(map(len, texts_of(notes)))) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"{field}: {number} characters in all are above {MAX_CHARACTERS}, the most that is kept", field=field
        )
