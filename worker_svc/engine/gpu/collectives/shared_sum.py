"""Sums over the ranks of one host through memory that they share (torch symmetric memory), for small messages.

A decode step has two small messages per layer, for which the fixed cost of NCCL counts. Here a kernel reads the parts
of all ranks directly, by one of three methods. Two of them add in the order of ranks, each sum rounded to the dtype, as
`Group.sum_in_order` does, so in exact mode the bits depend neither on the method nor on the size of the message.

    one shot   every rank reads all parts                         smallest messages
    two shot   every rank sums its share, then reads the others   larger messages
    multimem   the switch sums, in no defined order               instead of two shot, in best_effort only
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any

import torch

from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.collectives.group import Group

logger = logging.getLogger(__name__)

SIZES = (2, 4, 8)  # ranks for which torch has the kernels
DTYPES = (torch.bfloat16, torch.float32)  # the same
CAPABILITY = (8, 0)  # adds bfloat16
ALIGNMENT = 16  # bytes that a thread reads at once
KIB = 1024
# Largest messages, by ranks: those of vLLM's own kernels. They are not measured here. With two ranks, one shot reads no
# more than two shot.
ONE_SHOT_BYTES = {2: 8192 * KIB, 4: 512 * KIB, 8: 256 * KIB}
TWO_SHOT_BYTES = 8192 * KIB


class Method(Enum):
    """How a message is added up."""

    ONE_SHOT = "one shot"
    TWO_SHOT = "two shot"
    MULTIMEM = "multimem"


def choose_method(num_bytes: int, num_ranks: int, *, has_multimem: bool) -> Method | None:
    """None: NCCL adds up a message of this size."""
    if num_bytes > TWO_SHOT_BYTES or num_bytes % ALIGNMENT or not num_bytes:
        return None
    if num_bytes <= ONE_SHOT_BYTES[num_ranks]:
        return Method.ONE_SHOT
    return Method.MULTIMEM if has_multimem else Method.TWO_SHOT


class SharedMemorySum:
    """The memory of this rank that the others read. All ranks call `add` in the same order, with equal shapes.

    It can be recorded in CUDA graphs: the memory does not move, and a kernel ends only when all ranks have read it.
    """

    def __init__(self, memory: Any, ops: Any, group_name: str, num_ranks: int, device: torch.device) -> None:
        """`memory`, `ops`: torch.distributed._symmetric_memory and torch.ops.symm_mem. All ranks call it together."""
        self._ops = ops
        self._group_name = group_name
        self._num_ranks = num_ranks
        self._buffer = memory.empty(TWO_SHOT_BYTES, dtype=torch.uint8, device=device)
        self.has_multimem = bool(memory.rendezvous(self._buffer, group_name).multicast_ptr)

    def add(self, x: torch.Tensor) -> bool:
        """Replaces x by the sum over all ranks. Returns False, with x unchanged, if no method takes it."""
        method = self.method_of(x)
        if method is None:
            return False
        self.add_by(method, x)
        return True

    def method_of(self, x: torch.Tensor) -> Method | None:
        """The same on all ranks: it depends on shape, dtype and layout only."""
        size = x.element_size()
        if x.dtype not in DTYPES or not x.is_contiguous() or x.storage_offset() * size % ALIGNMENT:
            return None
        return choose_method(x.numel() * size, self._num_ranks, has_multimem=self.has_multimem)

    def add_by(self, method: Method, x: torch.Tensor) -> None:
        """Adds up by one method."""
        shared = self._buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        # A kernel of its own copies: in torch's one_shot_all_reduce_copy, which saves it, a block may signal the other
        # ranks before all of its threads have stored their part. A product, because in a graph `copy_` is a node of the
        # copy engine, which starts 2 to 3 us later. Multiplying by 1 changes no bit.
        torch.mul(x, 1, out=shared)
        if method is Method.ONE_SHOT:
            self._ops.one_shot_all_reduce_out(shared, "sum", self._group_name, x)
            return
        if method is Method.TWO_SHOT:
            self._ops.two_shot_all_reduce_out(shared, "sum", self._group_name, x)
            return
        self._ops.multimem_all_reduce_(shared, "sum", self._group_name)
        torch.mul(shared, 1, out=x)


def share_sums(config: EngineConfig, group: Group, group_name: str, device: torch.device) -> None:
    """Makes the group add up small messages through shared memory, if all ranks can. Otherwise the reason is logged.

    All ranks call it together.
    """
    if config.all_reduce == "nccl":
        return
    reason = _obstacle(config, device)
    shared = None
    if group.all_reduce_min(int(not reason)):
        shared, reason = _connect(config, group, group_name, device)
    if group.all_reduce_min(int(shared is not None)) and shared is not None:
        group.shared_sum = shared
        logger.info("small messages are added up through shared memory, multimem: %s", shared.has_multimem)
    elif group.rank == 0 or reason:
        logger.info("NCCL adds up all messages: %s", reason or "another rank cannot share memory")


def _obstacle(config: EngineConfig, device: torch.device) -> str:
    """Why this rank cannot share memory; empty if it can."""
    size = config.tensor_parallel_size
    if config.nnodes > 1:
        return "the ranks are on several hosts"
    if size not in SIZES:
        return f"tensor_parallel_size {size} is none of {', '.join(map(str, SIZES))}"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"compute capability is below {CAPABILITY[0]}.{CAPABILITY[1]}"
    try:
        return _without_nvlink(size)
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"NVLink cannot be detected: {error}"


def _without_nvlink(size: int) -> str:
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

    links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    missing = [f"{a} and {b}" for a in range(size) for b in range(a) if not links[a][b]]
    return f"GPUs {missing[0]} have no NVLink" if missing else ""


def _connect(
    config: EngineConfig, group: Group, group_name: str, device: torch.device
) -> tuple[SharedMemorySum | None, str]:
    try:
        from torch.distributed import _symmetric_memory

        shared = SharedMemorySum(_symmetric_memory, torch.ops.symm_mem, group_name, group.size, device)
        if config.determinism == "exact":
            shared.has_multimem = False
        reason = difference(shared, group, device)
    except (ImportError, AttributeError, RuntimeError) as error:
        return None, f"torch symmetric memory: {error}"
    return (None, reason) if reason else (shared, "")


def difference(shared: SharedMemorySum, group: Group, device: torch.device) -> str:
    """Why the sums of a method are wrong; empty if they are right. All ranks call it together and get the same result:
    each judges the sums of all ranks.

    One shot and two shot must give the bits of a sum in the order of ranks; multimem the sum, with equal bits on all
    ranks.
    """
    generator = torch.Generator().manual_seed(group.rank)
    methods = [Method.ONE_SHOT, Method.TWO_SHOT] + [Method.MULTIMEM] * shared.has_multimem
    for method in methods:
        for dtype in DTYPES:
            x = torch.randn(3, 1000, generator=generator).to(device, dtype)
            parts = group.all_gather(x)
            shared.add_by(method, x)
            results = group.all_gather(x)
            expected = group.sum_in_order(parts)
            faults = (_fault(method, result, expected, parts) for result in results)
            if fault := next(filter(None, faults), ""):
                return f"{method.value} in {dtype} {fault}"
            if not torch.equal(results, results[:1].expand_as(results)):
                return f"{method.value} in {dtype} gives different sums on different ranks"
    return ""


def _fault(method: Method, found: torch.Tensor, expected: torch.Tensor, parts: torch.Tensor) -> str:
    if method is not Method.MULTIMEM:
        return "" if torch.equal(found, expected) else "does not add in the order of ranks"
    bound = torch.finfo(found.dtype).eps * len(parts) * parts.float().abs().sum(0)
    is_near = ((found.float() - parts.float().sum(0)).abs() <= bound).all()
    return "" if bool(is_near) else "gives a wrong sum"
