"""A Generate, Resume, Embed or Score call in progress, for calls and shutdowns that end it."""

from __future__ import annotations

from gateway_svc.scheduler_request import SchedulerRequest
from svc_common.errors import QuireError


class OpenStream:
    """One call in progress. It has no requests until its prompts are tokenized."""

    def __init__(self, scoped_id: str, num_bytes: int) -> None:
        self.scoped_id = scoped_id
        self.num_bytes = num_bytes
        self._requests: list[SchedulerRequest] = []
        self.is_aborted = False
        self._error: QuireError | None = None

    def set_request(self, request: SchedulerRequest) -> None:
        """Attach a request of the call. Raises the error of `end` if that was called before."""
        if self._error is not None:
            raise self._error
        self._requests.append(request)
        if self.is_aborted:
            request.abort()

    def end(self, error: QuireError) -> None:
        """Cancel the requests now, and end the stream with this error after the tokens received so far."""
        self._error = error
        for request in self._requests:
            request.fail(error)
            request.release()

    def abort(self) -> None:
        """End the stream with ABORTED."""
        self.is_aborted = True
        for request in self._requests:
            request.abort()
