"""Logging: JSON lines on stderr, with the ids of the request that is being served."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task serves; the gateway sends it on as gRPC metadata x-request-id."""

REQUEST_ID_METADATA = "x-request-id"


class JsonFormatter(logging.Formatter):
    def __init__(self, **fields: object) -> None:
        """`fields` are in every line."""
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        if current := request_id.get():
            line["request_id"] = current
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def setup(level: str = "INFO", **fields: object) -> None:
    """Called once, in a service's __main__. `fields` are in every line."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter(**fields)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
