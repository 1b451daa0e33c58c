#!/usr/bin/env python
"""Scheduler scale-out: the requests that two schedulers can serve, compared with one.

    make bench-replicas
    python bench/replicas.py [--requests 1500] [--concurrency 64] [--workers 8] [--rounds 3]

Real services: one gateway, one or two schedulers, and workers whose executor is simulated with steps of 20 ms. Before
the load, the workers have spread over the schedulers. `us` is processor time per request, for each process. The busiest
scheduler limits the rate, so `scale_out` is its `us` with one scheduler divided by its `us` with two: the ratio of
requests per second if each scheduler has a core. On a machine that is too busy for the load, requests/s fall and `us`
rises, because steps carry fewer rows. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import quire_client
from quire_client.demo import demo_model_dir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.machine import Figures, describe, quiet
from bench.short_requests import ClientProcess, best, pid_of
from tests.processes.stack import Stack, num_ready

WORKER_FLAGS = ("--executor", "sim", "--sim-step-ms", "20", "--max-num-seqs", "64", "--num-blocks", "8192")
NUM_OUTPUT = 32
SPREAD_DEADLINE_S = 60.0


@contextmanager
def services(num_schedulers: int, num_workers: int) -> Iterator[tuple[str, dict[str, int]]]:
    """A running stack whose workers have spread: the gateway's address, and process ids of gateway and schedulers."""
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder)) as stack:
        first, *others = [stack.start_scheduler() for _ in range(num_schedulers)]
        flags = [word for scheduler in others for word in ("--scheduler", scheduler.address)]
        for _ in range(num_workers):
            stack.start_worker(first, Path(demo_model_dir()), *WORKER_FLAGS, *flags)
        gateway = stack.start_gateway(first, *others)
        gateway.wait_ready()
        wait_spread(gateway.address, [num_workers // num_schedulers] * num_schedulers)
        yield gateway.address, {service.name: pid_of(service) for service in (gateway, first, *others)}


def wait_spread(address: str, expected: list[int]) -> None:
    """Wait until each scheduler has its share of the workers."""
    deadline = time.monotonic() + SPREAD_DEADLINE_S
    with quire_client.Client.connect(address) as client:
        while [num_ready(scheduler) for scheduler in client.status().schedulers] != expected:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the workers have not spread after {SPREAD_DEADLINE_S:g} s: {client.status()}")
            time.sleep(0.2)


def measure(num_schedulers: int, args: argparse.Namespace) -> Figures:
    with services(num_schedulers, args.workers) as (address, pids):
        client = ClientProcess(address)
        load = {"concurrency": args.concurrency, "num_output": NUM_OUTPUT, "is_cached": False}
        try:
            client.run(pids, count=500, **load)  # warm up
            return best([quiet(partial(client.run, pids, count=args.requests, **load)) for _ in range(args.rounds)])
        finally:
            client.close()


def busiest_us(figures: Figures) -> float:
    """Processor time per request of the busiest scheduler."""
    return max(value for name, value in figures["us"].items() if name.startswith("scheduler"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500, help="requests of each load")
    parser.add_argument("--concurrency", type=int, default=64, help="open requests")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(describe(), flush=True)
    figures = {}
    for num_schedulers in (1, 2):
        figures[f"schedulers_{num_schedulers}"] = found = measure(num_schedulers, args)
        print(f"  {num_schedulers} schedulers: {json.dumps(found)}", flush=True)
    scale_out = busiest_us(figures["schedulers_1"]) / busiest_us(figures["schedulers_2"])
    print(json.dumps({"scale_out": round(scale_out, 2), **figures}))


if __name__ == "__main__":
    main()
