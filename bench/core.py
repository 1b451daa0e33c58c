#!/usr/bin/env python
"""CPU time of the scheduler: microseconds per decode step and per admission, with no I/O and no worker.

    python bench/core.py [--repeats 5]

A step is everything between a worker's answer and its next step: `update()`, the message for the gateway, `schedule()`,
the message for the worker; in steady decode, staggered so that N / block_size rows open a block in each step.
`step_us_core` is the same without the messages. `step_us_window`: all rows have left a sliding window of 256 tokens, so
they free a block for each one that they take. `step_us_drafts`: all rows speculate with 3 drafts, of which 0 to 3
become tokens. `step_us_churn`: in every step one sequence ends and another, whose
prompt of 64 tokens is new, takes its place. `short_us`: time per request of short requests on one worker, of which 8
begin and 8 end in every step (64 new prompt tokens, one output token), messages included. `admit_us_full` is `admit_us`
with pools full of cached prefixes, as they are after the first minutes, so that each prompt evicts some.
`step_us_short_of_blocks` and `.._rows`: a step of one of 4 workers with 256 rows each, of which 2 end in every step
while 1,000 requests wait (`moves`: and blocks move between the workers), a mean. Other figures are floors: the lowest
of several tenth percentiles of thread CPU time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import time

import numpy as np
from quire.internal.v1 import worker_pb2

from bench.machine import StealMeter, describe
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import WorkerCapacity, split_deltas
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup, StopCondition
from scheduler_svc.gateways import wire
from scheduler_svc.workers import wire as worker_wire
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import BlockMovement

STEPS = 200
NUM_DRAFTS = 3
FILLS_POOLS = 400  # number of prompts that fill the pools; every later prompt evicts blocks
EOS = 2
WINDOW = 256
FENCE = worker_pb2.Fence(worker_epoch=1, scheduler_epoch=1)


def make_scheduler(num_seqs: int, block_size: int, num_workers: int = 1, window: int | None = None) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(eos_token_ids=frozenset({EOS}), max_waiting=10_000))
    for i in range(num_workers):
        num_blocks = num_seqs * 8192 // block_size
        scheduler.add_worker(
            WorkerCapacity(f"w{i}", 1, num_blocks, block_size, num_seqs, 1 << 20, 8192, 2, attention_window=window)
        )
    return scheduler


def add(scheduler: Scheduler, name: str, prompt: np.ndarray, max_tokens: int = 4000) -> None:
    scheduler.add_group(
        SequenceGroup(name, prompt, StopCondition(max_tokens, ignore_eos=False), options=worker_pb2.RowOpen()), 0.0
    )


class SteadyDecode:
    """`num_seqs` sequences in steady decode with two steps in flight; `step` answers the older one."""

    def __init__(self, num_seqs: int, block_size: int, window: int | None = None) -> None:
        self._rng = np.random.default_rng(0)
        self.scheduler = make_scheduler(num_seqs, block_size, window=window)
        for i in range(num_seqs):
            self._add(str(i), 512 + i % block_size)
        self._in_flight = self.scheduler.schedule(0.0)
        self._num_added = num_seqs

    def _add(self, name: str, num_tokens: int) -> None:
        add(self.scheduler, name, self._rng.integers(3, 50_000, num_tokens, dtype=np.uint32))

    def answer_with_drafts(self) -> StepOutput:
        """An answer to the oldest step in which each row has 1 to 4 tokens, as far as the step reserves them."""
        batch = self._in_flight.pop(0)
        most = np.ones_like(batch.rows) if batch.max_query_lens is None else np.maximum(batch.max_query_lens, 1)
        lens = np.minimum(1 + (np.arange(len(most)) + batch.step_id) % 4, most).astype(np.uint32)
        rows, token_ids = batch.rows[batch.sample_mask], np.full(int(lens.sum()), 7, np.uint32)
        wanted = np.full(len(rows), NUM_DRAFTS, np.uint32)
        return StepOutput(batch.step_id, rows, token_ids, worker_id=batch.worker_id, token_lens=lens, draft_lens=wanted)

    def answer(self, ending_row: int | None = None) -> StepOutput:
        """The worker's answer to the oldest step; the row that ends samples EOS."""
        batch = self._in_flight.pop(0)
        rows = batch.rows[batch.sample_mask]
        token_ids = np.full(len(rows), 7, dtype=np.uint32)
        if ending_row is not None:
            token_ids[rows == ending_row] = EOS
        return StepOutput(batch.step_id, rows, token_ids, worker_id=batch.worker_id)

    def replace_one(self) -> None:
        """Add a request for the row that the next answer frees."""
        self._num_added += 1
        self._add(str(self._num_added), 64)

    def step(self, answer: StepOutput, *, has_messages: bool) -> None:
        deltas = self.scheduler.update(answer, 0.0)
        if has_messages:
            for part in split_deltas(deltas).values():
                wire.deltas_to_proto([part])
        batches = self.scheduler.schedule(0.0)
        if has_messages:
            for batch in batches:
                worker_wire.step_batch_to_proto(batch, FENCE)
        self._keep(batches)

    def _keep(self, batches: list[StepBatch]) -> None:
        self._in_flight += batches


