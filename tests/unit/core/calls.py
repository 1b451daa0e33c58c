"""Counts the calls of a method, for tests of work that must not grow with the queue."""

from __future__ import annotations

from typing import Any

import pytest


def count_calls(patch: pytest.MonkeyPatch, owner: type, name: str) -> list[tuple[Any, ...]]:
    """Returns a list that records the arguments of every later call. The method still works as before."""
    calls: list[tuple[Any, ...]] = []
    method = getattr(owner, name)

    def counted(*args: Any) -> Any:
        calls.append(args)
        return method(*args)

    patch.setattr(owner, name, counted)
    return calls
