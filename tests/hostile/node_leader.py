"""The leader of a worker on two hosts, without its model: it sends numbers to node 1 once that has joined.

python -m tests.hostile.node_leader PLANT ADDRESS TOKEN_FILE

PLANT is `none`, or a weakness to show that the attacks find it.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from svc_common.observe.logs import setup_logging
from svc_common.security.trust import Tokens, Trust
from worker_svc.node_links import frames, identity, node_server
from worker_svc.node_links.node_server import NodeServer

FACTS = {"version": "engine-1"}
INTERVAL_S = 0.01
MOST_BYTES = 512 << 20  # a plant must not exhaust the memory of the test machine


def unchecked_proof() -> None:
    """Any proof is accepted."""
    identity.hmac.compare_digest = lambda *proofs: True  # type: ignore[attr-defined]


def same_nonce() -> None:
    """The leader greets every connection with the same nonce."""
    identity.secrets.token_bytes = lambda size: b"\1" * size  # type: ignore[attr-defined]


def announced_memory() -> None:
    """Memory is taken by the announced length of a frame."""
    read = frames.read

    def read_at_once(connection: Any, size: int, deadline: float | None = None) -> bytes:
        memory = b"\1" * min(size, MOST_BYTES)
        found = read(connection, size, deadline)
        del memory
        return found

    frames.read = read_at_once  # type: ignore[assignment]
    frames.MAX_TEXT = 1 << 32


def unhandled() -> None:
    """A purpose that the code does not expect raises KeyError."""
    find = NodeServer._find
    known = dict.fromkeys(node_server.PURPOSES)

    def find_known(self: Any, hello: dict[str, Any], peer: str) -> Any:
        known[str(hello["purpose"])]
        return find(self, hello, peer)

    NodeServer._find = find_known  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    plant.__name__: plant for plant in (unchecked_proof, same_nonce, announced_memory, unhandled)
}


def main() -> None:
    plant, address, token_file = sys.argv[1:]
    setup_logging("worker", "text", "info", instance="leader")
    if plant != "none":
        PLANTS[plant]()
    server = NodeServer(address, Trust("worker", tokens=Tokens(Path(token_file))), 2, 600.0, lambda: None)
    server.start(1, FACTS, lambda reason, exit_code: os._exit(exit_code))
    (node,) = server.wait_joined()
    for number in itertools.count():
        node.send_bytes(number.to_bytes(8, "little"))
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main()
