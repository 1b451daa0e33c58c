#!/usr/bin/env python
"""The quality of placement and admission order: the real core in a simulated cluster on virtual time.

    python bench/cluster.py [--seconds 60] [--speed 1] [--workloads chat,templates,agents]

Eight workers (`sessions`: three; `mix`: four, of which one is slow) with a linear service model (seconds per
step = base + per prefill token + per row) serve generated workloads under several policies. Requests arrive at the
times of their workload, even if the cluster is behind. The last line is one JSON object:

    {"chat": {"ours": {"hit": .., "ttft_p50_s": .., "ttft_p90_s": ..}, .., "hit_of_pooled": .., "p90_of_least": ..}, ..}

`hit` is the fraction of all prompt tokens that came from a cache, `place_us` the thread CPU time of the passes over the
queue per request, admissions included, `most_waiting` the longest queue: `--speed 10` lets the same requests arrive ten
times as fast.
`pooled` is one imaginary worker with the speed and memory of all workers and a plain LRU cache: its hit rate is the
reference; its times cannot be reached.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.admission.placement import Placement, WorkerChoice
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import Deltas, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QueueEntry, SequenceGroup, StopCondition
from scheduler_svc.core.waiting_queue import WaitingQueue
from step_protocol.columns import U32
from step_protocol.messages import StepBatch, StepOutput

Rng = np.random.Generator

NUM_WORKERS = 8
BLOCK_SIZE = 32
VOCAB = 1 << 31
PLAIN = {"aging_tokens_per_s": float("inf"), "max_bypass": 1 << 30, "reuse_bonus": 0.0}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload. Its answer is known, so that later turns can contain it."""

    at_s: float
    prompt: U32
    output: U32
    conversation: int = 0  # its client says of which conversation it is a turn


