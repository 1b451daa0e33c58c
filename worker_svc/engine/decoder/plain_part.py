"""A part of a model whose tensors have the same names in every checkpoint, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class PlainPart(Generic[Part]):
    """What a part reads, by the argument of `make`. Names are whole, but those of linear layers and norms lack
    `.weight`."""

    make: Callable[..., Part]
    linears: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)  # name, outputs, inputs; without bias
    norms: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # name, width
    # name, shape, number type; None: the engine's
    tensors: Mapping[str, tuple[str, tuple[int, ...], torch.dtype | None]] = field(default_factory=dict)
