"""Runs a batch: threads send the requests, and append each answer to the output."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from quire_client.errors import ConnectionFailed, Overloaded, QuireError
from quire_client.retry import RetryPolicy

from quire_batch.files import BatchRequest, Response, ResultFile

RETRY = RetryPolicy(max_attempts=1_000_000, initial_s=0.2, max_s=10.0)  # the time limit ends the attempts
POLL_S = 0.2


class Sender(Protocol):
    """Sends one request. Raises ConnectionFailed or Overloaded if it should be sent again."""

    def post(self, path: str, body: dict[str, Any]) -> Response: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class BatchCounts:
    """The progress of one run."""

    num_total: int  # requests of this run
    num_answered: int = 0
    num_errors: int = 0  # answers whose status is not 200
    num_unanswered: int = 0  # requests without an answer after `retry_timeout_s`
    num_retries: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    last_error: str = ""  # error of the last failed attempt

    def add(self, response: Response) -> None:
        self.num_answered += 1
        self.num_errors += response.status_code != 200
        usage = response.body.get("usage") if isinstance(response.body, dict) else None
        if isinstance(usage, dict):
            self.input_tokens += usage.get("prompt_tokens") or 0
            self.output_tokens += usage.get("completion_tokens") or 0


class BatchRun:
    """Sends `requests` over at most `concurrency` connections and writes each answer to `results` when it arrives.

    A request without an answer, or with a retryable status, is retried for `retry_timeout_s` and then stays unanswered.
    The run ends if no other request was answered in that time.
    """

    def __init__(
        self,
        requests: Iterator[BatchRequest],
        results: ResultFile,
        sender: Sender,
        *,
        num_total: int,
        concurrency: int,
        priority: int,
        retry_timeout_s: float,
    ) -> None:
        self.counts = BatchCounts(num_total)
        self._requests = requests
        self._results = results
        self._sender = sender
        self._concurrency = concurrency
        self._priority = priority
        self._retry_timeout_s = retry_timeout_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._last_answer_at = time.monotonic()
        self._failure: BaseException | None = None

    def run(self, show: Callable[[BatchCounts], None]) -> BatchCounts:
        """Run to the end; calls `show` a few times per second. Raises KeyboardInterrupt, or the error that ended the
        run. Every answer received before is in the output.
        """
        threads = [
            threading.Thread(target=self._work, name=f"quire-batch-{i}", daemon=True)
            for i in range(min(self._concurrency, self.counts.num_total))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(POLL_S)
                    show(self.counts)
        finally:
            self._stopping.set()
            self._sender.interrupt()
            for thread in threads:
                thread.join()
            self._sender.close()
        if self._failure is not None:
            raise self._failure
        return self.counts

    def _work(self) -> None:
        try:
            while (request := self._next()) is not None:
                response = self._answer(request)
                if response is not None:
                    self._store(request, response)
        except BaseException as error:
            self._failure = error
            self._stopping.set()
            self._sender.interrupt()

    def _next(self) -> BatchRequest | None:
        with self._lock:
            return None if self._stopping.is_set() else next(self._requests, None)

    def _answer(self, request: BatchRequest) -> Response | None:
        """The answer to one request; None after the time limit or the end of the run."""
        body = {"priority": self._priority} | request.body
        rng = random.Random()
        num_attempts, give_up_at = 0, float("inf")
        while not self._stopping.is_set():
            try:
                return self._sender.post(request.url, body)
            except (ConnectionFailed, Overloaded) as error:
                now = time.monotonic()
                num_attempts += 1
                give_up_at = min(give_up_at, now + self._retry_timeout_s)
                delay_s = RETRY.delay_s(error, num_attempts, give_up_at - now, rng)
                if not self._note(error, delay_s, now):
                    return None
                self._stopping.wait(delay_s)
        return None

    def _note(self, error: QuireError, delay_s: float | None, now: float) -> bool:
        """Count a failed attempt. Returns whether to retry it."""
        with self._lock:
            if self._stopping.is_set():
                return False
            self.counts.last_error = error.message
            if delay_s is not None:
                self.counts.num_retries += 1
                return True
            self.counts.num_unanswered += 1
            if now - self._last_answer_at >= self._retry_timeout_s:
                self._stopping.set()
            return False

    def _store(self, request: BatchRequest, response: Response) -> None:
        with self._lock:
            self._last_answer_at = time.monotonic()
            self._results.write(request.custom_id, response)
            self.counts.add(response)
