"""Inputs of the device, tested without one: staging memory of a step, compute dtype, tiles."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from worker_svc.engine.backend import HeadShape
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.attention.tiles import DECODE_TILES, EXACT_TILES, PREFILL_TILES, for_heads
from worker_svc.engine.gpu.start.setup import choose_dtype
from worker_svc.engine.gpu.step.pending_step import NO_IDS, PendingStep, Writes
from worker_svc.engine.gpu.step.step_buffer import Staging
from worker_svc.engine.step import RowErrors


class Event:
    """A completed event. The first thread that waits for it is delayed on return."""

    def __init__(self) -> None:
        self.has_waiter, self.go_on = threading.Event(), threading.Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if not self.has_waiter.is_set():
            self.has_waiter.set()
            assert self.go_on.wait(10)


def test_memory_of_a_step_is_not_reused_while_it_is_read():
    """The launching thread may overtake the waiting one, settle the step and take its memory."""
    rows = np.array([0, 1])
    staging = Staging(torch.zeros(1), torch.tensor([7, 8, 0, 0], dtype=torch.int32), Event())
    writes = Writes((NO_IDS, NO_IDS), NO_IDS, NO_IDS, NO_IDS, rows, rows, rows)
    step = PendingStep(1, staging, writes, RowErrors(), time.perf_counter())
    seen = []

    def settle() -> None:
        step.result()
        staging.down.fill_(99)  # the next step's tokens

    reader = threading.Thread(target=lambda: seen.append(step.result().token_ids.tolist()))
    reader.start()
    assert staging.event.has_waiter.wait(10)
    settler = threading.Thread(target=settle)
    settler.start()
    settler.join(0.05)  # it would have finished by now if it did not wait
    staging.event.go_on.set()
    reader.join(10)
    settler.join(10)
    assert seen == [[7, 8]]


@pytest.mark.parametrize(("stored", "expected"), [
    (torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16"),
])  # fmt: skip
def test_auto_serves_a_checkpoint_as_it_is_stored(stored, expected):
    checkpoint = SimpleNamespace(stored_dtype=lambda: stored)
    assert choose_dtype(EngineConfig(Path(), backend="cuda"), checkpoint, torch.device("cuda")) == expected


@pytest.mark.parametrize("tiles", [DECODE_TILES, PREFILL_TILES, EXACT_TILES])
@pytest.mark.parametrize("shape", [HeadShape(16, 8, 128), HeadShape(48, 1, 64), HeadShape(7, 1, 256)])
@pytest.mark.parametrize(("number_bytes", "shared_bytes"), [(2, 0), (2, 100 << 10), (4, 0)])
def test_a_tile_holds_all_heads_of_a_group(tiles, shape, number_bytes, shared_bytes):
    chosen = for_heads(tiles, shape, number_bytes, shared_bytes)
    assert chosen.queries(shape) >= 1
    assert chosen.block_m >= 16  # minimum of tensor cores
