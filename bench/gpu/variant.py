"""A kernel with the types and constants of one launch, for compilation without a GPU (aot.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with the argument types and constants of a launch."""

    name: str
    kernel: Any
    types: str  # types of the non-constant arguments, in order
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()  # arguments that are multiples of 16 in every model
