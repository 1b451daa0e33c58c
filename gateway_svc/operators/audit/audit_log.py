"""The audit log of a gateway process: begins entries for calls over gRPC and HTTP, and writes their lines."""

from __future__ import annotations

import urllib.parse
from functools import partial
from typing import Any

import grpc

from gateway_svc.callers.caller import current_caller
from gateway_svc.operators.audit.entry import CANCELLED, OK, Entry, current_entry
from gateway_svc.operators.audit.line_writer import LineWriter
from svc_common.calls import PROBES
from svc_common.config import SettingError

CLOSE_TIMEOUT_S = 5.0


class AuditLogError(SettingError):
    """The file of --audit-log cannot be opened."""


class AuditLog:
    """Writes a line per request to a file, or to stdout for `-`. Raises AuditLogError."""

    def __init__(self, path: str, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        try:
            self._lines = LineWriter(path)
        except OSError as error:
            raise AuditLogError(f"--audit-log {path}: {error.strerror or error}") from None

    @property
    def num_lost(self) -> int:
        """Lines that were dropped because the file could not be written for long."""
        return self._lines.num_lost

    def begin(self, method: str, peer: str) -> Entry:
        """The entry of a call, also as `current_entry`. The caller ends it."""
        entry = Entry(method, peer, self._write, caller=current_caller.get())
        current_entry.set(entry)
        return entry

    def on_call(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Begin the entry of a call over gRPC, which ends with the call. Probes have no line."""
        if not method.startswith(PROBES):
            entry = self.begin(method, urllib.parse.unquote(context.peer().partition(":")[2]))
            context.add_done_callback(partial(_end_call, entry))  # type: ignore[arg-type]

    def close(self) -> None:
        self._lines.close(CLOSE_TIMEOUT_S)

    def _write(self, entry: Entry) -> None:
        self._lines.put(lambda: {"gateway": self._gateway_id, **entry.facts()})


def _end_call(entry: Entry, context: Any) -> None:
    """A call that is not done was cancelled by the client, or by its deadline."""
    code = context.code()
    entry.end(CANCELLED if not context.done() else OK if code is None else code.name)
