"""The runner of rank 0 of a tensor-parallel worker, which serves gRPC. Other ranks are followers.

    rank 0: launch(batch) -> send -> own shard        followers: receive -> own shard, until STOP

Followers are child processes, or on other hosts (node.py). A rank that dies cannot be replaced, because its shard of
the pool is lost. So the worker exits when a rank dies or a step does not finish, and followers exit with rank 0.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
import xxhash

from step_protocol.messages import StepBatch
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig, EngineInfo
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.collectives.rendezvous import join, leave, make_store
from worker_svc.engine.gpu.layers.weights import shard_config
from worker_svc.engine.gpu.messages import STOP
from worker_svc.engine.gpu.ranks.local import EXIT_RANK_LOST, LocalRanks
from worker_svc.engine.gpu.runner import DeviceRunner
from worker_svc.engine.gpu.step.pending_step import PendingStep
from worker_svc.engine.kernels.numerics import build
from worker_svc.engine.nodes import Facts, Nodes, RankOutbox

logger = logging.getLogger(__name__)

STUCK_AFTER_S = 60.0  # NCCL has no timeout in graph replays; the scheduler's step timeout is 120 s
WATCH_INTERVAL_S = 1.0
DIED_WITHIN_S = 2.0  # a connection breaks shortly before its process exits
OF_ONE_NODE = ("model_dir", "model_name", "node_rank", "adapters", "threads")  # may differ between nodes
OVERSLEPT_S = 5.0  # after a longer sleep (suspended process) time limits of steps restart


class ParallelRunner(DeviceRunner):
    """Rank 0 and its followers. `nodes`: the links to other hosts, if nnodes is 2 or more."""

    def __init__(
        self, config: EngineConfig, progress: Callable[[float], None] | None = None, nodes: Nodes | None = None
    ) -> None:
        check_shares(config)
        self._is_closing = threading.Event()
        self._ending = threading.Lock()
        self._launching_since: float | None = None
        self._is_loaded = False
        store = make_store(config.tensor_parallel_size)
        self._followers = LocalRanks(config, range(1, config.ranks_per_node), store)
        atexit.register(self._kill_followers)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        try:
            outboxes = [*self._followers.outboxes, *self._join_nodes(config, nodes, store.port)]
            super().__init__(config, progress, join(config, 0, store, outboxes=outboxes))
            if nodes is not None:
                nodes.wait_loaded(loaded_facts(self.info))
            self._is_loaded = True
        except BaseException:
            self._kill_followers()
            raise

    def _join_nodes(self, config: EngineConfig, nodes: Nodes | None, store_port: int) -> Sequence[RankOutbox]:
        if nodes is None:
            return ()
        nodes.start(store_port, start_facts(config), self._end)
        return nodes.wait_joined()

    def launch(self, batch: StepBatch) -> PendingStep:
        self._launching_since = time.perf_counter()
        try:
            return super().launch(batch)
        except (RuntimeError, OSError):
            if not self._is_closing.is_set():
                self._end_if_rank_lost(DIED_WITHIN_S)  # a lost rank shows as a broken connection here
            raise
        finally:
            self._launching_since = None

    def close(self) -> None:
        """Stops the followers and waits for them."""
        self._is_closing.set()
        self._group.send(STOP)
        self._followers.join()
        self._kill_followers()
        leave()

    def _kill_followers(self) -> None:
        self._is_closing.set()
        self._followers.kill()

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
        ended = self._followers.end_within(timeout_s)
        if ended is not None and not self._is_closing.is_set():
            self._end(*ended)

    def _end(self, reason: str, exit_code: int) -> None:
        with self._ending:  # several threads may get here; the first one logs and exits
            logger.critical("%s; this worker exits with code %d", reason, exit_code)
            for handler in logging.getLogger().handlers:
                handler.flush()
            self._kill_followers()
            os._exit(exit_code)


def check_shares(config: EngineConfig) -> None:
    """Checks, before any process starts, that this host has a GPU for each of its ranks and that the model can be
    sharded."""
    size, needed = config.tensor_parallel_size, config.ranks_per_node
    if torch.cuda.is_available() and needed > torch.cuda.device_count():
        where = f" on each of {config.nnodes} nodes" if config.nnodes > 1 else ""
        raise BackendUnavailableError(
            f"tensor_parallel_size {size} needs {needed} GPUs{where}, but {torch.cuda.device_count()} are visible; "
            "lower tensor_parallel_size, or change CUDA_VISIBLE_DEVICES"
        )
    shard_config(parse_config(Checkpoint(config.model_dir).config), Group(0, size))


def start_facts(config: EngineConfig) -> Facts:
    """What must be equal on all nodes before they load: settings, version, and the model's configuration and shapes."""
    checkpoint = Checkpoint(config.model_dir)
    names = checkpoint.tensor_names
    shapes = xxhash.xxh3_128_hexdigest("".join(f"{name}{checkpoint.shape(name)}" for name in names).encode())
    settings = {name: str(value) for name, value in asdict(config).items() if name not in OF_ONE_NODE}
    return {"version": build(), **settings, "config.json": checkpoint.revision("", torch.float32), "tensors": shapes}


def loaded_facts(info: EngineInfo) -> Facts:
    """What must be equal on all nodes after they have loaded."""
    return {"weights_digest": info.weights_digest, "numerics": info.numerics}
