"""A Generate or Resume call in progress, for calls and shutdowns that end it."""

from __future__ import annotations

from gateway_svc.scheduler_request import SchedulerRequest
from svc_common.errors import QuireError


class OpenStream:
    """One Generate call in progress; `request` is None until the prompt is tokenized."""

    def __init__(self, scoped_id: str, num_bytes: int) -> None:
        self.scoped_id = scoped_id
        self.num_bytes = num_bytes
        self.request: SchedulerRequest | None = None
        self.is_aborted = False
        self._error: QuireError | None = None

    def set_request(self, request: SchedulerRequest) -> None:
        """Attach the request. Raises the error of `end` if that was called before."""
        if self._error is not None:
            raise self._error
        self.request = request
        if self.is_aborted:
            request.abort()

    def end(self, error: QuireError) -> None:
        """Cancel the request now, and end the stream with this error after the tokens received so far."""
        self._error = error
        if self.request is not None:
            self.request.fail(error)
            self.request.release()

    def abort(self) -> None:
        """End the stream with ABORTED."""
        self.is_aborted = True
        if self.request is not None:
            self.request.abort()
