"""Cases of adapters, for workers that serve some. Layers have few inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.checks.case import TOLERANCES, Case, Outputs, Setup
from worker_svc.engine.backend import SITES, Adapter, AdapterPart, Module
from worker_svc.engine.gpu.kernels.linears import low_rank
from worker_svc.engine.gpu.layers.adapter_shapes import AdapterShapes, ModuleShard, SiteShard
from worker_svc.engine.gpu.layers.device_slots import NO_ADAPTER, DeviceSlots, TokenAdapters

OUTPUTS = (low_rank.BLOCK_N + 16, 48, 16)  # outputs of the modules of the fused layer
NUM_INPUTS = low_rank.SPLIT_INPUTS + 32  # two parts
RANKS = ((8, low_rank.BLOCK_R + 8, 16), (24, 0, 1))  # ranks of the modules by adapter; two steps of a loop at most
PATTERN = (0, 1, NO_ADAPTER, 1, 0)
MORE_ROWS = low_rank.FEW + 1  # the other tile


def adapter_cases(setup: Setup) -> Iterator[Case]:
    """A fused layer with rows of two adapters and of none, with both tiles unless exact mode has one for all."""
    if not setup.max_adapter_rank:
        return
    for num_rows in (len(PATTERN),) if setup.is_exact else (len(PATTERN), MORE_ROWS):
        yield _case(setup, [PATTERN[row % len(PATTERN)] for row in range(num_rows)])


def _case(setup: Setup, of_rows: list[int]) -> Case:
    slots, n = _slots(setup), len(of_rows)
    x, y = setup.random(n, NUM_INPUTS, seed=8), setup.random(n, sum(OUTPUTS), seed=9)

    def run(first: int, last: int) -> Outputs:
        found = y[first:last].clone()
        TokenAdapters(slots, setup.ints(*of_rows[first:last])).add(0, 0, x[first:last].clone(), found)
        return {"output": found}

    outputs = slots.site(0, 0)
    return Case(
        "adapters",
        f"[{n}, {NUM_INPUTS}] to {list(OUTPUTS)}, {len(RANKS)} adapters, {setup.dtype}",
        range(n + 1),
        run,
        {"output": low_rank.reference(x, y, slots.buffers, outputs, of_rows)},
        {"output": 2 * TOLERANCES[setup.dtype]},  # the inner numbers may be rounded to the other neighbour
    )


def _slots(setup: Setup) -> DeviceSlots:
    """Slots with two adapters of one layer. Their stride and largest rank are not those of the worker, but kernels are
    compiled for both if they are multiples of 16."""
    firsts = [sum(OUTPUTS[:number]) for number in range(len(OUTPUTS))]
    modules = [Module(0, 0, first, size, NUM_INPUTS) for first, size in zip(firsts, OUTPUTS, strict=True)]
    shards = {module: ModuleShard(range(NUM_INPUTS), (range(module.num_outputs),)) for module in modules}
    largest = max(max(ranks) for ranks in RANKS)
    rank = setup.max_adapter_rank if setup.max_adapter_rank >= largest else largest
    shapes = AdapterShapes((SiteShard(0, shards, rank), *[None] * (len(SITES) - 1)), setup.dtype)
    slots = DeviceSlots(shapes, len(RANKS), setup.device, is_exact=setup.is_exact)
    adapters = [_adapter(setup, modules, ranks, seed) for seed, ranks in enumerate(RANKS)]
    slots.place([shapes.pack(adapter, is_pinned=False) for adapter in adapters])
    return slots


def _adapter(setup: Setup, modules: list[Module], ranks: tuple[int, ...], seed: int) -> Adapter:
    parts = []
    for number, (module, rank) in enumerate(zip(modules, ranks, strict=True)):
        if rank:
            a = setup.random(rank, NUM_INPUTS, seed=20 * seed + number).cpu() * NUM_INPUTS**-0.5
            b = setup.random(module.num_outputs, rank, seed=20 * seed + number + 10).cpu() * rank**-0.5
            parts.append(AdapterPart(module, a, b))
    return Adapter(bytes([seed]) * 16, max(ranks), tuple(parts))
