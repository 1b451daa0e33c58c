"""Carries connections to the store of rank 0, which listens on the loopback interface, to other nodes.

rank 5 -> 127.0.0.1 of its node -> link between the nodes -> 127.0.0.1 of the leader: the store
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

from worker_svc.node_links.frames import PIECE

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
SEND_TIMEOUT_S = 60.0


def pump(first: socket.socket, second: socket.socket) -> None:
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


class StoreDoor:
    """A port of this host's loopback interface. `connect` opens the link for each connection to it."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="store-door", daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                threading.Thread(target=self._serve, args=self._listening.accept()[:1], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            link = self._connect()
        except OSError as error:
            log.error("a rank cannot reach the store of rank 0: %s", error)
            client.close()
            return
        pump(client, link)
