"""One seed, one run of the whole system: sizes, requests and faults.

python -m tests.sim.system.simulation 1234           run seed 1234; on failure print the last events
python -m tests.sim.system.simulation 1234 --verbose print its trace
python -m tests.sim.system.simulation 0 500          run seeds 0 to 499 and print what they covered
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from random import Random

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.sequence import StopCondition
from tests.sim.system.network import KEEPALIVE_S
from tests.sim.system.processes import Service
from tests.sim.system.world import Setup, World

COMMAND = "python -m tests.sim.system.simulation"
FAULTS = (
    *("kill",) * 5, *("freeze",) * 4, *("drain",) * 2, *("block_link",) * 3, *("tear_link",) * 3, "slow_step",
    "forge_answer", "fail_row", "hurt_redis",
)  # fmt: skip


class Simulation:
    """The random driver of a World."""

    def __init__(self, seed: int, faults: Sequence[str] = FAULTS) -> None:
        self.seed = seed
        self._kinds = faults
        self.rng = rng = Random(seed)
        self.met: Counter[str] = Counter()
        self.setup = self._choose_setup()
        self.world = World(self.setup, Random(rng.random()))
        self._prefix = self._tokens(40)
        for _ in range(rng.randint(2, 5)):
            self._add_request()

    # -- choices ------------------------------------------------------------------------------------------------------

    def _choose_setup(self) -> Setup:
        rng = self.rng
        block_size = rng.choice((2, 4, 8))
        num_workers = rng.choice((1, 2, 2, 3))
        max_len = 96
        window = Random(f"window {self.seed}").choice((None, None, 11))
        capacities = []
        for i in range(num_workers):
            rows = rng.randint(2, 6)
            capacities.append(
                WorkerCapacity(
                    worker_id=f"w{i}",
                    worker_epoch=1,
                    num_blocks=rng.choice((1, 2, 4)) * max_len // block_size,
                    block_size=block_size,
                    max_num_seqs=rows,
                    max_num_batched_tokens=rows + rng.choice((4, 16, 64)),
                    max_model_len=max_len,
                    pipeline_depth=rng.randint(1, 3),
                    attention_window=window,
                )
            )
        return Setup(
            capacities=tuple(capacities),
            num_gateways=rng.choice((1, 2, 2)),
            num_schedulers=rng.choice((1, 2, 2)),
            busy_move_s=(0.0, 10.0)[self.seed % 2],
            vocab_size=rng.choice((16, 40, 200)),
            eos_token_ids=frozenset(rng.choice(((), (0,)))),
            uses_redis=rng.random() < 0.5,
            step_s=rng.choice((0.01, 0.04, 0.04, 0.3)),
            scheduler_config=SchedulerConfig(
                watermark=0.0,
                expected_output_tokens=rng.choice((4, 64)),
                burst_s=Random(f"burst {self.seed}").choice((0.0, 0.0, 0.05, 1.0)),
                changes_wait_s=Random(f"changes {self.seed}").choice((0.0, 0.02)),
            ),
        )

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.setup.vocab_size) for _ in range(count)]

    def _add_request(self) -> None:
        rng = self.rng
        prompt = self._prefix[: rng.choice((0, 8, 20, 40))] + self._tokens(rng.randint(1, 8))
        stop = StopCondition(
            rng.randint(1, 40), frozenset(self._tokens(rng.choice((0, 0, 1)))), ignore_eos=rng.random() < 0.7
        )
        arrives_at = rng.random() * 1.0
        options: dict[str, float] = {}
        kind = rng.random()
        if kind < 0.15:
            options["leaves_at"] = arrives_at + rng.random() * 2.0
        elif kind < 0.25:
            options["aborts_at"] = arrives_at + rng.random() * 2.0
        elif kind < 0.32:
            options["timeout_s"] = rng.random() * 4.0
        most = min(capacity.max_num_seqs for capacity in self.setup.capacities)
        n = rng.choice((1, 1, 1, min(3, most)))
        self.world.add_request(prompt, stop, n=n, arrives_at=arrives_at, **options)

    # -- faults -------------------------------------------------------------------------------------------------------

    async def _operate(self) -> None:
        """Cause a few faults while requests run. Each one ends by itself: a killed process is restarted, and so on."""
        rng = self.rng
        faults = [rng.choice(self._kinds) for _ in range(rng.choice((0, 1, 2, 3, 4, 6)))]
        times = sorted(rng.random() * rng.choice((1.5, 4.0)) for _ in faults)
        work = []
        for at, fault in zip(times, faults, strict=True):
            await asyncio.sleep(max(0.0, at - self.world.now))
            self.met[fault] += 1
            work.append(asyncio.ensure_future(self._cause(fault)))
        await asyncio.gather(*work)

    async def _cause(self, fault: str) -> None:
        with self.world.disturbed():
            await getattr(self, f"_{fault}")()

    def _any_service(self) -> Service:
        return self.rng.choice(self.world.services)

    async def _kill(self) -> None:
        service = self._any_service()
        if not service.is_up:
            return
        is_silent = self.rng.random() < 0.3
        self.world.note(f"kill {service.name}{' with its host' if is_silent else ''}")
        service.kill(is_silent=is_silent)
        if is_silent:
            self.world.disturb_until(self.world.now + self.setup.heartbeat_timeout_s)
        await self._restart(service)

    async def _restart(self, service: Service) -> None:
        await asyncio.sleep(self.rng.choice((0.05, 0.5, 3.0)))
        if not service.is_up:
            self.world.note(f"start {service.name}")
            service.start()

    async def _freeze(self) -> None:
        service = self._any_service()
        if not service.is_running:
            return
        process = service.process
        for_s = self.rng.choice((0.3, 1.2, 2.5, 6.0))
        self.world.note(f"freeze {service.name} for {for_s} s")
        process.freeze()
        await asyncio.sleep(for_s)
        if not process.is_dead:
            self.world.note(f"thaw {service.name}")
            process.thaw(self.rng)

    async def _drain(self) -> None:
        service = self._any_service()
        if not service.is_running:
            return
        process = service.process
        self.world.note(f"drain {service.name}")
        process.context.copy().run(service.drain, self.rng.choice((0.5, 2.0, 5.0)))
        while not process.is_dead:  # noqa: ASYNC110 - the end of a process has no event
            await asyncio.sleep(0.1)
        self.world.note(f"{service.name} has left")
        await self._restart(service)

    def _any_link(self) -> tuple[str, str]:
        world, kind = self.world, self.rng.random()
        if kind < 0.3:
            return "clients", self.rng.choice(world.gateways).name
        scheduler = self.rng.choice(world.schedulers).name
        return self.rng.choice(world.gateways if kind < 0.6 else world.workers).name, scheduler

    async def _block_link(self) -> None:
        one, other = self._any_link()
        if self.world.network.link(one, other).is_blocked:
            return
        for_s, tears = self.rng.choice((0.2, 1.0, 3.0, 6.0)), self.rng.random() < 0.5
        self.world.note(f"block {one} - {other} for {for_s} s")
        self.world.network.block(one, other)
        await asyncio.sleep(for_s)
        self.world.note(f"heal {one} - {other}{', connections are gone' if tears else ''}")
        self.world.network.heal(one, other, tears=tears)

    async def _tear_link(self) -> None:
        one, other = self._any_link()
        hides_s = self.rng.choice((0.0, 0.0, 0.5, 3.0, KEEPALIVE_S))
        self.world.note(f"tear {one} - {other}; one end learns {hides_s} s later")
        self.world.network.tear(one, other, hides_s=hides_s)
        self.world.disturb_until(self.world.now + hides_s)

    async def _slow_step(self) -> None:
        worker = self.rng.choice(self.world.workers)
        worker.slow_next_s = self.rng.choice((0.5, 2.0, 4.5))
        self.world.note(f"the next step of {worker.name} takes {worker.slow_next_s} s longer")

    async def _forge_answer(self) -> None:
        self.world.forgeries.append(self.rng.choice(("twice", "stale")))

    async def _fail_row(self) -> None:
        self.rng.choice(self.world.workers).symbolic.fail_next = self.rng.choice(("nan", "lost"))

    async def _hurt_redis(self) -> None:
        redis, kind = self.world.redis, self.rng.choice(("flush", "away", "slow", "old"))
        self.world.note(f"redis: {kind}")
        if kind == "flush":
            redis.flush()
        elif kind == "old":
            redis.save()
            await asyncio.sleep(self.rng.random() * 2)
            redis.restart_with_old_data()
        elif kind == "away":
            redis.is_away = True
            await asyncio.sleep(self.rng.random() * 3)
            redis.is_away = False
        else:
            redis.delay_s, before = self.rng.choice((0.05, 0.4, 2.0)), redis.delay_s
            await asyncio.sleep(self.rng.random() * 3)
            redis.delay_s = min(before, redis.delay_s)

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.world.run(self._operate)

    def transcript(self, last: int = 60) -> str:
        lines = [f"seed {self.seed}: {self.setup}"]
        lines += [f"{at:8.3f} {words}" for at, words in self.world.trace[-last:]]
        return "\n".join(lines)


def run_seed(seed: int, faults: Sequence[str] = FAULTS) -> Simulation:
    """Run one seed. A failure carries the seed, how to run it again, and the last events."""
    simulation = Simulation(seed, faults)
    try:
        simulation.run()
    except BaseException as error:
        error.add_note(simulation.transcript())
        error.add_note(f"seed {seed}; run it again: {COMMAND} {seed} --verbose")
        raise
    return simulation


def main(arguments: list[str]) -> None:
    is_verbose = "--verbose" in arguments
    numbers = [int(argument) for argument in arguments if not argument.startswith("-")] or [0, 100]
    first, last = numbers[0], numbers[1] if len(numbers) > 1 else numbers[0] + 1
    gc.disable()
    start, totals = time.process_time(), Counter[str]()
    for seed in range(first, last):
        simulation = run_seed(seed)
        if is_verbose:
            print(simulation.transcript(10**6))
        totals.update(simulation.met)
        totals["virtual seconds"] += round(simulation.world.now)
        totals["messages"] += simulation.world.network.num_messages
        totals["resumes"] += sum(request.num_resumes for request in simulation.world.requests.values())
        totals.update(request.outcome for request in simulation.world.requests.values())
        if seed % 20 == 0:
            gc.collect()
    print(f"{last - first} seeds in {time.process_time() - start:.1f} s of CPU: {dict(totals)}")


if __name__ == "__main__":
    main(sys.argv[1:])
