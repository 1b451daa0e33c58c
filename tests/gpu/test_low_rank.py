"""The kernels of adapters against torch: rows of several adapters and of none, ranks and outputs that fill no tile."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.builders import DEVICE, TOLERANCE, relative_error
from worker_svc.engine.backend import Adapter, AdapterPart, Module
from worker_svc.engine.gpu.kernels.linears import low_rank
from worker_svc.engine.gpu.kernels.linears.low_rank import RANKS as RANK_UNIT
from worker_svc.engine.gpu.kernels.linears.low_rank import reference, splits_of
from worker_svc.engine.gpu.layers.adapter_shapes import AdapterShapes, ModuleShard, SiteShard
from worker_svc.engine.gpu.layers.device_slots import DeviceSlots, TokenAdapters

QKV, OUT = 0, 1
OUTPUTS = (48, 24, 136)  # outputs of the modules of a fused layer: a tile is 128 outputs


def random(*size, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def modules_of(num_inputs):
    firsts = [sum(OUTPUTS[:number]) for number in range(len(OUTPUTS))]
    fused = [Module(0, QKV, first, size, num_inputs) for first, size in zip(firsts, OUTPUTS, strict=True)]
    return [fused, [Module(0, OUT, 0, 40, num_inputs)]]


def make_slots(num_inputs, num_slots, *, max_rank=64, dtype=torch.float32, is_exact=True):
    sites = []
    for index, modules in enumerate(modules_of(num_inputs)):
        shards = {m: ModuleShard(range(num_inputs), (range(m.num_outputs),)) for m in modules}
        sites.append(SiteShard(index, shards, max_rank))
    shapes = AdapterShapes((*sites, None, None), dtype)
    slots = DeviceSlots(shapes, num_slots, DEVICE, is_exact=is_exact)
    slots.buffers.weights.fill_(torch.nan)  # weights that no adapter has written are not used
    return slots


def make_adapter(num_inputs, ranks, seed, *, dtype=torch.float32):
    """`ranks` of q, k, v and the other layer; 0: not changed."""
    parts, modules = [], [module for site in modules_of(num_inputs) for module in site]
    for number, (module, rank) in enumerate(zip(modules, ranks, strict=True)):
        if rank:
            a = random(rank, num_inputs, seed=10 * seed + number, dtype=dtype) * num_inputs**-0.5
            b = random(module.num_outputs, rank, seed=10 * seed + number + 5, dtype=dtype)
            parts.append(AdapterPart(module, a, b))
    return Adapter(bytes([seed] * 16), max(ranks), tuple(parts))


RANKS = [(8, 8, 8, 8), (1, 64, 0, 33), (0, 0, 16, 0), (40, 3, 64, 64)]


def place(slots, ranks, num_inputs, dtype=torch.float32):
    adapters = [make_adapter(num_inputs, each, seed, dtype=dtype) for seed, each in enumerate(ranks)]
    slots.place([slots.shapes.pack(adapter, is_pinned=False) for adapter in adapters])
    return [slots.slot_of(adapter.digest) for adapter in adapters]


def inputs(of_rows, num_inputs, site, dtype):
    outputs = sum(OUTPUTS) if site == QKV else 40
    x = random(len(of_rows), num_inputs, seed=90, dtype=dtype).to(DEVICE)
    return x, random(len(of_rows), outputs, seed=91, dtype=dtype).to(DEVICE)


def added(slots, of_rows, site, x, y):
    column = torch.tensor(of_rows, dtype=torch.int32, device=DEVICE)
    TokenAdapters(slots, column).add(0, site, x, found := y.clone())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("site", [QKV, OUT])
@pytest.mark.parametrize("num_inputs", [40, 1100])
def test_rows_get_what_their_adapter_adds(num_inputs, site, is_exact, dtype):
    slots = make_slots(num_inputs, 5, dtype=dtype, is_exact=is_exact)
    numbers = place(slots, RANKS, num_inputs, dtype)
    of_rows = [*(numbers[row % 4] for row in range(70)), -1, -1, numbers[3]]
    x, y = inputs(of_rows, num_inputs, site, dtype)
    found = added(slots, of_rows, site, x, y)
    expected = reference(x, y, slots.buffers, slots.site(0, site), of_rows)
    assert relative_error(found, expected) < 2 * TOLERANCE[dtype]
    assert torch.equal(found[70:72], y[70:72])  # rows without adapter


def test_bits_of_a_row_do_not_depend_on_other_rows():
    num_inputs = 1100
    slots = make_slots(num_inputs, 5)
    numbers = place(slots, RANKS, num_inputs)
    of_rows = [numbers[row % 4] for row in range(130)]
    x, y = inputs(of_rows, num_inputs, QKV, torch.float32)
    together = added(slots, of_rows, QKV, x, y)
    for row in (0, 1, 63, 129):
        alone = added(slots, of_rows[row : row + 1], QKV, x[row : row + 1].clone(), y[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_a_rank_below_the_largest_gives_the_same_bits():
    """The largest rank is a setting of a worker, and workers may differ in it."""
    found = []
    for max_rank in (16, 64):
        slots = make_slots(300, 2, max_rank=max_rank)
        numbers = place(slots, [(8, 16, 3, 5)], 300)
        x, y = inputs(numbers * 3, 300, QKV, torch.float32)
        found.append(added(slots, numbers * 3, QKV, x, y))
    assert torch.equal(*found)


@pytest.mark.parametrize(("num_inputs", "expected"), [
    (1, (1, 128)), (1024, (1, 1024)), (1025, (2, 640)), (4096, (4, 1024)), (12288, (8, 1536)), (28672, (8, 3584)),
])  # fmt: skip
def test_all_inputs_are_in_one_part(num_inputs, expected):
    count, size = splits_of(num_inputs)
    assert (count, size) == expected
    assert (count - 1) * size < num_inputs <= count * size


MUTANTS = {
    "a part of the inputs is read twice": ("k = split * split_inputs", "k = split * (split_inputs - 1)"),
    "ranks that the adapter does not have": ("(r[:, None] < rank) & (column < size)", "column < size"),
    "the adapter of the first tile": (
        "tl.load(tile_slot_ptr + tile).to(tl.int64)\n    block", "tl.load(tile_slot_ptr).to(tl.int64)\n    block",
    ),
    "outputs of the part before": ("(block >= second) + N1 * is_third", "(block >= second)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_found(plant_mutant, name):
    plant_mutant(low_rank, *MUTANTS[name])
    slots = make_slots(1100, 5)
    of_rows = place(slots, RANKS, 1100) * 3
    x, y = inputs(of_rows, 1100, QKV, torch.float32)
    expected = reference(x, y, slots.buffers, slots.site(0, QKV), of_rows)
    assert not relative_error(added(slots, of_rows, QKV, x, y), expected) < 1e-3


# -- slots -------------------------------------------------------------------------------------------------------------


def test_a_slot_is_used_again_when_no_row_has_its_adapter():
    slots = make_slots(40, 2)
    packed = [slots.shapes.pack(make_adapter(40, (8, 8, 8, 8), seed), is_pinned=False) for seed in range(3)]
    slots.place(packed[:2])
    slots.place(packed[:1])  # the other one is the least recently used
    slots.place([packed[0], packed[2]])
    assert [slots.has(each.digest) for each in packed] == [True, False, True]
    assert slots.slot_of(packed[0].digest) != slots.slot_of(packed[2].digest)
    of_rows = [slots.slot_of(packed[2].digest)]
    x, y = inputs(of_rows, 40, QKV, torch.float32)
    expected = reference(x, y, slots.buffers, slots.site(0, QKV), of_rows)
    assert relative_error(added(slots, of_rows, QKV, x, y), expected) < 1e-5
    with pytest.raises(RuntimeError, match="open rows use more adapters than the 2 slots"):
        slots.place(packed)


def test_the_largest_adapter_fits_a_slot():
    for rank in (16, 17):
        slots = make_slots(41, 1, max_rank=rank)
        packed = slots.shapes.pack(make_adapter(41, (rank,) * 4, 0), is_pinned=False)
        assert len(packed.numbers) <= slots.shapes.capacity
        assert (len(packed.numbers) == slots.shapes.capacity) == (rank % RANK_UNIT == 0)
