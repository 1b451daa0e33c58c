"""The answer to a refused request: the error and when to retry."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from scheduler_svc.core.errors import (
    DuplicateRequestError,
    NeverFitsError,
    NoWorkerError,
    QueueFullError,
    SchedulerError,
    UnreachableDeadlineError,
)
from svc_common.errors import AlreadyExistsError, InvalidRequestError, OverloadedError, ServiceError, UnavailableError

RETRY_NO_WORKER_S = 1.0
RETRY_STOPPING_S = 1.0
MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0


class RetryAdvice:
    """Estimates when a refused request may find room, from the rate at which requests ended recently."""

    def __init__(self, memory: int = 64) -> None:
        self._ends: deque[float] = deque(maxlen=memory)

    def record_end(self, now: float) -> None:
        self._ends.append(now)

    def seconds(self, num_waiting: int, now: float) -> float:
        """Seconds until a thirtieth of the queue has been served, so that returning requests find room."""
        if len(self._ends) < 2:
            return RETRY_NO_WORKER_S
        rate = len(self._ends) / max(now - self._ends[0], 1e-3)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, max(1.0, num_waiting / 30) / rate))


def refusal_from(error: SchedulerError, queue_retry_s: Callable[[], float]) -> ServiceError:
    """The core's error as the service's error. `queue_retry_s` gives the seconds until a full queue may have room."""
    if isinstance(error, QueueFullError):
        return OverloadedError(str(error), retry_after_s=queue_retry_s())
    if isinstance(error, UnreachableDeadlineError):
        return OverloadedError(str(error), retry_after_s=min(MAX_RETRY_S, error.retry_after_s))
    if isinstance(error, NoWorkerError):
        return UnavailableError(str(error), retry_after_s=RETRY_NO_WORKER_S)
    if isinstance(error, NeverFitsError):
        return InvalidRequestError(str(error), field=error.field)
    if isinstance(error, DuplicateRequestError):
        return AlreadyExistsError(str(error), field="request_id")
    return ServiceError(str(error))
