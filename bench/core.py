#!/usr/bin/env python
"""What the scheduler costs: microseconds per decode step and per admission, with no I/O and no worker.

    python bench/core.py [--repeats 5]

A step is schedule() + update() in steady decode, staggered so that N / block_size rows open a block in each step.
Figures are floors: the lowest of several tenth percentiles of thread CPU time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import time

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import StepOutput, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup, StopCondition

STEPS = 200


def make_scheduler(num_seqs: int, block_size: int, num_workers: int = 1) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(eos_token_ids=frozenset({2}), max_waiting=10_000))
    for i in range(num_workers):
        scheduler.add_worker(
            WorkerCapacity(f"w{i}", 1, num_seqs * 8192 // block_size, block_size, num_seqs, 1 << 20, 8192, 2), 0.0
        )
    return scheduler


def add(scheduler: Scheduler, name: str, prompt: np.ndarray, max_tokens: int = 4000) -> None:
    scheduler.add_group(SequenceGroup(name, prompt, StopCondition(max_tokens, ignore_eos=False)), 0.0)


def step_us(num_seqs: int, block_size: int, repeats: int) -> float:
    """Floor of schedule() + update() with `num_seqs` sequences in steady decode and two steps in flight."""
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(num_seqs, block_size)
    for i in range(num_seqs):
        add(scheduler, str(i), rng.integers(3, 50_000, 512 + i % block_size, dtype=np.uint32))
    in_flight = scheduler.schedule(0.0)
    tokens = np.full(num_seqs, 7, dtype=np.uint32)
    floors = []
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        spent = []
        for _ in range(STEPS):
            batch = in_flight.pop(0)
            answer = StepOutput("w0", batch.step_id, batch.rows, tokens)
            start = time.thread_time_ns()
            scheduler.update(answer, 0.0)
            in_flight += scheduler.schedule(0.0)
            spent.append(time.thread_time_ns() - start)
        floors.append(np.percentile(spent, 10) / 1000)
    return float(min(floors))


def admit_us(cached_tokens: int, repeats: int) -> float:
    """Floor of add_group() + the schedule() that admits it: a prompt of 4,096 tokens, 8 workers, blocks of 16."""
    rng = np.random.default_rng(1)
    floors = []
    for _ in range(repeats):
        scheduler = make_scheduler(16, 16, num_workers=8)
        spent = []
        shared = rng.integers(3, 50_000, cached_tokens, dtype=np.uint32)
        for i in range(30):
            prompt = np.concatenate((shared, rng.integers(3, 50_000, 4096 - cached_tokens, dtype=np.uint32)))
            start = time.thread_time_ns()
            add(scheduler, str(i), prompt, max_tokens=1)
            batches = scheduler.schedule(0.0)
            spent.append(time.thread_time_ns() - start)
            while batches:
                for batch in batches:
                    rows = batch.rows[batch.sample_mask]
                    scheduler.update(StepOutput(batch.worker_id, batch.step_id, rows, rows), 0.0)
                batches = scheduler.schedule(0.0)
        floors.append(np.percentile(spent[1:], 10) / 1000)
    return float(min(floors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="repeats whose lowest figure counts")
    repeats = parser.parse_args().repeats
    figures: dict[str, dict[str, float]] = {"step_us": {}, "step_us_block_256": {}, "admit_us": {}}
    for num_seqs in (1, 32, 256, 1024):
        figures["step_us"][str(num_seqs)] = round(step_us(num_seqs, 16, repeats), 1)
        figures["step_us_block_256"][str(num_seqs)] = round(step_us(num_seqs, 256, repeats), 1)
        print(
            f"N={num_seqs}: {figures['step_us'][str(num_seqs)]} us a step at block 16, "
            f"{figures['step_us_block_256'][str(num_seqs)]} at block 256",
            flush=True,
        )
    figures["admit_us"] = {"cold": round(admit_us(0, repeats), 1), "hit90": round(admit_us(3680, repeats), 1)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
