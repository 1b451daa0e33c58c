"""One seed, one run of the whole system: sizes, requests and faults.

python -m tests.sim.system.simulation 1234           run seed 1234; on failure print what led to it
python -m tests.sim.system.simulation 1234 --verbose print its trace
python -m tests.sim.system.simulation 0 500          run seeds 0 to 499 and tell what they covered
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import Counter
from random import Random

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.sequence import StopCondition
from tests.sim.system.processes import Service
from tests.sim.system.world import Setup, World

COMMAND = "python -m tests.sim.system.simulation"


class Simulation:
    """The random driver of a World."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
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
                )
            )
        return Setup(
            capacities=tuple(capacities),
            num_gateways=rng.choice((1, 2, 2)),
            num_schedulers=rng.choice((1, 2, 2)),
            vocab_size=rng.choice((16, 40, 200)),
            eos_token_ids=frozenset(rng.choice(((), (0,)))),
            uses_redis=rng.random() < 0.5,
            step_s=rng.choice((0.01, 0.04, 0.04, 0.3)),
            scheduler_config=SchedulerConfig(watermark=0.0, expected_output_tokens=rng.choice((4, 64))),
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
        wishes: dict[str, float] = {}
        kind = rng.random()
        if kind < 0.15:
            wishes["leaves_at"] = arrives_at + rng.random() * 2.0
        elif kind < 0.25:
            wishes["aborts_at"] = arrives_at + rng.random() * 2.0
        elif kind < 0.32:
            wishes["timeout_s"] = rng.random() * 4.0
        most = min(capacity.max_num_seqs for capacity in self.setup.capacities)
        n = rng.choice((1, 1, 1, min(3, most)))
        self.world.add_request(prompt, stop, n=n, arrives_at=arrives_at, **wishes)

    # -- faults -------------------------------------------------------------------------------------------------------

    async def _operate(self) -> None:
        rng = self.rng
        num_faults = rng.choice((0, 1, 2, 3, 4))
        faults = [
            self._kill_worker,
            self._kill_scheduler,
            self._kill_gateway,
        ]
        times = sorted(rng.random() * rng.choice((1.5, 4.0)) for _ in range(num_faults))
        work = []
        for at in times:
            await asyncio.sleep(max(0.0, at - self.world.now))
            fault = rng.choice(faults)
            self.met[fault.__name__.removeprefix("_")] += 1
            work.append(asyncio.ensure_future(fault()))
        await asyncio.gather(*work)

    async def _kill_and_restart(self, service: Service) -> None:
        if not service.is_up:
            return
        is_silent = self.rng.random() < 0.3
        self.world.note(f"kill {service.name}{' with its host' if is_silent else ''}")
        service.kill(is_silent=is_silent)
        await asyncio.sleep(self.rng.choice((0.05, 0.5, 3.0)))
        self.world.note(f"start {service.name}")
        service.start()

    async def _kill_worker(self) -> None:
        await self._kill_and_restart(self.rng.choice(self.world.workers))

    async def _kill_scheduler(self) -> None:
        await self._kill_and_restart(self.rng.choice(self.world.schedulers))

    async def _kill_gateway(self) -> None:
        await self._kill_and_restart(self.rng.choice(self.world.gateways))

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.world.run(self._operate)

    def transcript(self, last: int = 60) -> str:
        lines = [f"seed {self.seed}: {self.setup}"]
        lines += [f"{at:8.3f} {words}" for at, words in self.world.trace[-last:]]
        return "\n".join(lines)


def run_seed(seed: int) -> Simulation:
    """Run one seed. A failure carries the seed, how to run it again, and the last events."""
    simulation = Simulation(seed)
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
