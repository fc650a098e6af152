"""Bounds of what clients note about their runs, sessions and checkpoints: `user_metadata` and tags."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tinsmith.rpc.errors import InvalidRequest

MAX_ENTRIES = 1024
"""Tags, or notes, of one session, run or checkpoint."""
MAX_CHARACTERS = 64 * 2**10
"""Most characters of all tags, or all notes, of one object, and of other texts that are kept. Lists and searches read
such texts by the thousand, and the trainer holds those of all live models in memory."""


def texts_of(notes: Mapping[str, str] | Collection[str]) -> Iterable[str]:
    """Keys and values of notes, or the tags."""
    return [*notes, *notes.values()] if isinstance(notes, Mapping) else notes


def check_notes(notes: Mapping[str, str], *, field: str) -> None:
    """Raises InvalidRequest for more notes than are kept."""
    if len(notes) > MAX_ENTRIES:
        raise InvalidRequest(
            f"{field}: {len(notes)} entries are above {MAX_ENTRIES}, the most that is kept", field=field
        )
    if (number := sum(map(len, texts_of(notes)))) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"{field}: {number} characters in all are above {MAX_CHARACTERS}, the most that is kept", field=field
        )
