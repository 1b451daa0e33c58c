"""The scheduler under arrivals, steps, aborts and losses chosen by Hypothesis, which also shrinks failing examples.

Workers and gateways are those of the simulation: each rule ends with all their checks and the core's own.
"""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequence import StopCondition
from tests.builders import make_capacity
from tests.sim.cluster import ROOT_SALT, Cluster

MAX_MODEL_LEN = 20
VOCAB = 6
EOS = frozenset({0})


class SchedulerMachine(RuleBasedStateMachine):
    """A cluster of up to two workers; `teardown` lets all requests end and checks for leaks."""

    @initialize(
        block_size=st.sampled_from((1, 2, 4)),
        watermark=st.sampled_from((0.0, 0.1)),
        aging_s=st.sampled_from((0.0, 5.0)),
        expected=st.sampled_from((1, 100)),
    )
    def start(self, block_size: int, watermark: float, aging_s: float, expected: int) -> None:
        config = SchedulerConfig(
            watermark=watermark,
            aging_s=aging_s,
            expected_output_tokens=expected,
            eos_token_ids=EOS,
            root_salt=ROOT_SALT,
            worker_patience_s=math.inf,  # requests wait for a worker to join, however long the machine loses all
        )
        self.cluster = Cluster(config, block_size=block_size, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB)
        self.num_joined = 0

    @rule(
        spare_blocks=st.integers(0, 12),
        rows=st.integers(1, 4),
        budget=st.integers(0, 12),
        depth=st.integers(1, 3),
        is_lazy=st.booleans(),
    )
    @precondition(lambda self: len(self.cluster.workers) < 2)
    def join(self, spare_blocks: int, rows: int, budget: int, depth: int, is_lazy: bool) -> None:
        self.num_joined += 1
        bs = self.cluster.block_size
        capacity = make_capacity(
            "b" if "a" in self.cluster.workers else "a",
            num_blocks=-(-MAX_MODEL_LEN // bs) + spare_blocks,
            block_size=bs,
            max_num_seqs=rows,
            max_num_batched_tokens=rows + budget,
            max_model_len=MAX_MODEL_LEN,
            pipeline_depth=depth,
            worker_epoch=self.num_joined,
        )
        self.cluster.join(capacity, is_lazy=is_lazy)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN),
        max_tokens=st.integers(0, MAX_MODEL_LEN),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
        ignore_eos=st.booleans(),
        num_done=st.just(0) | st.integers(0, 3),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        stop_ids: frozenset[int],
        ignore_eos: bool,
        num_done: int,
    ) -> None:
        stop = StopCondition(min(max_tokens, MAX_MODEL_LEN - len(prompt)), stop_ids, ignore_eos)
        request = self.cluster.make_request(prompt, stop, n=n, priority=priority)
        request.delivered = [expected.tokens[:num_done] for expected in request.expected]
        self.cluster.submit(request)

    @rule(seconds=st.sampled_from((0.0, 0.1, 10.0)))
    def schedule(self, seconds: float) -> None:
        self.cluster.now += seconds
        self.cluster.schedule()

    @precondition(lambda self: self.cluster.busy_workers())
    @rule(data=st.data(), is_scheduled=st.booleans())
    def answer(self, data: st.DataObject, is_scheduled: bool) -> None:
        self.cluster.answer(data.draw(st.sampled_from(self.cluster.busy_workers())))
        if is_scheduled:
            self.cluster.schedule()

    @precondition(lambda self: self.cluster.open)
    @rule(data=st.data(), sample=st.none() | st.integers(0, 2))
    def end(self, data: st.DataObject, sample: int | None) -> None:
        request = data.draw(st.sampled_from(list(self.cluster.open.values())))
        if sample is None:
            self.cluster.abort(request)
        elif sample < request.n and request.finished[sample] is None:
            self.cluster.stop_sample(request, sample)

    @precondition(lambda self: self.cluster.workers)
    @rule(data=st.data(), event=st.sampled_from(("lose", "reconnect", "drain", "fail", "restart", "nonsense")))
    def disturb(self, data: st.DataObject, event: str) -> None:
        cluster = self.cluster
        worker = data.draw(st.sampled_from(list(cluster.workers.values())))
        match event:
            case "fail":
                worker.fail_next = data.draw(st.sampled_from(("nan", "lost", "silent")))
            case "restart":
                cluster.restart_scheduler(list(cluster.open.values()))
            case "nonsense":
                cluster.talk_nonsense()
            case _:
                getattr(cluster, event)(worker)

    @invariant()
    def books_balance(self) -> None:
        self.cluster.check()

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        if not self.cluster.can_finish():
            for worker in list(self.cluster.workers.values()):
                self.cluster.lose(worker)
            self.join(0, 3, 4, 2, is_lazy=False)
        self.cluster.settle(lambda busy: busy[0])
        self.cluster.check_end()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40)
