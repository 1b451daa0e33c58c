"""An adapter in the form in which a backend computes it, and the rows of a step that use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from step_protocol.columns import I32, I64
from worker_svc.engine.adapters.adapter import Adapter, AdapterPart
from worker_svc.engine.adapters.targets import SITES, Module
from worker_svc.engine.kernels.linear import PANEL

Linear = Callable[[torch.Tensor], torch.Tensor]  # [n, in] to [n, out]
MakeLinear = Callable[[torch.Tensor], Linear]


@dataclass(frozen=True, slots=True)
class Expansion:
    """Maps some of the outputs of `shrink` to some outputs of a site."""

    linear: Linear
    first_rank: int
    rank: int
    first_output: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a site: for each expansion, linear(shrink(x)[ranks])."""

    shrink: Linear
    rank: int  # outputs of `shrink`
    expansions: tuple[Expansion, ...]


class PackedAdapter:
    """The matrices of an adapter for one backend, by layer and site."""

    def __init__(self, adapter: Adapter, num_layers: int, make_linear: MakeLinear) -> None:
        self.sites: list[LowRank | None] = [None] * (num_layers * len(SITES))  # None: the adapter does not change it
        for layer, site, parts in adapter.by_site():
            self.sites[layer * len(SITES) + site] = _low_rank(parts, make_linear)

    def at(self, layer: int, site: int) -> LowRank | None:
        """What the adapter adds to a site of a layer."""
        return self.sites[layer * len(SITES) + site]


def reserved_bytes(modules: Mapping[str, Module], rank: int, dtype: torch.dtype) -> int:
    """Memory of one resident adapter of this rank that changes all modules. Kernels pad ranks to whole panels."""
    padded = -(-rank // PANEL) * PANEL
    return sum(padded * (m.num_inputs + m.num_outputs) for m in modules.values()) * dtype.itemsize


def _low_rank(parts: list[AdapterPart], make_linear: MakeLinear) -> LowRank:
    expansions, first = [], 0
    for part in parts:
        rank, module = len(part.a), part.module
        expansions.append(Expansion(make_linear(part.b), first, rank, module.first_output, module.num_outputs))
        first += rank
    return LowRank(make_linear(torch.cat([part.a for part in parts])), first, tuple(expansions))


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """An adapter that a step uses, and its tokens."""

    adapter: PackedAdapter
    tokens: I32  # [n] among all tokens of the step
    heads: I32  # [m] among its head tokens


def rows_of_step(adapters: Mapping[int, PackedAdapter], numbers: I64, head_tokens: I64) -> tuple[AdapterRows, ...]:
    """The adapters of a step. `numbers` [T]: of the adapter of each token, 0 for none."""
    found = []
    of_heads = numbers[head_tokens]
    for number in np.unique(numbers[numbers > 0]).tolist():
        tokens, heads = (np.flatnonzero(column == number).astype(np.int32) for column in (numbers, of_heads))
        found.append(AdapterRows(adapters[number], tokens, heads))
    return tuple(found)
