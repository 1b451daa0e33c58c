"""Costs counted in calls, which are the same on every machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def counted(calls: Counter[str]) -> Iterator[None]:
    """Counts Python calls (`call`) and calls of C functions (`c_call`)."""

    def count(frame: FrameType, event: str, arg: Any) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
