"""The layout of an adapter on the device: its matrices one after the other, and a line of ranks and places per linear
layer. A rank has the inputs and outputs that it has of the base model's layers, so that sums over ranks add up adapters
too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from worker_svc.engine.backend import SITES, Adapter, AdapterPart, Module
from worker_svc.engine.gpu.kernels.linears.low_rank import ALIGNMENT, LINE, RANKS, SiteOutputs


@dataclass(frozen=True, slots=True)
class ModuleShard:
    """The inputs and outputs of a module that this rank computes."""

    inputs: range
    outputs: tuple[range, ...]  # of each role

    @property
    def num_outputs(self) -> int:
        return sum(map(len, self.outputs))

    def a_of(self, part: AdapterPart) -> torch.Tensor:
        """[rank, inputs]"""
        return part.a[:, self.inputs.start : self.inputs.stop]

    def b_of(self, part: AdapterPart) -> torch.Tensor:
        """[rank, outputs]"""
        return torch.cat([part.b[kept.start : kept.stop] for kept in self.outputs]).T


class SiteShard:
    """A linear layer of this rank: its modules in the order of their outputs."""

    def __init__(self, index: int, modules: Mapping[Module, ModuleShard], max_rank: int) -> None:
        self._modules = {module: (number, modules[module]) for number, module in enumerate(sorted(modules))}
        self.num_inputs = len(next(iter(modules.values())).inputs)
        sizes = tuple(shard.num_outputs for _, shard in self._modules.values())
        self.outputs = SiteOutputs(index, sizes, len(sizes) * aligned(max_rank, RANKS))

    @property
    def most_numbers(self) -> int:
        """Numbers that an adapter of the largest rank has here."""
        rank = self.outputs.max_rank // len(self.outputs.parts)
        return aligned(self.outputs.max_rank * self.num_inputs) + sum(
            aligned(rank * size) for size in self.outputs.parts
        )

    def matrices(self, parts: Sequence[AdapterPart]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """a [ranks of all parts, in], each part padded with zeros, and b [ranks, out] of each part by its number."""
        found = [(*self._modules[part.module], part) for part in parts]
        padded = [F.pad(shard.a_of(part), (0, 0, 0, -len(part.a) % RANKS)) for _, shard, part in found]
        return torch.cat(padded), {number: shard.b_of(part) for number, shard, part in found}


@dataclass(frozen=True, slots=True)
class DeviceAdapter:
    """An adapter in the layout of a slot, in host memory."""

    digest: bytes
    numbers: torch.Tensor
    lines: torch.Tensor  # int64 [sites, LINE]
    source: Adapter | None = None  # on rank 0, for the other ranks


@dataclass(frozen=True, slots=True)
class AdapterShapes:
    """The linear layers of this rank that adapters may change, and the layout of a slot."""

    sites: tuple[SiteShard | None, ...]  # by layer and site; None: adapters do not change it
    dtype: torch.dtype

    @property
    def capacity(self) -> int:
        """Numbers of a slot."""
        return sum(site.most_numbers for site in self.sites if site is not None)

    def pack(self, adapter: Adapter, *, is_pinned: bool) -> DeviceAdapter:
        """This rank's part of an adapter. Any thread may call it."""
        lines, pieces, place = torch.zeros(len(self.sites), LINE, dtype=torch.int64), [], 0
        for layer, site, parts in adapter.by_site():
            index = layer * len(SITES) + site
            for field, piece in self._pieces(index, parts, lines[index]):
                lines[index, field] = place
                pieces.append((place, piece))
                place += aligned(piece.numel())
        numbers = torch.empty(place, dtype=self.dtype, pin_memory=is_pinned)
        for begin, piece in pieces:
            numbers[begin : begin + piece.numel()].view(piece.shape).copy_(piece)
        return DeviceAdapter(adapter.digest, numbers, lines.pin_memory() if is_pinned else lines, adapter)

    def _pieces(
        self, index: int, parts: Sequence[AdapterPart], line: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The matrices of a site, each with the field of the line for its place. Sets the ranks in the line."""
        site = self.sites[index]
        if site is None:
            raise LookupError(f"site {index} is changed by an adapter, but has no adapters: a bug in the engine")
        a, b_of_parts = site.matrices(parts)
        line[0] = len(a)
        yield 1, a
        first = 0
        for number, b in b_of_parts.items():
            field = 2 + 3 * number
            line[field], line[field + 1] = first, len(b)
            first += aligned(len(b), RANKS)
            yield field + 2, b


def aligned(count: int, unit: int = ALIGNMENT) -> int:
    return -(-count // unit) * unit
