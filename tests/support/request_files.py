"""The files whose code one request runs, and the lists of them in docs/architecture.md ("Files of a request").

A test sends a real request inside `traced`, and compares what it finds with `listed`.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PAGE = ROOT / "docs/architecture.md"


def listed(title: str) -> set[str]:
    """The files in the list below the heading `### <title>`, one bullet each: "- `path/of/file.py`: what it does"."""
    sections = re.split(r"^##+ ", _PAGE.read_text(), flags=re.MULTILINE)
    (section,) = [section for section in sections if section.partition("\n")[0].strip() == title]
    files = re.findall(r"^- `([^`]+)`", section, flags=re.MULTILINE)
    assert files, f"{_PAGE}: {title!r} lists no file"
    assert len(files) == len(set(files)), f"{_PAGE}: {title!r} lists a file twice"
    return set(files)


@contextmanager
def traced(package: str, *, when: Callable[[], bool] = lambda: True) -> Iterator[set[str]]:
    """The files of the package whose functions are called inside the block, with paths from the repository's root.

    Sees this thread, and threads that start inside the block. `when`: called at each call of a function; a call for
    which it returns False does not count, such as one of a background task.
    """
    files: set[str] = set()
    prefix = f"{ROOT / package}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(prefix) and frame.f_code.co_name != "<module>" and when():
            files.add(path[len(f"{ROOT}/") :])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
