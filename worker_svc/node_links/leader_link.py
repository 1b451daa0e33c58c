"""A node's end of the links to the leader, and the process of such a node."""

from __future__ import annotations

import argparse
import logging
import secrets
import signal
import socket
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from svc_common.security.trust import Trust
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.nodes import Facts, NodesError
from worker_svc.node_links.frames import MAX_MESSAGE, LinkError, prepare, receive_frame, receive_text, send_text
from worker_svc.node_links.identity import Identity
from worker_svc.node_links.tunnel import StoreProxy

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
RETRY_S = 0.5


class LeaderLink:
    """The connections to the leader: node_server.py names them."""

    def __init__(self, address: str, trust: Trust, node_rank: int) -> None:
        self._address = address
        self._identity = Identity(trust)
        self._hello = {"node_rank": node_rank, "session": secrets.token_hex(16)}
        self._reporting = threading.Lock()
        self._reports: socket.socket | None = None
        self._steps: socket.socket | None = None
        self._store_proxy: StoreProxy | None = None

    # -- joining ------------------------------------------------------------------------------------------------------

    def join(self, facts: Facts, timeout_s: float) -> None:
        """Joins the leader, which may start later than this node. Raises NodesError if it refuses this node or does not
        answer."""
        deadline, last = time.monotonic() + timeout_s, ""
        while True:
            try:
                self._join(facts)
                return
            except OSError as error:
                if str(error) != last:
                    log.info("no connection to the leader at %s yet: %s", self._address, error)
                last = str(error)
            if time.monotonic() > deadline:
                raise NodesError(
                    f"--leader-address {self._address}: no connection within {timeout_s:g} s (--node-timeout-s): {last}"
                )
            time.sleep(RETRY_S)

    def _join(self, facts: Facts) -> None:
        reports = self._open("reports", facts=dict(facts))
        try:
            self._steps = self._open("steps")
        except BaseException:
            reports.close()
            raise
        self._reports = reports
        self._store_proxy = StoreProxy(lambda: self._open("store"))

    def _open(self, purpose: str, **more: Any) -> socket.socket:
        deadline = time.monotonic() + HANDSHAKE_S
        host, _, port = self._address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_S)
        try:
            prepare(connection)
            connection = self._identity.connect(connection, deadline)
            send_text(connection, {**self._hello, "purpose": purpose, **more})
            if refused := receive_text(connection, deadline).get("refused", "no reason"):
                raise NodesError(f"the leader at {self._address} refused this node: {refused}")
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        return connection

    # -- as the engine sees it ----------------------------------------------------------------------------------------

    @property
    def store_port(self) -> int:
        if self._store_proxy is None:
            raise LinkError("this node has not joined")
        return self._store_proxy.port

    def recv_bytes(self) -> bytes:
        if self._steps is None:
            raise LinkError("this node has not joined")
        if message := receive_frame(self._steps, MAX_MESSAGE):
            return message
        raise EOFError

    def report_loaded(self, facts: Facts) -> None:
        self._report({"loaded": dict(facts)})

    def report_end(self, reason: str, exit_code: int) -> None:
        with suppress(OSError):
            self._report({"end": reason, "exit_code": exit_code})

    def report_drain(self) -> None:
        """Asks the leader to drain the worker, because this node has to stop."""
        with suppress(OSError):
            self._report({"drain": True})

    def _report(self, report: dict[str, Any]) -> None:
        if self._reports is None:
            raise LinkError("this node has not joined")
        with self._reporting:
            send_text(self._reports, report)


def run_node(args: argparse.Namespace, settings: EngineConfig, trust: Trust) -> int:
    """Runs quire-worker with --node-rank 1 or more: the ranks of one host of a worker whose leader is elsewhere. It
    serves no gRPC, registers with no scheduler and has no probes: all this is the leader's.

    Returns the exit code when the leader stops this node. Raises ValueError for a bad setting or model.
    """
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
