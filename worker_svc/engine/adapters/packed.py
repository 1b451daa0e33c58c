"""How an adapter becomes what a backend computes, and which rows of a step use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from step_protocol.columns import I64
from worker_svc.engine.backend import (
    SITES,
    Adapter,
    AdapterPart,
    AdapterRows,
    Expansion,
    Linear,
    LowRank,
    Module,
    PackedAdapter,
)
from worker_svc.engine.kernels.linear import PANEL

MakeLinear = Callable[[torch.Tensor], Linear]


def low_ranks(adapter: Adapter, num_layers: int, make_linear: MakeLinear) -> list[LowRank | None]:
    """What an adapter adds to all sites of all layers, for PackedAdapter."""
    sites: list[LowRank | None] = [None] * (num_layers * len(SITES))
    for layer, site, parts in adapter.by_site():
        sites[layer * len(SITES) + site] = _low_rank(parts, make_linear)
    return sites


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


def rows_of_step(adapters: Mapping[int, PackedAdapter], numbers: I64, head_tokens: I64) -> tuple[AdapterRows, ...]:
    """The adapters of a step. `numbers` [T]: of the adapter of each token, 0 for none."""
    found = []
    of_heads = numbers[head_tokens]
    for number in np.unique(numbers[numbers > 0]).tolist():
        tokens, heads = (np.flatnonzero(column == number).astype(np.int32) for column in (numbers, of_heads))
        found.append(AdapterRows(adapters[number], tokens, heads))
    return tuple(found)