@dataclass(frozen=True, slots=True)
class Service:
    """Duration of a step on one worker."""

    base_s: float = 0.008
    prefill_token_s: float = 50e-6  # 20,000 tokens per second
    row_s: float = 20e-6

    def slowed(self, factor: float) -> Service:
        """A service that takes this many times as long."""
        return Service(factor * self.base_s, factor * self.prefill_token_s, factor * self.row_s)

    def step_s(self, batch: StepBatch) -> float:
        prefill = int(batch.query_lens[batch.query_lens > 1].sum())
        return self.base_s + self.prefill_token_s * prefill + self.row_s * len(batch.rows)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and the sizes of the workers that serve them."""

    arrivals: list[Arrival]
    num_blocks: int  # per worker
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_workers: int = NUM_WORKERS
    slowness: dict[int, float] = field(default_factory=dict)  # factors of the slow workers, by position


# -- workloads ---------------------------------------------------------------------------------------------------------


def tokens(rng: Rng, count: float) -> U32:
    return rng.integers(3, VOCAB, max(1, int(count)), dtype=np.uint32)


def starts(rng: Rng, per_s: float, seconds: float) -> Iterator[float]:
    """Start times of a Poisson process."""
    at = rng.exponential(1 / per_s)
    while at < seconds:
        yield at
        at += rng.exponential(1 / per_s)


def conversation(
    rng: Rng, at_s: float, history: U32, num_turns: int, message: float, answer: float, think_s: float
) -> Iterator[Arrival]:
    """The requests of a conversation. Each turn contains all earlier turns."""
    for _ in range(num_turns):
        history = np.concatenate((history, tokens(rng, rng.lognormal(np.log(message), 0.8))))
        output = tokens(rng, 1 + rng.exponential(answer))
        yield Arrival(at_s, history, output)
        history = np.concatenate((history, output))
        at_s += 1 + rng.exponential(think_s)


def chat(seconds: float) -> Workload:
    """Multi-turn chat: growing histories, long pauses, a short system prompt in common."""
    rng = np.random.default_rng(1)
    system = tokens(rng, 64)
    arrivals = [
        arrival
        for at in starts(rng, 48.0, seconds)
        for arrival in conversation(rng, at, system, int(rng.geometric(0.25)), 450, 40, 15.0)
    ]
    return Workload(in_order(arrivals, seconds), num_blocks=4200)


def templates(seconds: float) -> Workload:
    """Hot templates: long common prefixes, a few of them requested all the time, most of them rarely."""
    rng = np.random.default_rng(2)
    hot = [tokens(rng, rng.uniform(500, 3000)) for _ in range(400)]
    weights = 1 / np.arange(1, len(hot) + 1) ** 0.9
    arrivals = []
    for at in starts(rng, 75.0, seconds):
        template = hot[int(rng.choice(len(hot), p=weights / weights.sum()))]
        prompt = np.concatenate((template, tokens(rng, rng.lognormal(np.log(500), 0.8))))
        arrivals.append(Arrival(at, prompt, tokens(rng, 1 + rng.exponential(30))))
    return Workload(arrivals, num_blocks=1600)


def agents(seconds: float) -> Workload:
    """Coding agents: a few system prompts; long contexts that grow in many quick steps."""
    rng = np.random.default_rng(3)
    systems = [tokens(rng, 2000) for _ in range(3)]
    arrivals = []
    for at in starts(rng, 2.0, seconds):
        context = np.concatenate((systems[int(rng.integers(3))], tokens(rng, rng.lognormal(np.log(6000), 0.8))))
        arrivals += conversation(rng, at, context, int(rng.geometric(0.06)), 500, 40, 3.0)
    return Workload(in_order(arrivals, seconds), num_blocks=4000)


def sessions(seconds: float, per_s: float = 0.8) -> Workload:
    """Coding agents as in published traces, with an eighth of their lengths: a median of 43 turns, 55 tokens each,
    contexts up to 30,000 tokens; 86 % of the turns follow within a second, 5 % after 10 s to minutes; in 44 % of the
    sessions a subagent with its own context does a part.
    """
    rng = np.random.default_rng(5)
    systems = [tokens(rng, 2500) for _ in range(3)]
    arrivals: list[Arrival] = []
    for at in starts(rng, per_s, seconds):
        context = np.concatenate((systems[int(rng.integers(3))], tokens(rng, rng.lognormal(np.log(300), 0.8))))
        turns = list(agent(rng, at, context, int(rng.lognormal(np.log(43), 0.6))))
        if rng.random() < 0.44:
            task = np.concatenate((systems[int(rng.integers(3))], tokens(rng, 500)))
            arrivals += agent(rng, turns[len(turns) // 2].at_s, task, int(rng.lognormal(np.log(10), 0.6)))
        arrivals += turns
    return Workload(in_order(arrivals, seconds), num_blocks=6000, num_workers=3)


def agent(rng: Rng, at_s: float, context: U32, num_turns: int) -> Iterator[Arrival]:
    """The turns of one agent. Results of tools are long now and then."""
    conversation = crc32(context.tobytes())
    for _ in range(max(1, num_turns)):
        output = tokens(rng, 1 + rng.exponential(55))
        yield Arrival(at_s, context, output, conversation=conversation)
        context = np.concatenate((context, output, tokens(rng, min(4000, rng.lognormal(np.log(180), 1.2)))))
        kind = rng.random()
        pause = rng.uniform(0.05, 1.0) if kind < 0.86 else rng.uniform(1, 10) if kind < 0.95 else rng.uniform(10, 120)
        at_s += 0.012 * len(output) + 0.2 + pause  # an answer takes about this time


def mix(seed: int, seconds: float, num_slow: int = 0) -> Workload:
    """Short cold requests beside long answers and a few templates, at rates drawn from the seed, on four workers."""
    rng = np.random.default_rng(seed)
    templates_ = [tokens(rng, rng.uniform(300, 2000)) for _ in range(6)]
    kinds = [  # requests per s, prompt, answer
        (rng.uniform(4, 12), lambda: tokens(rng, rng.uniform(20, 300)), rng.uniform(20, 200)),
        (rng.uniform(0.5, 2), lambda: tokens(rng, rng.uniform(20, 300)), rng.uniform(400, 1500)),
        (rng.uniform(1, 4), lambda: np.concatenate((templates_[int(rng.integers(6))], tokens(rng, 60))), 100),
    ]
    arrivals = [
        Arrival(at, prompt(), tokens(rng, 1 + rng.exponential(answer)))
        for per_s, prompt, answer in kinds
        for at in starts(rng, per_s, seconds)
    ]
    slowness = dict.fromkeys(range(num_slow), 10.0)
    return Workload(in_order(arrivals, seconds), num_blocks=4000, num_workers=4, slowness=slowness)


def bursts(rng: Rng, per_s: float, seconds: float) -> Iterator[float]:
    """Start times in bursts: gaps from a Gamma distribution with a coefficient of variation of 2."""
    at = 0.0
    while (at := at + rng.gamma(0.25, 4 / per_s)) < seconds:
        yield at


def conversations(seconds: float) -> Workload:
    """Shaped like the conversation trace of Mooncake: bursts of long prompts with a mean of about 12,000 tokens, a
    quarter of them cached, answers with a mean of 340 tokens.
    """
    rng = np.random.default_rng(4)
    system = tokens(rng, 500)
    arrivals = []
    for at in bursts(rng, 4.0, seconds):
        context = np.concatenate((system, tokens(rng, min(60_000, rng.lognormal(np.log(5500), 1.1)))))
        arrivals += conversation(rng, at, context, int(rng.geometric(0.6)), 700, 340, 20.0)
    return Workload(in_order(arrivals, seconds), num_blocks=16_384, max_num_batched_tokens=8192)


WORKLOADS: dict[str, Callable[[float], Workload]] = {
    "chat": chat, "templates": templates, "agents": agents, "conversations": conversations, "sessions": sessions,
    "mix": lambda seconds: mix(0, seconds, num_slow=1),
}  # fmt: skip


def in_order(arrivals: list[Arrival], seconds: float) -> list[Arrival]:
    return sorted((a for a in arrivals if a.at_s < seconds), key=lambda a: a.at_s)


def faster(workload: Workload, speed: float) -> Workload:
    """The same requests, `speed` times as fast."""
    return replace(workload, arrivals=[replace(arrival, at_s=arrival.at_s / speed) for arrival in workload.arrivals])


# -- policies ----------------------------------------------------------------------------------------------------------


class BoundOnArrival(Placement):
    """The policy of routers in front of engines: a request is assigned on arrival and waits in that worker's queue."""

    def __init__(self, config: SchedulerConfig, pick: Callable[[list[int]], int]) -> None:
        super().__init__(config)
        self._pick = pick
        self._bound: dict[int, int] = {}  # handle -> position
        self._num_open: list[int] = []

    def look_up_cached(self, entry: QueueEntry, now: float) -> None:
        self._num_open = self._num_open or [0] * len(self._workers)
        i = self._pick(self._num_open)
        self._bound[entry.seq.group.handle] = i
        self._num_open[i] += 1

    def end(self, handle: int) -> None:
        self._num_open[self._bound[handle]] -= 1

    def place(self, entry: QueueEntry, now: float, tokens_per_s: float | None) -> WorkerChoice:
        self._update_cached(entry, now)
        i = self._bound[entry.seq.group.handle]
        has_room = bool(self._room(entry)[i])
        if has_room:
            self._count_in(i, entry.seq.data.num_tokens, 1)
        return WorkerChoice(self._workers[i], has_room, has_room and i in self._ready, not has_room)


