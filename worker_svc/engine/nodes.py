"""A worker on several hosts, as the engine sees it. Each host is a node; node 0 has rank 0 and is the leader.

The links between nodes are outside the engine (worker_svc/node_links): it opens no connections to other hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Facts = Mapping[str, str]  # settings or results, by name, that must be equal on all nodes


class NodesError(ValueError):
    """The nodes of a worker do not form a worker; the message says why and what to do."""


class RankOutbox(Protocol):
    """Carries messages of rank 0 to ranks; also the sending end of a pipe."""

    def send_bytes(self, message: bytes, /) -> None: ...


class Inbox(Protocol):
    """Receives messages of rank 0; also the receiving end of a pipe."""

    def recv_bytes(self) -> bytes: ...


class Nodes(Protocol):
    """The other nodes, for node 0."""

    def start(self, store_port: int, facts: Facts, end: Callable[[str, int], None]) -> None:
        """Accepts the other nodes from now on. `end` gets the reason and the exit code when one is lost."""

    def wait_joined(self) -> Sequence[RankOutbox]:
        """Waits for all other nodes and returns the way to each. Raises NodesError if one is missing."""

    def wait_loaded(self, facts: Facts) -> None:
        """Waits until all other nodes have loaded. Raises NodesError if one has loaded something else."""


class Leader(Protocol):
    """Node 0, for another node."""

    @property
    def store_port(self) -> int:
        """A port of the loopback interface that leads to the store of rank 0."""

    def recv_bytes(self) -> bytes:
        """The next message. Raises EOFError after the last one, OSError if the leader is lost."""

    def report_loaded(self, facts: Facts) -> None: ...

    def report_end(self, reason: str, exit_code: int) -> None:
        """Tells the leader why this node ends. It does not raise."""


def difference(node: str, expected: Facts, found: Facts) -> str:
    """A sentence about the first fact of a node that is not as expected; empty if all are equal."""
    for name in (*expected, *found):
        here, there = expected.get(name, "none"), found.get(name, "none")
        if here != there:
            return f"{node} has {name} {there}, the leader has {here}; start all nodes with the same flags and version"
    return ""
