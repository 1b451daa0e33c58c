"""The leader's end of the links: it accepts the other nodes, sends them messages, and notices when one is lost.

A node opens connections for these purposes, each of which is used in one direction by one thread:

    reports   node -> leader: loaded, drain, end; its end is the loss of the node
    steps     leader -> node: messages for the ranks; an empty frame after the last one
    store     to the store of rank 0, one per client of the store
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from svc_common.channels import bind_tcp
from svc_common.security.trust import Trust
from svc_common.serve import BindError
from worker_svc.engine.nodes import Facts, NodesError, RankOutbox, difference
from worker_svc.node_links.frames import LinkError, prepare, receive_text, send_frame, send_text
from worker_svc.node_links.identity import Identity
from worker_svc.node_links.tunnel import HOST, forward

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 32  # connections at once that have not proved anything yet
BACKLOG = 128
LOG_EVERY_S = 30.0
LOADED_WITHIN_S = 3600.0  # nodes may read weights at very different speeds
STOP_TIMEOUT_S = 5.0
EXIT_NODE_LOST = 70  # as for a lost rank
PURPOSES = ("reports", "steps", "store")


class NodeLink:
    """One node that has joined. `send_bytes` sends a message to its ranks."""

    def __init__(self, node_rank: int, session: str, peer: str) -> None:
        self.node_rank = node_rank
        self.session = session  # equal for all connections of one process
        self.peer = peer
        self.loaded: Facts | None = None
        self.steps: socket.socket | None = None
        self.end = ("", EXIT_NODE_LOST)  # reason and exit code, as it reports them
        self._sending = threading.Lock()

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.peer})"

    def send_bytes(self, message: bytes) -> None:
        if self.steps is None:
            raise LinkError(f"{self} has not joined")
        with self._sending:
            send_frame(self.steps, message)

    def stop(self) -> None:
        """After the last message."""
        if self.steps is None or not self._sending.acquire(timeout=STOP_TIMEOUT_S):
            return
        try:
            with suppress(OSError):
                self.steps.settimeout(STOP_TIMEOUT_S)
                send_frame(self.steps, b"")
            self.steps.close()
        finally:
            self._sending.release()


class NodeServer:
    """Listens for nodes 1 to `num_nodes` - 1. Raises BindError. `on_drain` is called when a node is asked to stop."""

    def __init__(
        self, listen: str, trust: Trust, num_nodes: int, timeout_s: float, on_drain: Callable[[], None]
    ) -> None:
        try:
            self._listening = bind_tcp(listen)
        except OSError as error:
            raise BindError(f"--node-listen {listen}: {error.strerror or error}") from None
        self.address = "{}:{}".format(*self._listening.getsockname()[:2])
        self._identity = Identity(trust)
        self._num_nodes = num_nodes
        self._timeout_s = timeout_s
        self._on_drain = on_drain
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._changed = threading.Condition()
        self._links: dict[int, NodeLink] = {}
        self._last_refusal = ""
        self._is_stopping = False
        self._store_port = 0
        self._facts: Facts = {}
        self._end: Callable[[str, int], None] = lambda reason, exit_code: None

    # -- as the engine sees it ----------------------------------------------------------------------------------------

    def start(self, store_port: int, facts: Facts, end: Callable[[str, int], None]) -> None:
        self._store_port, self._facts, self._end = store_port, facts, end
        self._listening.listen(BACKLOG)
        threading.Thread(target=self._accept, name="node-server", daemon=True).start()

    def wait_joined(self) -> Sequence[RankOutbox]:
        deadline = time.monotonic() + self._timeout_s
        while missing := self._wait(lambda link: link is not None and link.steps is not None, deadline):
            if time.monotonic() >= deadline:
                refused = f"; the last refusal: {self._last_refusal}" if self._last_refusal else ""
                raise NodesError(
                    f"{_names(missing)} of {self._num_nodes} did not join within {self._timeout_s:g} s "
                    f"(--node-timeout-s){refused}; start each with --leader-address and its --node-rank"
                )
            log.info("waiting at %s for %s of %d", self.address, _names(missing), self._num_nodes)
        return [self._links[rank] for rank in range(1, self._num_nodes)]

    def wait_loaded(self, facts: Facts) -> None:
        deadline = time.monotonic() + LOADED_WITHIN_S
        while missing := self._wait(lambda link: link is not None and link.loaded is not None, deadline):
            if time.monotonic() >= deadline:
                raise NodesError(f"{_names(missing)} did not load the model within {LOADED_WITHIN_S:g} s")
            log.info("waiting until %s has loaded the model", _names(missing))
        for link in self._links.values():
            if found := difference(str(link), facts, link.loaded or {}):
                raise NodesError(found)

    def _wait(self, is_done: Callable[[NodeLink | None], bool], deadline: float) -> list[int]:
        """Waits for all nodes, but returns those that are missing after some time, so that they are logged."""
        until = min(deadline, time.monotonic() + LOG_EVERY_S)
        with self._changed:
            self._changed.wait_for(lambda: not self._missing(is_done), until - time.monotonic())
            return self._missing(is_done)

    def _missing(self, is_done: Callable[[NodeLink | None], bool]) -> list[int]:
        return [rank for rank in range(1, self._num_nodes) if not is_done(self._links.get(rank))]

    def stop(self) -> None:
        """Ends all nodes after their last message."""
        self._is_stopping = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts connections
        self._listening.close()
        for link in list(self._links.values()):
            link.stop()

    # -- connections, each in a thread of its own ---------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_stopping:
            try:
                connection, (host, port, *_) = self._listening.accept()
            except OSError as error:
                if not self._is_stopping:
                    log.error("cannot accept nodes at %s: %s", self.address, error)
                    time.sleep(1.0)  # too many open files, for example
                continue
            if not self._handshakes.acquire(blocking=False):
                log.warning("refused %s:%d at --node-listen: %d handshakes are open", host, port, MAX_HANDSHAKES)
                connection.close()
                continue
            threading.Thread(target=self._handshake, args=(connection, f"{host}:{port}"), daemon=True).start()

    def _handshake(self, connection: socket.socket, peer: str) -> None:
        deadline = time.monotonic() + HANDSHAKE_S
        try:
            prepare(connection)
            connection = self._identity.accept(connection, deadline)
            hello = receive_text(connection, deadline)
        except (OSError, ValueError) as error:  # ValueError: TLS files that cannot be read
            log.warning("refused a connection of %s to --node-listen: %s", peer, error)
            connection.close()
            return
        finally:
            self._handshakes.release()
        connection.settimeout(None)
        with suppress(OSError):
            if self._serve(connection, hello, peer):
                return
        connection.close()

    def _serve(self, connection: socket.socket, hello: dict[str, Any], peer: str) -> bool:
        """Answers the first frame of a known worker, then uses the connection until it ends. True: it stays in use."""
        try:
            link = self._find(hello, peer)
        except NodesError as error:
            log.warning("refused node %s (%s): %s", hello.get("node_rank"), peer, error)
            self._last_refusal = str(error)
            send_text(connection, {"refused": str(error)})
            return False
        send_text(connection, {"refused": ""})
        match hello["purpose"]:
            case "reports":
                self._read_reports(connection, link)
            case "steps":
                self._use_for_steps(connection, link)
                return True
            case "store":
                forward(connection, socket.create_connection((HOST, self._store_port)))
        return False

    def _find(self, hello: dict[str, Any], peer: str) -> NodeLink:
        """The node that opened a connection. Raises NodesError if it is refused."""
        rank, session, purpose = (hello.get(name) for name in ("node_rank", "session", "purpose"))
        last = self._num_nodes - 1
        if type(rank) is not int or not 1 <= rank <= last:
            raise NodesError(f"--node-rank {rank!r} is not from 1 to {last}: the leader has --nnodes {last + 1}")
        if not isinstance(session, str) or purpose not in PURPOSES:
            raise NodesError("its first frame has no session or no known purpose")
        if purpose == "reports":
            return self._join(rank, session, peer, hello.get("facts"))
        link = self._links.get(rank)
        if link is None or link.session != session:
            raise NodesError(f"node {rank} has not joined")
        return link

    def _join(self, rank: int, session: str, peer: str, facts: Any) -> NodeLink:
        if not isinstance(facts, dict):
            raise NodesError("its first frame has no facts")
        if found := difference(f"node {rank}", self._facts, facts):
            raise NodesError(found)
        with self._changed:
            other = self._links.get(rank)
            is_retry = other is not None and other.session == session and other.steps is None
            if other and not is_retry:
                raise NodesError(f"--node-rank {rank} is taken by {other.peer}; each node needs its own")
            link = self._links[rank] = NodeLink(rank, session, peer)
        return link

    def _use_for_steps(self, connection: socket.socket, link: NodeLink) -> None:
        with self._changed:
            link.steps = connection
            self._changed.notify_all()
        log.info("%s has joined", link)

    def _read_reports(self, connection: socket.socket, link: NodeLink) -> None:
        """Reads until the connection ends, which is the loss of the node."""
        try:
            while True:
                self._note(link, receive_text(connection))
        except OSError as error:
            lost = error
        with self._changed:
            if link.steps is None:  # it has not joined and tries again, or has done so
                if self._links.get(link.node_rank) is link:
                    del self._links[link.node_rank]
                return
        reason, exit_code = link.end
        if not self._is_stopping:
            self._end(f"{link}: {reason}" if reason else f"{link} is lost: {lost}", exit_code)

    def _note(self, link: NodeLink, report: dict[str, Any]) -> None:
        match report:
            case {"loaded": dict(facts)}:
                with self._changed:
                    link.loaded = facts
                    self._changed.notify_all()
            case {"end": str(reason), "exit_code": int(exit_code)}:
                link.end = reason, exit_code
            case {"drain": True}:
                log.info("%s has to stop, so this worker drains", link)
                self._on_drain()


def _names(ranks: Sequence[int]) -> str:
    return f"node{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
