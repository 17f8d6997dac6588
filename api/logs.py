"""Logging that a flood of requests cannot turn into a flood of lines."""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar

import msgspec

current_request: ContextVar[str | None] = ContextVar("current_request", default=None)
"""The id of the HTTP request that the running task serves."""

_WINDOW_S = 10.0
_KINDS = 1000
_LINES = 20  # of one kind in a window


class RateLimit(logging.Filter):
    """At most 20 lines of one kind (logger, level, text before its values are put in) in 10 s; the first one after
    that says how many were left out. The access log, which somebody asked for, is not limited."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}  # window's start, lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "uvicorn.access":
            return True
        kind, now = (record.name, record.levelno, str(record.msg)[:200]), time.monotonic()
        start, lines = self._kinds.get(kind, (now, 0))
        left_out = 0
        if now - start > _WINDOW_S:
            start, lines, left_out = now, 0, max(0, lines - _LINES)
            self._kinds = {k: v for k, v in self._kinds.items() if now - v[0] <= _WINDOW_S}
        if len(self._kinds) > _KINDS:  # texts that are all different
            self._kinds.clear()
        self._kinds[kind] = (start, lines + 1)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} lines like this were left out)", None
        return lines < _LINES


class JsonFormatter(logging.Formatter):
    """One object a line: time (seconds since 1970), level, logger, message, and the request's id and the traceback if
    there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := current_request.get()) is not None:
            line["request_id"] = request
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