class LeastWork(Placement):
    """Late binding to the worker that would end the sequence first, which knows each answer and each worker's speed."""

    def __init__(self, config: SchedulerConfig, workload: Workload) -> None:
        super().__init__(config)
        self._lengths = [len(arrival.output) for arrival in workload.arrivals]
        self._slowness = [workload.slowness.get(i, 1.0) for i in range(workload.num_workers)]

    def place(self, entry: QueueEntry, now: float, tokens_per_s: float | None) -> WorkerChoice:
        self._update_cached(entry, now)
        room, service = self._room(entry), Service()
        prefill_s = service.prefill_token_s * (self._load + entry.uncached_at)
        left = self._lengths[entry.seq.group.handle] - len(entry.seq.data.output)
        rows = np.array([worker.rows.num_used for worker in self._workers])
        work_s = (prefill_s + left * (service.base_s + service.row_s * rows)) * self._slowness
        i = int(np.where(room, work_s, np.inf).argmin() if room.any() else work_s.argmin())
        self._count_in(i, int(entry.uncached_at[i]), entry.num_rows)
        return WorkerChoice(self._workers[i], bool(room[i]), bool(room[i] and i in self._ready), False)


class Policy:
    """A placement policy: makes its scheduler. `is_pooled`: runs on one pooled worker."""

    is_pooled = False
    knows_sessions = True

    def make(self, config: SchedulerConfig) -> Scheduler:
        return Scheduler(config)

    def end(self, handle: int) -> None:
        """A request has ended."""


class LeastWorkPolicy(Policy):
    knows_sessions = False

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def make(self, config: SchedulerConfig) -> Scheduler:
        return Scheduler(config, LeastWork(config, self._workload))


