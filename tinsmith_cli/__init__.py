"""The `tinsmith` command. Its commands are imported when it runs, which takes a second."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

_INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, which is the one that shells use."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        _import_commands()
        from tinsmith_cli import commands

        try:
            return commands.run(argv)
        finally:
            sys.stdout.flush()  # here, because an error in the flush at exit is only printed
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        # The reader of the output may have closed it, as in `tinsmith keys list | head -1`.
        if not isinstance(error, BrokenPipeError):
            if _can_flush():
                raise
            print(f"tinsmith: the output cannot be written: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
        return 1


def _import_commands() -> None:
    """Imports the commands. Meanwhile Ctrl-C ends the process at once, because nothing has begun. With a
    KeyboardInterrupt, some imports would print a traceback and go on."""
    handles = threading.current_thread() is threading.main_thread()
    if handles and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
        import tinsmith_cli.commands  # noqa: F401

        signal.signal(signal.SIGINT, signal.default_int_handler)


def _can_flush() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True