def floor_us(spent_ns: list[int]) -> float:
    return float(np.percentile(spent_ns, 10)) / 1000


def step_us(
    num_seqs: int,
    block_size: int,
    repeats: int,
    *,
    has_messages: bool,
    has_churn: bool = False,
    window: int | None = None,
    has_drafts: bool = False,
) -> float:
    """Floor of one step."""
    decode = SteadyDecode(num_seqs, block_size, window)
    floors = []
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        spent = []
        for i in range(STEPS):
            if has_churn:
                decode.replace_one()
            ending_row = i % num_seqs if has_churn else None
            answer = decode.answer_with_drafts() if has_drafts else decode.answer(ending_row)
            start = time.thread_time_ns()
            decode.step(answer, has_messages=has_messages)
            spent.append(time.thread_time_ns() - start)
        floors.append(floor_us(spent))
    return round(min(floors), 1)


def admit_us(cached_tokens: int, repeats: int, *, num_tokens: int = 4096, is_full: bool = False) -> float:
    """Floor of add_group() + the schedule() that admits it: a prompt of `num_tokens`, 8 workers, blocks of 16.

    With `is_full`, each prompt evicts cached blocks of earlier prompts.
    """
    rng = np.random.default_rng(1)
    floors = []
    for _ in range(repeats):
        scheduler = make_scheduler(16, 16, num_workers=8)
        spent = []
        shared = rng.integers(3, 50_000, cached_tokens, dtype=np.uint32)
        num_before = FILLS_POOLS if is_full else 1  # not measured
        for i in range(num_before + 30):
            prompt = np.concatenate((shared, rng.integers(3, 50_000, num_tokens - cached_tokens, dtype=np.uint32)))
            start = time.thread_time_ns()
            add(scheduler, str(i), prompt, max_tokens=1)
            batches = scheduler.schedule(0.0)
            spent.append(time.thread_time_ns() - start)
            answer_all(scheduler, batches)
        floors.append(floor_us(spent[num_before:]))
    return round(min(floors), 1)


class ShortRequests:
    """In each step of one worker, `NUM_ARRIVALS` requests with 64 new prompt tokens and one output token begin and as
    many end. Two steps are in flight.
    """

    NUM_ARRIVALS = 8

    def __init__(self) -> None:
        self.scheduler = make_scheduler(256, 16)
        self._rng = np.random.default_rng(0)
        self._num_added = 0
        self._in_flight: list[StepBatch] = []

    def step(self) -> None:
        """Add requests, answer the oldest step if two are in flight, and send the next one."""
        for _ in range(self.NUM_ARRIVALS):
            self._num_added += 1
            add(self.scheduler, str(self._num_added), self._prompts.pop(), max_tokens=1)
        if len(self._in_flight) > 1:
            batch = self._in_flight.pop(0)
            deltas = self.scheduler.update(
                StepOutput(batch.step_id, batch.rows, batch.rows, worker_id=batch.worker_id), 0.0
            )
            for part in split_deltas(deltas).values():
                wire.deltas_to_proto([part])
        batches = self.scheduler.schedule(0.0)
        for batch in batches:
            worker_wire.step_batch_to_proto(batch, FENCE)
        self._in_flight += batches

    def draw(self) -> None:
        """Draw the prompts of the next step."""
        self._prompts = list(self._rng.integers(3, 50_000, (self.NUM_ARRIVALS, 64), dtype=np.uint32))


def short_us(repeats: int) -> float:
    """Floor per request of `ShortRequests`."""
    requests, floors = ShortRequests(), []
    for _ in range(repeats):
        spent = []
        for _ in range(STEPS):
            requests.draw()
            start = time.thread_time_ns()
            requests.step()
            spent.append(time.thread_time_ns() - start)
        floors.append(floor_us(spent))
    return round(min(floors) / ShortRequests.NUM_ARRIVALS, 1)


