"""What operators do to a cluster while it works: pauses, sleep, resets, updates of the weights. Their holds of the
barrier are open over many events, with fetches, loans, drains and losses in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from prefix_index.hashing import extend_digests, root_digest
from scheduler_svc.core.admission.barrier import Hold, HoldMode
from scheduler_svc.core.features.loans import Loan, WantedPrefix
from step_protocol.columns import I64
from tests.sim.cluster import Cluster, Request
from tests.sim.symbolic_worker import SymbolicWorker, Violation


@dataclass(eq=False, slots=True)
class Borrowed:
    """Blocks that a worker keeps for another scheduler."""

    loan: Loan
    worker: SymbolicWorker
    block_ids: I64
    digests: list[bytes]
    num_forgotten: int  # how often prefixes were forgotten before


class Operators:
    """Begins and ends holds of a cluster's barrier at random, and acts when they are reached."""

    def __init__(self, cluster: Cluster, rng: Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._actions: dict[str, Callable[[], bool]] = {}  # by holder: when it is reached; whether it then ends
        self._reached: set[str] = set()
        self._modes: dict[str, HoldMode] = {}
        self.loans: list[Borrowed] = []
        self.met: Counter[str] = Counter()
        cluster.after_schedule = self.after_schedule

    # -- holds --------------------------------------------------------------------------------------------------------

    def begin(self, kind: str = "") -> None:
        """An operator begins something."""
        choices = {"pause": self._pause, "sleep": self._sleep, "reset": self._reset, "update": self._update}
        kind = kind or self._rng.choice([*choices, "reset"])
        mode = self._rng.choice(list(HoldMode)) if kind == "pause" else HoldMode.KEEP
        if kind == "update" and self._rng.random() < 0.3:
            mode = HoldMode.FINISH
        holder = f"{kind} {sum(self.met.values())}"
        self.met[kind] += 1
        self._actions[holder], self._modes[holder] = choices[kind], mode
        self._cluster.trace.append(("hold", holder, mode))
        self._cluster.scheduler.barrier.hold(Hold(holder, mode))

    def interrupt(self) -> None:
        """Pools lose their content before the blocks that are on their way arrive: no step is in flight any more."""
        self.begin(self._rng.choice(("reset", "sleep")))
        while busy := self._cluster.busy_workers():
            self._cluster.answer(busy[0])
        self._cluster.schedule()

    def end(self) -> None:
        """An operator ends a hold, perhaps before it is reached."""
        if self._actions:
            self._release(self._rng.choice(list(self._actions)))

    def end_all(self) -> None:
        """All holds and loans end."""
        for holder in list(self._actions):
            self._release(holder)
        while self.loans:
            self.end_loan()

    def restarted(self) -> None:
        """Another scheduler knows no holds and no loans."""
        self._actions.clear()
        self._reached.clear()
        self.loans.clear()
        for worker in self._cluster.workers.values():
            worker.is_pool_asleep = False

    def _release(self, holder: str) -> None:
        self._cluster.trace.append(("release", holder))
        del self._actions[holder]
        self._reached.discard(holder)
        if not any(name.startswith("sleep") for name in self._reached):
            for worker in self._cluster.workers.values():
                worker.is_pool_asleep = False
        self._cluster.scheduler.barrier.release(holder)

    def after_schedule(self, num_steps: int) -> None:
        """Carry out what is reached, like the step loop."""
        closed = [name for name in self._actions if name in self._reached or self._modes[name] is not HoldMode.FINISH]
        if num_steps and closed:
            raise Violation(f"plans a step during {closed}")
        while reached := self._cluster.scheduler.barrier.take_reached():
            for hold in reached:
                self._check_reached(hold)
            for hold in reached:
                self._act(hold)

    def _check_reached(self, hold: Hold) -> None:
        if hold.holder not in self._actions or hold.holder in self._reached:
            raise Violation(f"{hold.holder} is carried out, but it was released, or reached before")
        if self._cluster.busy_workers():
            raise Violation(f"{hold.holder} is reached while a worker computes")
        if hold.mode is HoldMode.FINISH and any(self._begun()):
            raise Violation(f"{hold.holder} is reached before requests that had begun have ended")
        self._reached.add(hold.holder)

    def _begun(self) -> Iterator[bool]:
        for group in self._cluster.scheduler._requests.groups.values():
            yield from (not (seq.is_finished or seq.is_new) for seq in group.sequences)

    def _act(self, hold: Hold) -> None:
        self._cluster.trace.append(("reached", hold.holder))
        if hold.aborts:
            for request in list(self._cluster.open.values()):
                self._cluster.abort(request)
        if self._actions[hold.holder]():
            self._release(hold.holder)

    # -- what they do -------------------------------------------------------------------------------------------------

    def _pause(self) -> bool:
        return False

    def _reset(self) -> bool:
        self._cluster.reset_prefix_cache()
        return True

    def _sleep(self) -> bool:
        self._cluster.sleep(self._rng)
        return False

    def _update(self) -> bool:
        self._cluster.switch_weights(keeps_kv=self._rng.random() < 0.4)
        for worker in list(self._cluster.workers.values()):
            if (movement := worker.capacity.movement) is not None:
                layout = movement.layout.partition(b"@")[0] + b"@%d" % self._cluster.num_updates
                worker.capacity = replace(worker.capacity, movement=replace(movement, layout=layout))
                self._cluster.tiers.pop(worker.capacity.worker_id, None)
                self._cluster.reconnect(worker)
        return True

    # -- loans --------------------------------------------------------------------------------------------------------

    def lend(self) -> None:
        """Another scheduler asks for the blocks of a prompt, sometimes with digests that occur twice, and perhaps of a
        process that has ended.
        """
        rng, cluster = self._rng, self._cluster
        able = [w for w in cluster.workers.values() if w.capacity.movement and w.capacity.movement.can_transfer]
        requests = [request for request in cluster.requests.values() if not request.inputs]
        if not able or not requests:
            return
        worker, request = rng.choice(able), rng.choice(requests)
        digests, tokens = self._prefix(request)
        if digests and rng.random() < 0.2:
            digests, tokens = digests[:1] * 2, np.concatenate((tokens[: cluster.block_size],) * 2)
        c = worker.capacity
        loan = cluster.scheduler.loans.begin(
            WantedPrefix(c.worker_id, c.worker_epoch, c.movement.layout, digests, tokens)
        )
        cluster.trace.append(("lend", c.worker_id, loan is not None))
        if loan is not None:
            self.met["loan"] += 1
            self.loans.append(
                Borrowed(loan, worker, loan.block_ids.copy(), digests[: len(loan.block_ids)], cluster.num_forgotten)
            )

    def _prefix(self, request: Request) -> tuple[list[bytes], np.ndarray]:
        bs, tokens, digests = self._cluster.block_size, np.array(request.prompt, np.uint32), list[bytes]()
        extend_digests(digests, root_digest(self._cluster.config.root_salt, bs, request.root_key), tokens, bs)
        return digests, tokens[: len(digests) * bs]

    def end_loan(self) -> None:
        """A loan is read, or its time is over: perhaps on a worker that has been lost meanwhile."""
        if self.loans:
            one = self.loans.pop(self._rng.randrange(len(self.loans)))
            self._cluster.trace.append(("end loan", one.worker.capacity.worker_id))
            self._cluster.scheduler.loans.end(one.loan)

    def check_loans(self) -> None:
        """Check that lent blocks are right, and stay until the loan ends unless prefixes were forgotten."""
        for one in self.loans:
            if self._cluster.workers.get(one.worker.capacity.worker_id) is not one.worker:
                continue
            for block, digest in zip(one.block_ids.tolist(), one.digests, strict=True):
                if one.worker.committed.get(block) == digest and one.worker.content[block] != digest:
                    raise Violation(f"block {block} is lent with the wrong content")
                is_kept = one.num_forgotten == self._cluster.num_forgotten and not one.worker.was_reconnected
                if is_kept and not one.worker.holds(block, digest):
                    raise Violation(f"block {block} was given away while it is lent")
