"""Copies of weights to the device: pieces, dtypes, strides, and no buffer changes before it is read."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.builders import DEVICE
from worker_svc.engine.gpu.uploads import NUM_BUFFERS, Uploader


class SlowUploader(Uploader):
    """Delays each copy until a caller waits for it: a device may copy that late, but no later."""

    def _send(self, piece, target):
        class Event:
            is_done = False

            def synchronize(self):
                if not self.is_done:
                    target.copy_(piece)
                self.is_done = True

        return Event()

    def finish(self):
        for event in self._sent:
            if event is not None:
                event.synchronize()


@pytest.mark.parametrize("shape", [(100,), (7, 30), (33, 3), (1, 64), (0, 5)])
def test_copies_are_complete(shape):
    uploader = SlowUploader(torch.float16, torch.device("cpu"), piece_bytes=128)
    sources = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(NUM_BUFFERS + 2)]
    targets = [torch.full(shape, torch.nan, dtype=torch.float16) for _ in sources]
    for source, target in zip(sources, targets, strict=True):
        uploader.copy(source, target)
    uploader.finish()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.half())


def test_parts_of_a_matrix_arrive_on_the_device():
    whole = torch.randn(50, 40)
    target = torch.empty(50, 20, dtype=torch.bfloat16, device=DEVICE)
    Uploader(torch.bfloat16, DEVICE, piece_bytes=1000).copy(whole.chunk(2, dim=1)[1], target)
    assert torch.equal(target.cpu(), whole[:, 20:].bfloat16())
