"""Carries connections to the store of rank 0, which listens on the loopback interface, to other nodes.

rank 5 -> 127.0.0.1 of its node -> link between the nodes -> 127.0.0.1 of the leader: the store
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from worker_svc.engine.nodes import NodesError
from worker_svc.node_links.frames import PIECE

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
SEND_TIMEOUT_S = 60.0


def forward(first: socket.socket, second: socket.socket) -> None:
    """Copies bytes between two connections until one ends, and closes both."""
    with first, second, selectors.DefaultSelector() as selector, suppress(OSError):
        selector.register(first, selectors.EVENT_READ, second)
        selector.register(second, selectors.EVENT_READ, first)
        while all(_copy(key.fileobj, key.data) for key, _ in selector.select()):  # type: ignore[arg-type]
            pass


def _copy(source: socket.socket, target: socket.socket) -> bool:
    """Copies all bytes that have arrived. False if the connection has ended.

    TLS may have decrypted more than one read returns, or may have received no content at all, so it reads until a read
    would block.
    """
    source.settimeout(0.0)
    while True:
        try:
            data = source.recv(PIECE)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        if not data:
            return False
        target.settimeout(SEND_TIMEOUT_S)
        target.sendall(data)


class StoreProxy:
    """A port of this host's loopback interface. `connect` opens the link for each connection to it."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="store-proxy", daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while self._listening.fileno() >= 0:  # until it is closed
            try:
                client, _ = self._listening.accept()
            except OSError as error:
                if self._listening.fileno() >= 0:
                    log.error("cannot accept connections to the store of rank 0: %s", error)
                    time.sleep(1.0)  # too many open files, for example
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            link = self._connect()
        except (OSError, NodesError) as error:
            log.error("a rank cannot reach the store of rank 0: %s", error)
            client.close()
            return
        forward(client, link)
