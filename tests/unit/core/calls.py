"""How often a method is called: what a pass must not do for each of thousands."""

from __future__ import annotations

from typing import Any

import pytest


def count_calls(patch: pytest.MonkeyPatch, owner: type, name: str) -> list[tuple[Any, ...]]:
    """The arguments of every call from now on; the method does what it did."""
    calls: list[tuple[Any, ...]] = []
    method = getattr(owner, name)

    def counted(*args: Any) -> Any:
        calls.append(args)
        return method(*args)

    patch.setattr(owner, name, counted)
    return calls
