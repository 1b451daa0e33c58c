"""Logs: one line per event on stderr, as text for terminals or JSON for collectors.

A JSON line has time, level, service, instance, logger and message; request_id if the event belongs to a request; and
the fields that the event passes in `extra`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

# The request that the running task serves. Set by code that handles one request per task; other code uses `extra`.
current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)

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


class RequestIdFilter(logging.Filter):
    """Gives a record the request_id of its task, unless it has its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = current_request_id.get()
        if request_id is not None and not hasattr(record, "request_id"):
            record.request_id = request_id
        return True


class CancelledNoiseFilter(logging.Filter):
    """Drops asyncio's tracebacks of handlers that were cancelled because their client left."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CancelledError" not in record.getMessage()


def setup_logging(service: str, log_format: str = "text", level: str = "INFO", *, instance: str = "") -> None:
    """Configure the root logger of a service process. `log_format` is text or json; `instance` names the process."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(service, instance))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {service} %(levelname)s %(message)s", "%H:%M:%S"))
    handler.addFilter(CancelledNoiseFilter())
    handler.addFilter(RequestIdFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
