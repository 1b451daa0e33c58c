"""A leader that listens for the other hosts of its worker, and the node that has joined it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from svc_common.security.trust import Tokens, Trust
from tests.hostile import node_attacks
from tests.hostile.attacks import Size
from tests.hostile.node_attacks import Attack
from tests.hostile.node_leader import FACTS
from tests.hostile.target import TOKENS, Port
from tests.hostile.watch import Finding, Watch
from tests.processes.ports import free_port
from tests.processes.stack import Service
from worker_svc.node_links.leader_link import LeaderLink

JOIN_S = 60.0
NOT_JOINED = "node 1 has not joined"  # the answer to a claim of the connections of another process


class Node:
    """Node 1 in this process: it reads the leader's numbers, which must follow each other."""

    def __init__(self, address: str, token_file: Path) -> None:
        self.num_messages = 0
        self.fault = ""
        self._link = LeaderLink(address, Trust("worker", tokens=Tokens(token_file)), 1)
        self._link.join(FACTS, JOIN_S)
        threading.Thread(target=self._read, name="node-1", daemon=True).start()

    def _read(self) -> None:
        try:
            while int.from_bytes(self._link.recv_bytes(), "little") == self.num_messages:
                self.num_messages += 1
            self.fault = f"message {self.num_messages} is missing"
        except (OSError, EOFError) as error:
            self.fault = f"the leader is lost: {error}"

    async def wait_message(self, deadline_s: float = 20.0) -> bool:
        """Whether one more message arrives in time."""
        before, deadline = self.num_messages, time.monotonic() + deadline_s
        while self.num_messages == before and not self.fault and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return self.num_messages > before


class NodeTarget:
    """Owns the leader's process and the node. Leaving the block ends them."""

    def __init__(self, folder: Path, plant: str = "none") -> None:
        tokens = folder / "tokens"
        tokens.write_text(f"worker {TOKENS['worker']}\n")
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "tests.hostile.node_leader", plant, address, str(tokens)]
        self.leader = Service("leader", command, address, folder / f"leader-{plant}.log")
        self.port = Port("leader/nodes", self.leader, address, (), {"": TOKENS["worker"]})
        self._tokens = tokens
        self.node: Node | None = None

    def __enter__(self) -> NodeTarget:
        self.leader.start()
        try:
            self.node = Node(self.leader.address, self._tokens)
        except BaseException:
            self.leader.kill()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.leader.kill()

    async def attack(self, attack: Attack, size: Size, **bounds: float) -> list[Finding]:
        """Run one attack. A weakness is also a lost or late message of the node, and a handshake without an answer."""
        name = attack.__name__
        async with Watch(name, [self.leader], [], **bounds) as watch:  # type: ignore[arg-type]
            try:
                found = await attack(self.port, size)
            except OSError as error:
                found = [f"no connection: {type(error).__name__}: {error}"]
            found += await self._effects()
        return [*(Finding(name, self.port.name, what) for what in found), *watch.findings]

    async def _effects(self) -> Sequence[str]:
        found = []
        try:
            answer = await node_attacks.probe(self.port)
        except OSError as error:  # also TimeoutError
            answer = f"{type(error).__name__}: {error}"
        if answer != NOT_JOINED:
            found.append(f"a handshake got {answer}")
        if self.node is not None and not await self.node.wait_message():
            found.append(f"node 1 gets no messages: {self.node.fault or 'none arrives'}")
        return found
