"""Logs: one line per event on stderr, as text for terminals or JSON for collectors.

A JSON line has time, level, service, instance, logger and message; request_id if the event belongs to a request; and
the fields that the event passes in `extra`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import deque
from contextvars import ContextVar
from typing import TextIO

# The request that the running task serves. Set by code that handles one request per task; other code uses `extra`.
current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)

NUM_KEPT_LINES = 2000
MAX_KEPT_CHARS = 4000

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
RESERVED = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line; `extra` fields (request_id, worker_id) become keys."""

    def __init__(self, service: str, instance: str = "") -> None:
        super().__init__()
        self._service = service
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "instance": self._instance,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update({k: v for k, v in record.__dict__.items() if k not in RESERVED})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """One line per event: control characters in it are escaped, so that a name that a peer chose cannot forge lines or
    drive a terminal. Tracebacks follow on lines of their own.
    """

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service} %(levelname)s %(message)s", "%H:%M:%S")
        self._second, self._shown = -1, ""  # the last time that was formatted

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        if int(record.created) != self._second:
            self._second, self._shown = int(record.created), super().formatTime(record, datefmt)
        return self._shown

    def formatMessage(self, record: logging.LogRecord) -> str:
        return CONTROL.sub(lambda found: ascii(found[0])[1:-1], super().formatMessage(record))


class RequestIdFilter(logging.Filter):
    """Adds the request_id of the current task to a record without one."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = current_request_id.get()
        if request_id is not None and not hasattr(record, "request_id"):
            record.request_id = request_id
        return True


class HangUpFilter(logging.Filter):
    """Drops the tracebacks of asyncio and gRPC for handlers whose client has left: any client can cause them."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        message = record.getMessage()
        return "CancelledError" not in message and not message.startswith("ExecuteBatchError raised in core")


class KeepingHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr, and keeps the last lines for a report."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.lines: deque[str] = deque(maxlen=NUM_KEPT_LINES)

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        self.lines.append(line[:MAX_KEPT_CHARS])
        return line


def recent_lines() -> list[str]:
    """The last lines of this process's log; none before `setup_logging`."""
    handlers = (handler for handler in logging.getLogger().handlers if isinstance(handler, KeepingHandler))
    return [line for handler in handlers for line in list(handler.lines)]


def setup_logging(service: str, log_format: str = "text", level: str = "INFO", *, instance: str = "") -> None:
    """Configure the root logger of a service process. `log_format` is text or json; `instance` names the process."""
    handler = KeepingHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter(service, instance))
    else:
        handler.setFormatter(TextFormatter(service))
    handler.addFilter(HangUpFilter())
    handler.addFilter(RequestIdFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    _skip_unused_facts()


def _skip_unused_facts() -> None:
    """Do not collect what no formatter here shows: the caller's file and line, thread, process. It is half of the cost
    of a log line; see "Optimization" in the documentation of `logging`.
    """
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
