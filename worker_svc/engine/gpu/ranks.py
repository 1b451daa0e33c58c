"""The processes of a tensor-parallel worker: this one is rank 0 and speaks with the world, its children follow.

    rank 0: launch(batch) -> broadcast -> own part        others: broadcast -> own part, until told to stop

A rank that dies cannot be replaced: its part of the pool is gone. So its death ends the worker, and the end of rank 0
breaks the others' connections.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.parallel import Group
from worker_svc.engine.gpu.runner import DeviceRunner

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
EXIT_RANK_LOST = 70  # as for every fault that leaves the pool untrustworthy
JOIN_TIMEOUT_S = 30.0
IDLE_LIMIT = timedelta(days=365)  # a worker without requests sends no batch: that is no fault


class ParallelRunner(DeviceRunner):
    """Rank 0, with its followers."""

    def __init__(self, config: EngineConfig, progress: Callable[[float], None] | None = None) -> None:
        size = config.tensor_parallel_size
        store: Any = dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        context = multiprocessing.get_context("spawn")
        self._followers: list[BaseProcess] = [
            context.Process(target=_follow, args=(config, rank, size, store.port), name=f"rank-{rank}", daemon=True)
            for rank in range(1, size)
        ]
        for process in self._followers:
            process.start()
        self._is_closing = threading.Event()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        super().__init__(config, progress, _join(0, size, store))

    def close(self) -> None:
        """Tells the followers to stop and waits for them."""
        self._is_closing.set()
        self._group.broadcast(None)
        for process in self._followers:
            process.join(JOIN_TIMEOUT_S)
        dist.destroy_process_group()

    def _watch(self) -> None:
        ended = wait([process.sentinel for process in self._followers])
        if not self._is_closing.is_set():
            end_worker([process.name for process in self._followers if process.sentinel in ended])


def end_worker(lost: Sequence[str]) -> None:
    """These ranks are gone, and with them a part of every block."""
    logger.critical("%s ended, so this worker ends (exit code %d)", ", ".join(lost), EXIT_RANK_LOST)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(EXIT_RANK_LOST)


def _follow(config: EngineConfig, rank: int, size: int, port: int) -> None:
    store: Any = dist.TCPStore(HOST, port, size, is_master=False)  # type: ignore[attr-defined]
    DeviceRunner(config, None, _join(rank, size, store)).follow()
    dist.destroy_process_group()


def _join(rank: int, size: int, store: Any) -> Group:
    """Meets the other ranks: NCCL between devices, gloo for messages and where there is no device."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=IDLE_LIMIT)
    return Group(rank, size, dist.new_group(backend="gloo", timeout=IDLE_LIMIT))
