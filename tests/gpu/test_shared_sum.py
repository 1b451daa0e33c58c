"""Sums through shared memory: the choice of the method, equal bits, the check at the start, reasons to use NCCL."""

from __future__ import annotations

import inspect
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import _symmetric_memory

from tests.gpu.fake_symmetric_memory import FakeMemory, in_order
from tests.gpu.ranks import Meeting, Rank
from worker_svc.engine.gpu.collectives.group import CPU, Group
from worker_svc.engine.gpu.collectives.shared_sum import (
    TWO_SHOT_BYTES,
    Method,
    SharedMemorySum,
    choose_method,
    difference,
)

KIB = 1024


def on_all_ranks(size, work, **options):
    """Runs `work(rank, its group, its memory)` in a thread per rank; the results by rank."""
    meeting, results, errors = Meeting(size), {}, []

    def run(rank):
        memory = FakeMemory(rank, meeting, **options)
        with meeting.turn:
            try:
                results[rank] = work(rank, Rank(rank, meeting), memory)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)], meeting


@pytest.mark.parametrize(
    ("num_bytes", "num_ranks", "has_multimem", "method"),
    [
        (16, 2, False, Method.ONE_SHOT),
        (8192 * KIB, 2, True, Method.ONE_SHOT),
        (512 * KIB, 4, True, Method.ONE_SHOT),
        (512 * KIB + 16, 4, False, Method.TWO_SHOT),
        (256 * KIB, 8, False, Method.ONE_SHOT),
        (256 * KIB + 16, 8, False, Method.TWO_SHOT),
        (256 * KIB + 16, 8, True, Method.MULTIMEM),
        (8192 * KIB, 8, False, Method.TWO_SHOT),
        (8192 * KIB + 16, 8, True, None),
        (8192 * KIB + 16, 2, True, None),
        (8, 2, True, None),
        (24, 2, True, None),
        (0, 2, True, None),
    ],
)
def test_the_size_chooses_the_method(num_bytes, num_ranks, has_multimem, method):
    assert choose_method(num_bytes, num_ranks, has_multimem=has_multimem) is method


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_bits_of_a_sum_in_order(size, dtype):
    """Any size and any method give them, so exact mode does not depend on the batch. The tensor keeps its place."""
    rows = [torch.randn(700, 512, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]
    expected = in_order(torch.stack(rows))

    def work(rank, group, memory):
        group.shared_sum = SharedMemorySum(memory, memory, "0", size, CPU)
        found = []
        for count in (1, 3, 700):
            x = rows[rank][:count].clone()
            assert group.shared_sum.add(x)
            found.append(x)
        return found, memory.calls

    results, _ = on_all_ranks(size, work)
    for found, calls in results:
        for x in found:
            assert torch.equal(x, expected[: len(x)])
        largest = "one_shot" if size == 2 else "two_shot"
        assert [name for name, _ in calls] == ["one_shot", "one_shot", largest]


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(8, dtype=torch.float16),
        torch.ones(8, dtype=torch.int64),
        torch.ones(4, 6).t(),
        torch.ones(9)[1:],
        torch.ones(3),
        torch.ones(0, 8),
        torch.ones(TWO_SHOT_BYTES // 4 + 4),
    ],
    ids=["float16", "int", "layout", "offset", "odd", "empty", "large"],
)
def test_other_tensors_are_left_to_the_library(x):
    before = x.clone()
    results, _ = on_all_ranks(2, lambda rank, group, memory: SharedMemorySum(memory, memory, "0", 2, CPU).add(x))
    assert results == [False, False]
    assert torch.equal(x, before)


def test_the_group_uses_it_and_falls_back(monkeypatch):
    reduced = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, *rest: reduced.append(x.dtype))
    group = Group(0, 2)
    group.shared_sum = SimpleNamespace(add=lambda x: x.dtype is torch.float32)
    for dtype in (torch.float32, torch.int64):
        group.all_reduce(torch.ones(4, dtype=dtype))
    assert reduced == [torch.int64]


@pytest.mark.parametrize("has_multicast", [False, True])
def test_right_sums_pass_the_check(has_multicast):
    def work(rank, group, memory):
        return difference(SharedMemorySum(memory, memory, "0", 4, CPU), group, CPU), memory.calls

    for reason, calls in on_all_ranks(4, work, has_multicast=has_multicast)[0]:
        assert reason == ""
        expected = ["one_shot"] * 2 + ["two_shot"] * 2 + ["multimem"] * 2 * has_multicast
        assert [name for name, _ in calls] == expected


@pytest.mark.parametrize(
    ("name", "planted", "message"),
    [
        (
            "one_shot_all_reduce_out",
            lambda x, rank: x.add_(1e-6),
            "one shot in torch.float32 does not add in the order",
        ),
        (
            "one_shot_all_reduce_out",
            lambda x, rank: x.add_(float(rank == 1)),  # the other ranks must not wait for this one
            "one shot in torch.bfloat16 does not add in the order",
        ),
        (
            "two_shot_all_reduce_out",
            lambda x, rank: x[0, :1].neg_(),
            "two shot in torch.bfloat16 does not add in the order",
        ),
        ("multimem_all_reduce_", lambda x, rank: x[2, 999:].mul_(1.5), "multimem in torch.bfloat16 gives a wrong sum"),
        (
            "multimem_all_reduce_",
            lambda x, rank: x.mul_(1 + 1e-7 * rank),
            "multimem in torch.float32 gives different sums",
        ),
    ],
)
def test_wrong_sums_fail_the_check(name, planted, message):
    def work(rank, group, memory):
        original = getattr(memory, name)

        def wrong(*args):
            result = original(*args)
            planted(result, rank)
            return result

        setattr(memory, name, wrong)
        return difference(SharedMemorySum(memory, memory, "0", 4, CPU), group, CPU)

    results, _ = on_all_ranks(4, work, has_multicast=True)
    assert all(message in reason for reason in results), results


# -- choosing between shared memory and NCCL --------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    """Two GPUs with NVLink; the test may change them."""
    found = SimpleNamespace(capability=(9, 0), links=[[0, 18], [18, 0]])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(
        torch._C._distributed_c10d, "_detect_dma_connectivity", lambda kind, link: SimpleNamespace(matrix=found.links)
    )
    return found


# -- the real interface ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one_shot_all_reduce_out", "two_shot_all_reduce_out", "multimem_all_reduce_"])
def test_the_operators_of_torch_have_these_arguments(name):
    arguments = [argument.name for argument in getattr(torch.ops.symm_mem, name).default._schema.arguments]
    assert arguments == list(inspect.signature(getattr(FakeMemory, name)).parameters)[1:]


def test_the_module_of_torch_has_these_functions():
    assert list(inspect.signature(_symmetric_memory.rendezvous).parameters) == ["tensor", "group"]
    empty = inspect.signature(_symmetric_memory.empty).parameters
    assert {name: empty[name].kind for name in ("size", "dtype", "device")} == {
        "size": inspect.Parameter.VAR_POSITIONAL,
        "dtype": inspect.Parameter.KEYWORD_ONLY,
        "device": inspect.Parameter.KEYWORD_ONLY,
    }
    assert hasattr(torch._C._distributed_c10d._SymmetricMemory, "multicast_ptr")
    assert callable(torch._C._distributed_c10d._detect_dma_connectivity)
