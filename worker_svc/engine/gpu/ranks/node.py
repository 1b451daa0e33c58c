"""The ranks of a tensor-parallel worker on a host other than the leader's. This process has the first of them.

    leader -> this process -> its child processes, one per further rank

If a rank of this host or the leader is lost, this process ends: the leader then ends too, and all are started again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.collectives.rendezvous import join, leave, open_store
from worker_svc.engine.gpu.messages import STOP
from worker_svc.engine.gpu.ranks.local import EXIT_BAD_SETTING, EXIT_RANK_LOST, JOIN_TIMEOUT_S, LocalRanks
from worker_svc.engine.gpu.ranks.parallel_runner import (
    DIED_WITHIN_S,
    WATCH_INTERVAL_S,
    check_shares,
    loaded_facts,
    start_facts,
)
from worker_svc.engine.gpu.runner import DeviceRunner
from worker_svc.engine.nodes import Facts, Leader

logger = logging.getLogger(__name__)


def run_node(config: EngineConfig, connect: Callable[[Facts], Leader]) -> None:
    """Runs the ranks of this node until the leader stops them. `connect` joins the leader.

    Raises ValueError or BackendUnavailableError for settings or a model that cannot be used. Ends the process if a part
    of the worker is lost.
    """
    check_shares(config)
    _Node(config, connect(start_facts(config))).run()


class _Node:
    """This process's rank, its child processes, and the messages to both."""

    def __init__(self, config: EngineConfig, leader: Leader) -> None:
        self._config = config
        self._leader = leader
        self._first = config.node_rank * config.ranks_per_node
        self._store = open_store(leader.store_port, config.tensor_parallel_size)
        ranks = range(self._first + 1, self._first + config.ranks_per_node)
        self._others = LocalRanks(config, ranks, self._store)
        self._messages = _Messages()
        self._is_loaded = False
        self._is_stopping = threading.Event()
        self._has_finished = threading.Event()

    def run(self) -> None:
        for target in (self._relay, self._watch):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()
        try:
            group = join(self._config, self._first, self._store, inbox=self._messages)
            runner = DeviceRunner(self._config, None, group)
            self._is_loaded = True
            self._leader.report_loaded(loaded_facts(runner.info))
            runner.follow()
            self._has_finished.set()
        except (ValueError, BackendUnavailableError) as error:
            self._leader.report_end(str(error), EXIT_BAD_SETTING)
            self._others.kill()
            raise
        except Exception as error:
            # A lost rank or leader breaks this rank too. The other threads report it and end the process.
            self._is_stopping.wait(DIED_WITHIN_S)
            logger.exception("rank %d failed", self._first)
            self._leader.report_end(f"rank-{self._first}: {error}", EXIT_RANK_LOST)
            self._end(f"rank-{self._first} failed", EXIT_RANK_LOST)
        self._others.join()
        self._others.kill()
        leave()

    def _relay(self) -> None:
        """Passes the leader's messages on until it stops this node."""
        try:
            while (message := self._leader.recv_bytes()) != STOP:
                self._pass_on(message)
        except EOFError:
            pass
        except OSError as error:
            self._end(f"the leader is lost: {error}", EXIT_RANK_LOST)
        self._is_stopping.set()
        self._pass_on(STOP)
        if not self._is_loaded:
            self._end("the leader has stopped this node, which was still loading", 0)
        if not self._has_finished.wait(JOIN_TIMEOUT_S):
            self._end(f"the leader has stopped, but a step did not finish within {JOIN_TIMEOUT_S:g} s", EXIT_RANK_LOST)

    def _pass_on(self, message: bytes) -> None:
        """To the child processes first, so that their ranks start no later than this one."""
        try:
            for outbox in self._others.outboxes:
                outbox.send_bytes(message)
        except OSError:
            return  # a rank has ended; _watch reports it
        self._messages.put(message)

    def _watch(self) -> None:
        while not self._is_stopping.is_set():
            ended = self._others.end_within(WATCH_INTERVAL_S)
            if ended is not None and not self._is_stopping.is_set():
                self._leader.report_end(*ended)
                self._end(*ended)

    def _end(self, reason: str, exit_code: int) -> None:
        level = logging.CRITICAL if exit_code else logging.INFO
        logger.log(level, "%s; this node exits with code %d", reason, exit_code)
        for handler in logging.getLogger().handlers:
            handler.flush()
        self._others.kill()
        os._exit(exit_code)


class _Messages:
    """The inbox of this process's own rank."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        self.put = self._queue.put

    def recv_bytes(self) -> bytes:
        return self._queue.get()
