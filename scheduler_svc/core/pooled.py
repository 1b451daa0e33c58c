"""Pooled requests: they return numbers instead of tokens when their whole prompt is computed.

Nothing of them stays in a pool: their blocks are never registered, and are free when the request ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a pooled request returns. `message` is opaque and reaches the worker in RowOpen.

    `may_hit`: the numbers depend on the state of the last token only. Others need the states of all tokens, which a
    cached prefix does not have.
    """

    message: Any
    may_hit: bool
