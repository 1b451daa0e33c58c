"""Stands for torch.distributed._symmetric_memory and torch.ops.symm_mem, between ranks that are threads: the same names
and arguments, and the checks of the real kernels."""

from __future__ import annotations

from types import SimpleNamespace

import torch

KERNEL_DTYPES = (torch.bfloat16, torch.float32)


class FakeMemory:
    """The module and the operators of one rank."""

    def __init__(self, rank, meeting, *, has_multicast=False, group_name="0"):
        self._rank = rank
        self._meeting = meeting
        self._group_name = group_name
        self._multicast_ptr = 4096 if has_multicast else 0
        self._allocated = set()
        self._joined = set()
        self.calls = []

    # the module

    def empty(self, *size, dtype=None, device=None):
        tensor = torch.full(size, 255, dtype=dtype, device=device)  # NaN if it is read
        self._allocated.add(tensor.untyped_storage().data_ptr())
        return tensor

    def rendezvous(self, tensor, group):
        assert group == self._group_name
        assert tensor.untyped_storage().data_ptr() in self._allocated
        self._joined.add(tensor.untyped_storage().data_ptr())
        return SimpleNamespace(multicast_ptr=self._multicast_ptr, world_size=self._meeting.size)

    # the operators

    def one_shot_all_reduce_out(self, input, reduce_op, group_name, out):
        self._check("one_shot", input, reduce_op, group_name, (out,))
        out.copy_(self._meeting.meet(self._rank, input, in_order))
        return out

    def two_shot_all_reduce_out(self, input, reduce_op, group_name, output):
        self._check("two_shot", input, reduce_op, group_name, (output,))
        output.copy_(self._meeting.meet(self._rank, input, in_order))
        return output

    def multimem_all_reduce_(self, input, reduce_op, group_name):
        assert self._multicast_ptr, "multimem_all_reduce_: multicast support is required."
        self._check("multimem", input, reduce_op, group_name, ())
        return input.copy_(self._meeting.meet(self._rank, input, lambda parts: parts.float().sum(0).to(parts.dtype)))

    def _check(self, name, shared, reduce_op, group_name, others):
        assert reduce_op == "sum"
        assert group_name == self._group_name
        assert shared.untyped_storage().data_ptr() in self._joined
        assert shared.dtype in KERNEL_DTYPES
        assert self._meeting.size in (2, 4, 8)
        for tensor in (shared, *others):
            assert tensor.is_contiguous()
            assert (tensor.shape, tensor.dtype) == (shared.shape, shared.dtype)
            assert tensor.storage_offset() * tensor.element_size() % 16 == 0
            assert tensor.numel() * tensor.element_size() % 16 == 0
        for tensor in others:
            assert tensor.untyped_storage().data_ptr() not in self._joined
        self.calls.append((name, shared.numel() * shared.element_size()))


def in_order(parts):
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
