"""The content of a file that is read again while the service runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

REREAD_S = 5.0


class Reread(Generic[T]):
    """What `read` returns, read again at most every `REREAD_S`.

    The first read raises its errors. Later a ValueError is logged once, and the previous content stays in force. `noun`
    names the content in the log.
    """

    def __init__(self, read: Callable[[], T], noun: str, clock: Callable[[], float]) -> None:
        self._read = read
        self._noun = noun
        self._clock = clock
        self._read_at = clock()
        self._last_error = ""
        self._content = read()

    def __call__(self) -> T:
        if self._clock() - self._read_at >= REREAD_S:
            self._read_at = self._clock()
            self._read_again()
        return self._content

    def _read_again(self) -> None:
        try:
            self._content = self._read()
            self._last_error = ""
        except ValueError as error:
            if str(error) != self._last_error:
                log.error("keeping the previous %s: %s", self._noun, error)
            self._last_error = str(error)
