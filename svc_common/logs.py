"""Logs: one line per event on stderr, as text for people or JSON for collectors."""

from __future__ import annotations

import json
import logging
import sys
import time

RESERVED = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line; `extra` fields (request_id, worker_id) become keys."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update({k: v for k, v in record.__dict__.items() if k not in RESERVED})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class CancelledNoiseFilter(logging.Filter):
    """Drops asyncio's tracebacks of handlers that were cancelled because a client left."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CancelledError" not in record.getMessage()


def setup_logging(service: str, log_format: str = "text", level: str = "INFO") -> None:
    """Configure the root logger of a service process. `log_format` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(service))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {service} %(levelname)s %(message)s", "%H:%M:%S"))
    handler.addFilter(CancelledNoiseFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
