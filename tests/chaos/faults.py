"""Faults of the processes: a seeded plan, and its execution."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire_client import AsyncClient, ModelNotFound

from tests.chaos.cluster import Cluster
from tests.processes.stack import Service

ACTIONS = {
    "gateway": ("kill", "freeze", "restart"),
    "scheduler": ("kill", "freeze", "restart"),
    "worker": ("kill", "freeze", "restart", "drain"),
    "redis": ("kill", "freeze", "flush", "old data"),
}
DOWN_S = (0.3, 3.0)  # seconds that a killed process stays down
FROZEN_S = (0.5, 4.0)
EXIT_DEADLINE_S = 30.0
DRAIN_PATIENCE_S = 10.0
# The fraction of faults that follow another one immediately, so that processes of two kinds are down at the same time.
CLOSE_FRACTION = 0.2
CLOSE_S = 0.3


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault, `gap_s` after the previous one."""

    kind: str
    action: str
    member: int
    gap_s: float
    length_s: float

    @property
    def label(self) -> str:
        return f"{self.kind} {self.action}"


@dataclass(slots=True)
class Strike:
    """A fault that was executed. Times are seconds of the event loop's clock."""

    fault: Fault
    name: str
    began: float
    ended: float = 0.0  # the process runs again; it may still be starting
    recovered: float = 0.0
    exit_code: int | None = None
    exit_s: float | None = None

    @property
    def is_clean(self) -> bool:
        """Whether the process exited with code 0, if the fault was a restart or a drain."""
        return self.fault.action not in ("restart", "drain") or self.exit_code == 0

    def __str__(self) -> str:
        down = f"for {self.ended - self.began:.1f} s" if self.ended else "until the end of the run"
        exit_text = "" if self.exit_s is None else f", exit code {self.exit_code} after {self.exit_s:.1f} s"
        return f"{self.fault.action} of {self.name} {down}{exit_text}"


def make_plan(seed: int, count: int, mean_gap_s: float, sizes: dict[str, int]) -> list[Fault]:
    """`count` faults. All kinds occur equally often, in random order, and so do the actions and members of each kind.

    `sizes`: the number of members of each kind that may fail.
    """
    rng = random.Random(seed)
    kinds = _turns(rng, list(sizes))
    actions = {kind: _turns(rng, list(ACTIONS[kind])) for kind in sizes}
    members = {kind: _turns(rng, list(range(size))) for kind, size in sizes.items()}
    plan = []
    for _ in range(count):
        kind = kinds()
        action = actions[kind]()
        gap_s = CLOSE_S if plan and rng.random() < CLOSE_FRACTION else mean_gap_s * rng.uniform(0.6, 1.4)
        length_s = rng.uniform(*(FROZEN_S if action == "freeze" else DOWN_S))
        plan.append(Fault(kind, action, members[kind](), gap_s, length_s))
    return plan


def _turns(rng: random.Random, values: list[Any]) -> Callable[[], Any]:
    """Yields all values again and again, in a new random order each time."""
    left: list[Any] = []

    def next_value() -> Any:
        if not left:
            left.extend(rng.sample(values, len(values)))
        return left.pop()

    return next_value


class Saboteur:
    """Executes a plan. At most one member of each kind is down at a time; members of different kinds may be."""

    def __init__(self, cluster: Cluster, client: AsyncClient, plan: list[Fault]) -> None:
        self._cluster = cluster
        self._client = client
        self._plan = list(plan)
        self._busy: dict[str, asyncio.Task[None]] = {}
        self.strikes: list[Strike] = []

    async def run(self, until: float) -> None:
        """Execute faults until the plan or the time is over, then wait until all processes have recovered.

        Raises TimeoutError if a process does not recover, and the error of a drain that no scheduler accepts.
        """
        loop = asyncio.get_running_loop()
        try:
            while self._plan:
                await asyncio.sleep(min(self._plan[0].gap_s, max(0.0, until - loop.time())))
                fault = await self._next()
                if loop.time() >= until:
                    break
                self._busy[fault.kind] = asyncio.create_task(self._strike(fault))
            await asyncio.gather(*self._busy.values())
        finally:
            for task in self._busy.values():
                task.cancel()

    async def _next(self) -> Fault:
        """Take the first fault of the plan whose kind has no member down. Raises the error of any failed fault."""
        while True:
            for kind in [kind for kind, task in self._busy.items() if task.done()]:
                self._busy.pop(kind).result()
            for fault in self._plan:
                if fault.kind not in self._busy:
                    self._plan.remove(fault)
                    return fault
            await asyncio.wait(self._busy.values(), return_when=asyncio.FIRST_COMPLETED)

    async def _strike(self, fault: Fault) -> None:
        loop = asyncio.get_running_loop()
        strike = Strike(fault, self._name(fault), loop.time())
        self.strikes.append(strike)
        await (self._on_redis(fault) if fault.kind == "redis" else self._on_service(fault, strike))
        strike.ended = loop.time()
        await self._cluster.wait_recovered(fault.kind, fault.member)
        strike.recovered = loop.time()

    def _name(self, fault: Fault) -> str:
        return "redis" if fault.kind == "redis" else self._cluster.members[fault.kind][fault.member].name

    async def _on_service(self, fault: Fault, strike: Strike) -> None:
        service = self._cluster.members[fault.kind][fault.member]
        if fault.action == "freeze":
            service.signal(signal.SIGSTOP)
            await asyncio.sleep(fault.length_s)
            service.signal(signal.SIGCONT)
            return
        if fault.action == "kill":
            service.signal(signal.SIGKILL)
        elif fault.action == "restart":
            service.signal(signal.SIGTERM)
        else:
            await self._drain(service)
        strike.exit_code = await self._exit_code(service)
        strike.exit_s = asyncio.get_running_loop().time() - strike.began
        await asyncio.sleep(fault.length_s)
        service.start()

    async def _exit_code(self, service: Service) -> int:
        try:
            return await asyncio.to_thread(service.wait, EXIT_DEADLINE_S)
        except TimeoutError:
            await asyncio.to_thread(service.kill)
            return -signal.SIGKILL

    async def _drain(self, worker: Service) -> None:
        """Retry until a scheduler knows the worker (it may be moving between schedulers) or the worker has ended."""
        until = asyncio.get_running_loop().time() + DRAIN_PATIENCE_S
        while worker.is_running:
            try:
                await self._client.drain_worker(worker.name)
                return
            except ModelNotFound:
                if asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(0.2)

    async def _on_redis(self, fault: Fault) -> None:
        redis = self._cluster.redis
        if fault.action == "flush":
            await asyncio.to_thread(redis.flush)
        elif fault.action == "freeze":
            redis.signal(signal.SIGSTOP)
            await asyncio.sleep(fault.length_s)
            redis.signal(signal.SIGCONT)
        elif fault.action == "kill":
            redis.stop()
            await asyncio.sleep(fault.length_s)
            redis.launch()
        else:
            await asyncio.to_thread(redis.save)
            await asyncio.sleep(fault.length_s)
            redis.stop()
            redis.launch(with_saved=True)