class Pooled(Policy):
    is_pooled = True
    knows_sessions = False

    def make(self, config: SchedulerConfig) -> Scheduler:
        return Scheduler(replace(config, **PLAIN))


class Router(Policy):
    knows_sessions = False

    def __init__(self, pick: Callable[[list[int]], int]) -> None:
        self._pick = pick

    def make(self, config: SchedulerConfig) -> Scheduler:
        config = replace(config, **PLAIN)
        self._placement = BoundOnArrival(config, self._pick)
        return Scheduler(config, self._placement)

    def end(self, handle: int) -> None:
        self._placement.end(handle)


def round_robin() -> Callable[[list[int]], int]:
    turns = iter(range(1 << 62))
    return lambda num_open: next(turns) % len(num_open)


def least_requests(num_open: list[int]) -> int:
    return min(range(len(num_open)), key=num_open.__getitem__)


def policies(workload: Workload) -> dict[str, Policy]:
    return {
        "ours": Policy(),
        "least_work": LeastWorkPolicy(workload),
        "least_requests": Router(least_requests),
        "round_robin": Router(round_robin()),
        "pooled": Pooled(),
    }


# -- the simulation ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Worker:
    """Executes steps one after the other; knows which request a row belongs to."""

    capacity: WorkerCapacity
    service: Service
    free_at: float = 0.0
    queue: deque[StepOutput] = field(default_factory=deque)
    handle_of_row: npt.NDArray[np.int64] = field(init=False)
    position_of_row: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.handle_of_row = np.zeros(self.capacity.max_num_seqs, dtype=np.int64)
        self.position_of_row = np.zeros(self.capacity.max_num_seqs, dtype=np.int64)

    def send(self, batch: StepBatch, outputs: U32, now: float) -> float:
        """Take a step; returns the time of its answer."""
        for opened in batch.opens:
            self.handle_of_row[opened.row] = opened.group.handle
            self.position_of_row[opened.row] = len(opened.token_ids) - opened.prompt_len
        rows = batch.rows[batch.sample_mask]
        answer = outputs[self.handle_of_row[rows], self.position_of_row[rows]]
        self.position_of_row[rows] += 1
        self.queue.append(StepOutput(batch.step_id, rows, answer, worker_id=batch.worker_id))
        self.free_at = max(now, self.free_at) + self.service.step_s(batch)
        return self.free_at


