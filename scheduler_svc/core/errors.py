"""Errors with which the core refuses requests, workers and answers.

SchedulerError
  QueueFullError            the queue is full: retry later
  UnreachableDeadlineError  the first token would come too late: retry later, or allow more time
  NoWorkerError             no worker has been connected for `worker_patience_s`: retry later or on another scheduler
  NeverFitsError            the request exceeds what any worker can hold
  DuplicateRequestError     the request id is in flight
  WorkerMismatchError       the worker differs from the others in a size that must be equal on all workers
  UnexpectedStepError       the worker answered a step that is not the oldest in flight, or answered other rows
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of these errors. The message is for the caller."""


class QueueFullError(SchedulerError):
    pass


class UnreachableDeadlineError(SchedulerError):
    """`retry_after_s`: seconds until the queue is short enough, at its current rate."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorkerError(SchedulerError):
    pass


class NeverFitsError(SchedulerError):
    """`field` is the request field to change."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class DuplicateRequestError(SchedulerError):
    pass


class WorkerMismatchError(SchedulerError):
    pass


class UnexpectedStepError(SchedulerError):
    pass