class FullWorkers:
    """Workers whose rows, or whose blocks, are all in use while requests wait. In each step of one of them, two rows
    end and two requests arrive.
    """

    NUM_WORKERS, NUM_ROWS, NUM_WAITING, BLOCK_SIZE, BLOCKS_OF_ROW = 4, 256, 1000, 16, 36

    def __init__(self, *, is_short_of_blocks: bool, has_moves: bool = False) -> None:
        self._rng, self._num_added = np.random.default_rng(0), 0
        num_rows = self.NUM_ROWS // (2 if is_short_of_blocks else 1)
        self.scheduler = Scheduler(SchedulerConfig(eos_token_ids=frozenset({EOS}), max_waiting=10_000))
        movement = BlockMovement(b"layout", 1 << 20, can_transfer=True) if has_moves else None
        num_blocks = self.BLOCKS_OF_ROW * (num_rows if is_short_of_blocks else 4 * num_rows)
        for i in range(self.NUM_WORKERS):
            sizes = num_blocks, self.BLOCK_SIZE, self.NUM_ROWS, 8192, 4096
            self.scheduler.add_worker(WorkerCapacity(f"w{i}", 1, *sizes, movement=movement))
        self._batches = {f"w{i}": list[StepBatch]() for i in range(self.NUM_WORKERS)}
        self._add(self.NUM_WORKERS * num_rows + self.NUM_WAITING)
        self._now = 0.0
        self._turn(0.0)
        for _ in range(self.NUM_WORKERS * num_rows):  # until rows end one after the other
            self.step()

    def _add(self, count: int) -> None:
        for prompt in self._rng.integers(3, 50_000, (count, 512), dtype=np.uint32):
            self._num_added += 1
            add(self.scheduler, str(self._num_added), prompt, 512)

    def step(self) -> None:
        """Answer one worker, in which the two oldest rows end, and send it its next step."""
        name = f"w{self._num_added // 2 % self.NUM_WORKERS}"
        batch = self._batches[name].pop(0)
        rows = batch.rows[batch.sample_mask]
        token_ids = np.full(len(rows), 7, dtype=np.uint32)
        oldest = self.scheduler._workers[name].rows.active()[:2]
        token_ids[np.isin(rows, oldest)] = EOS
        self._add(2)
        self._now += 0.02 / self.NUM_WORKERS
        start = time.thread_time_ns()
        self.scheduler.update(StepOutput(batch.step_id, rows, token_ids, worker_id=name), self._now)
        self._turn(self._now)
        self.spent_ns = time.thread_time_ns() - start

    def _turn(self, now: float) -> None:
        for batch in self.scheduler.schedule(now):
            self._batches[batch.worker_id].append(batch)
        for move in self.scheduler.moves.take_moves():
            self.scheduler.end_move(move.move_id, move.num_items, 0.001, now)


def full_step_us(*, is_short_of_blocks: bool, has_moves: bool = False) -> float:
    """Mean of a step of `FullWorkers`, because passes over the queue are not in every step."""
    full, spent = FullWorkers(is_short_of_blocks=is_short_of_blocks, has_moves=has_moves), 0
    for _ in range(STEPS):
        full.step()
        spent += full.spent_ns
    return round(spent / STEPS / 1000, 1)


def answer_all(scheduler: Scheduler, batches: list[StepBatch]) -> None:
    while batches:
        for batch in batches:
            rows = batch.rows[batch.sample_mask]
            scheduler.update(StepOutput(batch.step_id, rows, rows, worker_id=batch.worker_id), 0.0)
        batches = scheduler.schedule(0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats; the lowest figure counts")
    repeats = parser.parse_args().repeats
    meter = StealMeter()
    names = ("step_us", "step_us_block_256", "step_us_core", "step_us_window", "step_us_drafts", "step_us_churn")
    figures: dict[str, dict[str, float]] = {name: {} for name in names}
    for num_seqs in (1, 32, 256, 1024):
        key = str(num_seqs)
        figures["step_us"][key] = step_us(num_seqs, 16, repeats, has_messages=True)
        figures["step_us_block_256"][key] = step_us(num_seqs, 256, repeats, has_messages=True)
        figures["step_us_core"][key] = step_us(num_seqs, 16, repeats, has_messages=False)
        figures["step_us_window"][key] = step_us(num_seqs, 16, repeats, has_messages=True, window=WINDOW)
        figures["step_us_drafts"][key] = step_us(num_seqs, 16, repeats, has_messages=True, has_drafts=True)
        figures["step_us_churn"][key] = step_us(num_seqs, 16, repeats, has_messages=True, has_churn=True)
        at = {name: figures[name][key] for name in names}
        print(
            f"N={num_seqs}: {at['step_us']} us a step at block 16, {at['step_us_block_256']} at block 256, "
            f"{at['step_us_core']} without messages, {at['step_us_window']} with a window, "
            f"{at['step_us_drafts']} with drafts, "
            f"{at['step_us_churn']} with churn",
            flush=True,
        )
    per_sequence = (figures["step_us"]["1024"] - figures["step_us"]["256"]) / (1024 - 256)
    figures["short_us"] = {"1": short_us(repeats)}
    figures["admit_us"] = {
        "cold": admit_us(0, repeats),
        "hit90": admit_us(3680, repeats),
        "128_tokens": admit_us(0, repeats, num_tokens=128),
    }
    figures["admit_us_full"] = {key: admit_us(n, repeats, is_full=True) for key, n in (("cold", 0), ("hit90", 3680))}
    full = {key: {"has_moves": key == "moves"} for key in ("plain", "moves")}
    figures["step_us_short_of_rows"] = {key: full_step_us(is_short_of_blocks=False, **of) for key, of in full.items()}
    figures["step_us_short_of_blocks"] = {key: full_step_us(is_short_of_blocks=True, **of) for key, of in full.items()}
    print(json.dumps({**figures, "us_per_sequence": round(per_sequence, 3), **describe(), "steal_pct": meter.pct()}))


if __name__ == "__main__":
    main()
