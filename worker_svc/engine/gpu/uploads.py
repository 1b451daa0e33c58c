"""Copies between host and device through pinned memory, which the host does not wait for. Weights are copied from files
in pieces: one is copied while the next is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PIECE_BYTES = 64 << 20
NUM_BUFFERS = 2


def to_device(values: npt.NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The values on the device, for work that is launched later."""
    host = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return host if host.device == device or device.type != "cuda" else host.pin_memory().to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, valid once an event that is recorded later has fired."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    host.copy_(values, non_blocking=True)
    return host


class Uploader:
    """Two pinned buffers, used in turn. Work launched later on the same stream sees complete copies."""

    def __init__(self, dtype: torch.dtype, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self._is_cuda = device.type == "cuda"
        size = piece_bytes // dtype.itemsize
        self._buffers = [torch.empty(size, dtype=dtype, pin_memory=self._is_cuda) for _ in range(NUM_BUFFERS)]
        self._sent: list[Any] = [None] * NUM_BUFFERS  # events; a buffer must not change before its event
        self._next = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """target = source, in pieces of whole rows. `source` may have any strides and dtype."""
        rows = max(1, len(self._buffers[0]) * len(source) // max(source.numel(), 1))
        for start in range(0, len(source), rows):
            part = source[start : start + rows]
            piece = self._free_buffer()[: part.numel()].view(part.shape)
            piece.copy_(part)  # reads the file, and converts
            self._sent[self._next] = self._send(piece, target[start : start + rows])
            self._next = (self._next + 1) % NUM_BUFFERS

    def _free_buffer(self) -> torch.Tensor:
        if self._sent[self._next] is not None:
            self._sent[self._next].synchronize()
        return self._buffers[self._next]

    def _send(self, piece: torch.Tensor, target: torch.Tensor) -> Any:
        """Starts a copy. Returns the event at its end, or None if it is complete."""
        target.copy_(piece, non_blocking=True)
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event
