"""The KV pool of layers that keep different keys and values, or none of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from worker_svc.engine.backend import KVLayout
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.decoder.pool.block_contents import BlockContents
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool

NARROW, WIDE = KVLayout(2, 16, 16), KVLayout(1, 24, 8)
LAYOUTS = [NARROW, WIDE, NARROW, KVLayout(2, 16, 16, owner=2), KVLayout(1, 24, 8, owner=1)]


def test_each_layer_has_its_shape_and_shared_layers_take_no_memory():
    pool = KVCachePool(LAYOUTS, 5, 4, torch.float32)
    shapes = [tuple(map(tuple, (part.shape for part in pool.layer(index)))) for index in range(5)]
    narrow, wide = ((5, 2, 16, 4), (5, 2, 4, 16)), ((5, 1, 24, 4), (5, 1, 4, 8))
    assert shapes == [narrow, wide, narrow, narrow, wide]
    assert pool.layer(3)[0].data_ptr() == pool.layer(2)[0].data_ptr() != pool.layer(0)[0].data_ptr()
    assert pool.layer(4)[1].data_ptr() == pool.layer(1)[1].data_ptr()
    held = sum(tensor.numel() * tensor.element_size() for tensor in pool.tensors)
    assert held == 5 * KVCachePool.bytes_per_block(LAYOUTS, 4, torch.float32) == 5 * 4 * 4 * (2 * 2 * 32 + 32)


def test_a_copy_takes_the_blocks_of_all_layers():
    pool = KVCachePool(LAYOUTS, 5, 4, torch.float32)
    for index, layout in enumerate(LAYOUTS):
        if layout.owner is None:
            for part in pool.layer(index):
                part.normal_()
    before = [[part.clone() for part in pool.layer(index)] for index in range(5)]
    pool.copy(make_backend("cpu", 1, "exact"), np.array([1, 4]), np.array([3, 1]))
    for index in range(5):
        for part, old in zip(pool.layer(index), before[index], strict=True):
            assert torch.equal(part[[0, 1, 2, 3, 4]], old[[0, 4, 2, 1, 4]])


class Watched(np.ndarray):
    """Calls `look` before each write, as another thread may run between two writes."""

    look: Callable[[], None]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.look()
        super().__setitem__(key, value)


def test_no_thread_sees_a_block_under_the_digest_of_its_earlier_content():
    contents, old, seen = BlockContents(2, 4), b"o" * 16, []
    contents.commit(np.array([1]), [old])
    for name in ("_hashes", "_is_committed"):
        watched = getattr(contents, name).view(Watched)
        watched.look = lambda: seen.append(contents.version(1, old))
        setattr(contents, name, watched)
    contents.uncommit(np.array([1]))
    contents.commit(np.array([1]), [b"n" * 16])
    assert seen == [0, None, None]