class PassMeter:
    """Processor time of a scheduler's passes over the queue, and the longest queue."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.spent_ns = self.most_waiting = 0
        self._assign = scheduler._placement.assign
        vars(scheduler._placement)["assign"] = self._measure

    def _measure(self, waiting: WaitingQueue, *args: Any, **options: Any) -> dict[str, list[QueueEntry]]:
        self.most_waiting = max(self.most_waiting, waiting.num_schedulable)
        start = time.thread_time_ns()
        placed = self._assign(waiting, *args, **options)
        self.spent_ns += time.thread_time_ns() - start
        return placed


class Cluster:
    """One workload under one policy."""

    def __init__(self, workload: Workload, policy: Policy, config: SchedulerConfig) -> None:
        self._arrivals = workload.arrivals
        self._policy = policy
        self._scheduler = policy.make(config)
        self._passes = PassMeter(self._scheduler)
        self._workers = {c.worker_id: Worker(c, s) for c, s in self._machines(workload, policy.is_pooled)}
        for worker in self._workers.values():
            self._scheduler.add_worker(worker.capacity)
        longest = max(len(a.output) for a in self._arrivals)
        self._outputs = np.zeros((len(self._arrivals), longest), dtype=np.uint32)
        for i, arrival in enumerate(self._arrivals):
            self._outputs[i, : len(arrival.output)] = arrival.output
        self.ttft_s = np.full(len(self._arrivals), np.nan)
        self.end_s = np.full(len(self._arrivals), np.nan)  # from arrival to the last token
        self.num_steps = 0
        self._answers: list[tuple[float, int, str]] = []  # time, number, worker id

    def _machines(self, workload: Workload, is_pooled: bool) -> Iterator[tuple[WorkerCapacity, Service]]:
        longest = max(len(a.prompt) + len(a.output) for a in workload.arrivals)
        factor, service = workload.num_workers if is_pooled else 1, Service()
        service = replace(service, prefill_token_s=service.prefill_token_s / factor, row_s=service.row_s / factor)
        for i in range(workload.num_workers // factor):
            sizes = (workload.num_blocks, workload.max_num_seqs, workload.max_num_batched_tokens)
            blocks, rows, budget = (size * factor for size in sizes)
            yield (
                WorkerCapacity(f"w{i}", 1, blocks, BLOCK_SIZE, rows, budget, longest),
                service.slowed(workload.slowness.get(i, 1.0)),
            )

    def run(self) -> dict[str, float]:
        """Run all requests to the end."""
        coming = deque(enumerate(self._arrivals))
        while coming or self._answers:
            now = min(coming[0][1].at_s if coming else np.inf, self._answers[0][0] if self._answers else np.inf)
            while self._answers and self._answers[0][0] <= now:
                self._absorb(self._answer(heapq.heappop(self._answers)[2], now), now)
            while coming and coming[0][1].at_s <= now:
                self._add(*coming.popleft())
            for batch in self._scheduler.schedule(now):
                self._send(batch, now)
            self._scheduler.take_prefix_events()
        stats = self._scheduler.stats()
        p50, p90, p95 = np.percentile(self.ttft_s, (50, 90, 95))
        return {
            "hit": round(stats.counts.prefix_cache_hits / stats.counts.prefix_cache_queries, 4),
            "ttft_p50_s": round(float(p50), 3),
            "ttft_p90_s": round(float(p90), 3),
            "ttft_p95_s": round(float(p95), 3),
            "ttft_mean_s": round(float(self.ttft_s.mean()), 3),
            "end_mean_s": round(float(self.end_s.mean()), 3),
            "end_p99_s": round(float(np.percentile(self.end_s, 99)), 3),
            "place_us": round(self._passes.spent_ns / 1000 / len(self._arrivals), 1),
            "most_waiting": self._passes.most_waiting,
        }

    def _add(self, handle: int, arrival: Arrival) -> None:
        stop = StopCondition(len(arrival.output), ignore_eos=True)
        conversation = arrival.conversation if self._policy.knows_sessions else 0
        group = SequenceGroup(str(handle), arrival.prompt, stop, handle=handle, conversation=conversation)
        self._scheduler.add_group(group, arrival.at_s)

    def _send(self, batch: StepBatch, now: float) -> None:
        self.num_steps += 1
        at = self._workers[batch.worker_id].send(batch, self._outputs, now)
        heapq.heappush(self._answers, (at, self.num_steps, batch.worker_id))

    def _answer(self, worker_id: str, now: float) -> Deltas:
        return self._scheduler.update(self._workers[worker_id].queue.popleft(), now)

    def _absorb(self, deltas: Deltas, now: float) -> None:
        for handle in deltas.handles[deltas.offsets == 0].tolist():
            self.ttft_s[handle] = now - self._arrivals[handle].at_s
        for finished in deltas.finished:
            handle = finished.group.handle
            self.end_s[handle] = now - self._arrivals[handle].at_s
            self._policy.end(handle)


CONFIG = SchedulerConfig(max_waiting=1 << 20, max_waiting_tokens=1 << 40, expected_output_tokens=32)


def compare(workload: Workload, names: list[str]) -> dict[str, dict[str, float]]:
    """Figures of the workload under each of these policies."""
    figures = {}
    for name in names:
        start = time.process_time()
        cluster = Cluster(workload, policies(workload)[name], CONFIG)
        figures[name] = cluster.run()
        spent = time.process_time() - start
        print(f"  {name:15} {figures[name]}  [{cluster.num_steps} steps, {spent:.0f} s of CPU]", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of arrivals, in virtual time")
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals per time, as a multiple of the workload's")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma separated")
    parser.add_argument("--policies", default=",".join(policies(Workload([], 0))), help="comma separated")
    args = parser.parse_args()
    figures: dict[str, dict[str, object]] = {}
    for name in args.workloads.split(","):
        workload = faster(WORKLOADS[name](args.seconds), args.speed)
        print(f"{name}: {len(workload.arrivals)} requests", flush=True)
        results = compare(workload, args.policies.split(","))
        figures[name] = {**results}
        if {"ours", "pooled", "least_requests"} <= results.keys():
            ours, least = results["ours"], results["least_requests"]
            figures[name]["hit_of_pooled"] = round(ours["hit"] / results["pooled"]["hit"], 3)
            figures[name]["p90_of_least"] = round(ours["ttft_p90_s"] / least["ttft_p90_s"], 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
