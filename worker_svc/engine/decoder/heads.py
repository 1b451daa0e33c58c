"""Classification heads as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from step_protocol.types import PoolingKind


@dataclass(frozen=True, slots=True)
class HeadPart:
    """A linear layer of a head, then an activation and a norm. `name`: of the tensors, without `.weight`."""

    name: str
    in_features: int
    out_features: int
    has_bias: bool
    activation: str = "identity"
    norm: str = ""  # of the tensors; empty: none
    has_norm_bias: bool = False

    def tensors(self) -> Iterator[str]:
        """The names of its tensors."""
        yield f"{self.name}.weight"
        if self.has_bias:
            yield f"{self.name}.bias"
        if self.norm:
            yield f"{self.norm}.weight"
        if self.norm and self.has_norm_bias:
            yield f"{self.norm}.bias"


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A classification head: what it reads, and its layers."""

    kind: PoolingKind
    parts: tuple[HeadPart, ...]
    norm_eps: float = 1e-5

    def tensors(self) -> list[str]:
        """The names of all tensors."""
        return [name for part in self.parts for name in part.tensors()]
