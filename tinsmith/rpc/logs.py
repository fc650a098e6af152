"""Logging on stderr, as JSON lines or as text for people. Lines carry the ids of the request that a task serves."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task serves. Calls to other services carry it as gRPC metadata x-request-id."""

model_id: ContextVar[str] = ContextVar("model_id", default="")
"""Model that the request names; empty if it names none."""

owner: ContextVar[str] = ContextVar("owner", default="")
"""Owner of the key that came with the request, known to the gateway only. Never the key itself."""

REQUEST_ID_METADATA = "x-request-id"

Format = Literal["json", "text"]

_TALKATIVE = ("aiosqlite", "aiobotocore", "asyncpg", "botocore", "fsspec", "gcsfs", "httpcore", "s3fs", "urllib3")

_trace_id: Callable[[], str] = str


def set_trace_id(trace_id: Callable[[], str]) -> None:
    """Sets the function that returns the id of the present trace, or "" outside of a trace."""
    global _trace_id
    _trace_id = trace_id


def _ids() -> dict[str, str]:
    """The ids of the request that this task serves, without empty ones."""
    found = {
        "request_id": request_id.get(),
        "model_id": model_id.get(),
        "owner": owner.get(),
        "trace_id": _trace_id(),
    }
    return {name: value for name, value in found.items() if value}


class _Formatter(logging.Formatter):
    converter = time.gmtime

    def __init__(self, **fields: object) -> None:
        """`fields`: added to every line."""
        super().__init__()
        self._fields = fields

    def _time(self, record: logging.LogRecord) -> str:
        return self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z"


class JsonFormatter(_Formatter):
    """One JSON object for each line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self._time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **_ids(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(_Formatter):
    """Text for people, with the fields and ids in brackets at the end of the line."""

    def format(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{name}={_on_one_line(value)}" for name, value in {**self._fields, **_ids()}.items())
        line = f"{self._time(record)} {record.levelname:7} {record.name}: {record.getMessage()}"
        if facts:
            line += f" [{facts}]"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _on_one_line(value: object) -> str:
    """The value without line breaks. Ids may come from callers, who could forge a log line with a line break."""
    return str(value).encode("unicode_escape").decode()


def setup(level: str = "INFO", format: Format = "json", **fields: object) -> None:
    """Sets up logging. To be called once, as a service starts. `fields`: added to every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(**fields) if format == "json" else TextFormatter(**fields))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    quieten_libraries()


def quieten_libraries() -> None:
    """Limits libraries to INFO. At DEBUG they log their arguments: rows with secrets, signed requests, credentials."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger().level))
