"""The processes of a tensor-parallel worker. This one is rank 0 and serves gRPC; its child processes are followers.

    rank 0: launch(batch) -> broadcast -> own shard        followers: broadcast -> own shard, until STOP

A rank that dies cannot be replaced, because its shard of the pool is lost. So the worker exits when a rank dies or a
step does not finish, and followers exit with rank 0.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from worker_svc.engine.architectures import parse_config
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.batch import StepBatch
from worker_svc.engine.checkpoint import Checkpoint
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.messages import STOP
from worker_svc.engine.gpu.parallel import Group
from worker_svc.engine.gpu.pending_step import PendingStep
from worker_svc.engine.gpu.runner import DeviceRunner
from worker_svc.engine.gpu.weights import shard_config

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
EXIT_BAD_SETTING = 2
EXIT_RANK_LOST = 70  # same code as for other faults that may corrupt the pool
STUCK_AFTER_S = 60.0  # NCCL has no timeout in graph replays; the scheduler's step timeout is 120 s
WATCH_INTERVAL_S = 1.0
DIED_WITHIN_S = 2.0  # a connection breaks shortly before its process exits
OVERSLEPT_S = 5.0  # after a longer sleep (suspended process) time limits of steps restart
JOIN_TIMEOUT_S = 30.0
LOAD_LIMIT = timedelta(hours=1)  # ranks may finish reading weights at very different times
IDLE_LIMIT = timedelta(days=365)  # a worker without requests sends no batches, which is not a fault


class ParallelRunner(DeviceRunner):
    """Rank 0 and its followers."""

    def __init__(self, config: EngineConfig, progress: Callable[[float], None] | None = None) -> None:
        size = config.tensor_parallel_size
        check_shares(config)
        store: Any = dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        context = multiprocessing.get_context("spawn")
        self._followers: list[BaseProcess] = [
            context.Process(target=_follow, args=(config, rank, size, store.port), name=f"rank-{rank}", daemon=True)
            for rank in range(1, size)
        ]
        self._store = store
        self._is_closing = threading.Event()
        self._ending = threading.Lock()
        self._launching_since: float | None = None
        self._is_loaded = False
        for process in self._followers:
            process.start()
        atexit.register(self._kill_followers)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        try:
            super().__init__(config, progress, _join(config, 0, store))
            self._is_loaded = True
        except BaseException:
            self._kill_followers()
            raise

    def launch(self, batch: StepBatch) -> PendingStep:
        self._launching_since = time.perf_counter()
        try:
            return super().launch(batch)
        except RuntimeError:
            if not self._is_closing.is_set():
                self._end_if_rank_lost(DIED_WITHIN_S)  # a lost rank shows as a broken connection here
            raise
        finally:
            self._launching_since = None

    def close(self) -> None:
        """Stops the followers and waits for them."""
        self._is_closing.set()
        self._group.send(STOP)
        for process in self._followers:
            process.join(JOIN_TIMEOUT_S)
        self._kill_followers()
        _leave_group()

    def _kill_followers(self) -> None:
        """Kills followers: a follower that is suspended or waits in a collective cannot be stopped otherwise."""
        self._is_closing.set()
        for process in self._followers:
            process.kill()

    def _watch(self) -> None:
        looked_at = excused_until = time.perf_counter()
        while not self._is_closing.is_set():
            self._end_if_rank_lost(WATCH_INTERVAL_S)
            now = time.perf_counter()
            if now - looked_at > OVERSLEPT_S:
                excused_until = now
            looked_at = now
            if now - max(self._busy_since(now), excused_until) > STUCK_AFTER_S:
                self._end(f"a step did not finish within {STUCK_AFTER_S:g} s: a rank is stuck", EXIT_RANK_LOST)

    def _busy_since(self, now: float) -> float:
        """Start of the oldest unfinished step; `now` if there is none or the model is still loading."""
        if not self._is_loaded:
            return now
        since = self._launching_since
        return min(now if since is None else since, self.running_since(now))

    def _end_if_rank_lost(self, timeout_s: float) -> None:
        """Ends the worker if a rank exits within `timeout_s`, because a part of every block is lost with it."""
        ended = wait([process.sentinel for process in self._followers], timeout_s)
        if not ended or self._is_closing.is_set():
            return
        with self._ending:  # two threads may get here; the first one logs
            self._end_with([process for process in self._followers if process.sentinel in ended])

    def _end_with(self, lost: list[BaseProcess]) -> None:
        for process in lost:
            process.join()  # sets its exit code
        refused = [process.name for process in lost if self._store.check([process.name])]
        if refused:
            self._end("; ".join(f"{name}: {self._store.get(name).decode()}" for name in refused), EXIT_BAD_SETTING)
        names = ", ".join(f"{process.name} ended (exit code {process.exitcode})" for process in lost)
        self._end(names, EXIT_RANK_LOST)

    def _end(self, reason: str, exit_code: int) -> None:
        logger.critical("%s; this worker exits with code %d", reason, exit_code)
        for handler in logging.getLogger().handlers:
            handler.flush()
        self._kill_followers()
        os._exit(exit_code)


def check_shares(config: EngineConfig) -> None:
    """Checks, before any process starts, that there is a GPU for each rank and that the model can be sharded."""
    size = config.tensor_parallel_size
    if torch.cuda.is_available() and size > torch.cuda.device_count():
        raise BackendUnavailableError(
            f"tensor_parallel_size {size} needs {size} GPUs, but {torch.cuda.device_count()} are visible; "
            "lower tensor_parallel_size, or change CUDA_VISIBLE_DEVICES"
        )
    shard_config(parse_config(Checkpoint(config.model_dir).config), Group(0, size))


def _follow(config: EngineConfig, rank: int, size: int, port: int) -> None:
    """Main function of a follower. It ignores signals, which a terminal or service manager sends to all processes, and
    exits with rank 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, name="parent", daemon=True).start()
    store: Any = dist.TCPStore(HOST, port, size, is_master=False)  # type: ignore[attr-defined]
    try:
        runner = DeviceRunner(config, None, _join(config, rank, store))
    except (ValueError, BackendUnavailableError) as error:
        store.set(f"rank-{rank}", str(error))
        os._exit(EXIT_BAD_SETTING)
    runner.follow()
    _leave_group()


def _leave_group() -> None:
    """Destroys the process group, unless it is NCCL's: destroying it would wait forever for graphs that hold its
    communicators, which end with the process."""
    if dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _leave_with_parent() -> None:
    """Exits when rank 0 dies. Rank 0 may die in the middle of a step, and this rank would then wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(EXIT_RANK_LOST)


def _join(config: EngineConfig, rank: int, store: Any) -> Group:
    """Joins the other ranks: NCCL between GPUs, gloo for messages and for ranks without a GPU."""
    size, device = config.tensor_parallel_size, None
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "nccl", store=store, rank=rank, world_size=size, timeout=LOAD_LIMIT,
        device_id=device,
    )  # fmt: skip
    control = dist.new_group(backend="gloo", timeout=IDLE_LIMIT)
    return Group(rank, size, control, is_exact=config.determinism == "exact")
