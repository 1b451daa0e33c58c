"""quire-worker with --node-rank 1 or more: the ranks of one host of a worker whose leader (--node-rank 0) is elsewhere.

It serves no gRPC, registers with no scheduler and has no probes: all this is the leader's.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from types import FrameType

from svc_common.trust import Trust
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.nodes import Facts
from worker_svc.node_links.leader_link import LeaderLink

log = logging.getLogger(__name__)


def run(args: argparse.Namespace, settings: EngineConfig, trust: Trust) -> int:
    """Runs until the leader stops this node. Returns the exit code; raises ValueError for a bad setting or model."""
    link = LeaderLink(args.leader_address, trust, settings.node_rank)
    has_joined = threading.Event()

    def connect(facts: Facts) -> LeaderLink:
        link.join(facts, args.node_timeout_s)
        has_joined.set()
        log.info("node %d of %d has joined the leader at %s", settings.node_rank, settings.nnodes, args.leader_address)
        return link

    def terminate(number: int, frame: FrameType | None) -> None:
        """The leader drains the worker first: its open rows need this node until then."""
        if not has_joined.is_set():
            raise SystemExit(0)
        log.info("%s: asking the leader to drain this worker", signal.Signals(number).name)
        threading.Thread(target=link.report_drain, name="drain", daemon=True).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, terminate)
    log.info(
        "node %d of %d: importing torch, then joining %s", settings.node_rank, settings.nnodes, args.leader_address
    )
    from worker_svc.engine.backend import BackendUnavailableError
    from worker_svc.engine.engines import follow

    try:
        follow(settings, connect)
    except BackendUnavailableError as error:
        raise ValueError(f"--backend {settings.backend}: {error}") from error
    log.info("the leader has stopped this node")
    return 0
