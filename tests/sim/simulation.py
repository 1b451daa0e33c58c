"""One seed is one run: a whole cluster around the real scheduler core, in one thread, with planned faults.

    python -m tests.sim.simulation 1234          run seed 1234; on failure print what led to it
    python -m tests.sim.simulation 0 2000        run seeds 0 to 1999 and tell what they covered

Everything random comes from the seed: the sizes, the requests, the order of events, the delays of answers.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from prefix_index import hashing
from prefix_index.hashing import FIRST_CONTENT_ID
from request_fields.fields import LAST_PRIORITY, RepetitionDetection
from request_fields.parameters import BeamParams, EarlyStopping
from request_fields.sizes import blocks_of_row
from scheduler_svc.core.block_manager import ceil_div
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import StopCondition
from step_protocol.types import BlockMovement, CacheGroup, WorkerRole
from tests.sim.cluster import ADAPTERS, ROOT_SALT, Cluster, Request
from tests.sim.inputs import NUM_CONTENTS, SALT_SHIFT, SimInput, without_salt
from tests.sim.operators import Operators
from tests.sim.symbolic_worker import NAN_SEED, SymbolicWorker
from tests.sim.tiers import damage
from tests.sim.transcript import describe

WORKER_IDS = ("w0", "w1", "w2")
NUM_OWNERS = 3
NUM_SNAPSHOTS = (0, 1, 2, 4, 9)


@dataclass(frozen=True, slots=True)
class Setup:
    """The choices of one seed for a whole run. Rates are probabilities per event."""

    num_requests: int
    max_n: int
    arrival_rate: float
    fault_rate: float  # workers and schedulers are lost and restarted
    failure_rate: float  # rows fail
    abort_rate: float
    eagerness: float  # chance that `schedule` follows an event
    is_lazy: bool  # workers execute when their answer is read, not when the step arrives
    has_groups: bool = False  # workers have several cache groups
    has_moves: bool = False  # workers have tiers and exchange blocks: few prefixes, small pools, frequent losses
    has_windows: bool = False  # with has_moves: all layers may have windows
    has_slow_links: bool = False  # full pools and few losses: what a source must keep, it would have evicted by then
    has_fast_links: bool = False  # full pools and lazy workers: a move arrives before the steps in flight, if it may
    has_slow_disks: bool = False  # full pools: what was evicted is on the disk, and is not worth reading
    has_turns: bool = (
        False  # prompts continue conversations; most models have states, snapshots at each block, and drafts
    )
    has_public: bool = False  # requests with equal roots have public prefixes, and salts
    has_background: bool = False  # half of the requests have the lowest priority
    has_operators: bool = False  # pauses, sleep, resets, updates, loans and conversations, together with all others

    @property
    def is_full(self) -> bool:
        return self.has_slow_links or self.has_fast_links or self.has_slow_disks


class Simulation:
    """The random driver of a Cluster. `run` raises Violation, or an error of the core, on any fault."""

    def __init__(
        self,
        seed: int,
        *,
        make_scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler,
        checks_invariants: bool = True,
        **changes: Any,
    ) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self._repetition_rng = Random(f"repetitions {seed}")
        self._repetition_rate = self._repetition_rng.choice((0.0, 0.8))
        self._beam_rng = Random(f"beams {seed}")
        self._beam_rate = self._beam_rng.choice((0.0, 0.2, 0.6))
        self._encoder_rng = Random(f"encoder {seed}")
        self._encoder_rate = self._encoder_rng.choice((0.0, 0.0, 0.3, 1.0))
        self._pooling_rng = Random(f"pooling {seed}")
        self._pooling_rate = self._pooling_rng.choice((0.0, 0.2, 0.5))
        self._input_rng = Random(f"inputs {seed}")
        self._input_rate = self._input_rng.choice((0.0, 0.0, 0.3, 1.0))
        self._adapter_rng = Random(f"adapters {seed}")
        self._adapter_rate = self._adapter_rng.choice((0.0, 0.0, 0.5, 0.9))
        self._tight_rng = Random(f"tight {seed}")
        self._tight_rate = self._tight_rng.choice((0.0, 0.0, 0.5, 1.0))
        if self._tight_rate:
            self._beam_rate = 0.6
        self._state_rng = Random(f"states {seed}")
        self._has_states = not self._encoder_rate and self._state_rng.random() < 0.4
        self._move_rng = Random(f"moves {seed}")
        self._role_rng = Random(f"roles {seed}")
        self._has_roles = self._role_rng.random() < 0.3
        self._draft_rate = Random(f"drafts {seed}").choice((0.0, 0.3, 0.7, 1.0))
        self._answer_rng = Random(f"old answers {seed}")
        self._answer_rate = self._answer_rng.choice((0.0, 0.0, 0.7))
        self._old_answers: dict[str, np.ndarray] = {}
        self._update_rng = Random(f"updates {seed}")
        self._update_rate = self._update_rng.choice((0.0, 0.0, 0.004, 0.02))
        self._operator_rng = Random(f"operators {seed}")
        self._nan_rng = Random(f"nan {seed}")
        self._nan_rate = self._nan_rng.choice((0.0, 0.0, 0.0, 0.2))
        self.num_events = self._num_arrived = self._next_epoch = 0
        self.setup = replace(self._choose_setup(), **changes)
        if self.setup.has_groups or self.setup.has_turns or self.setup.has_public:
            self._encoder_rate = 0.0
        if self.setup.has_turns:
            turn_rng = Random(f"turns {seed}")
            self._has_states = turn_rng.random() < 0.8
            self.setup = replace(self.setup, num_requests=24)
            self._draft_rate = turn_rng.choice((0.3, 0.7, 1.0))
        if self.setup.has_moves:
            self._encoder_rate = self._tight_rate = 0.0
            self._has_states = Random(f"moved states {seed}").random() < 0.4
            fault_rate = 0.01 if self.setup.is_full else 0.04
            own = {"num_requests": 24, "fault_rate": fault_rate, "arrival_rate": 0.3, "abort_rate": 0.01}
            own |= {"is_lazy": True} if self.setup.has_fast_links else {}
            self.setup = replace(self.setup, **own)
        block_size = rng.choice((1, 2, 2, 3, 4, 4, 4, 8, 16))
        # From separate sources, so that seeds of old bugs give the same runs.
        windows = (None, 1, 2, block_size, block_size + 2, 3 * block_size + 1)
        has_window = self.setup.has_windows or not (self._encoder_rate or self.setup.has_moves or self.setup.has_groups)
        self.window = Random(f"window {seed}").choice(windows) if has_window else None
        self._group_rng = Random(f"groups {seed}")
        num_groups = self._group_rng.choice((1, 1, 2)) if self.setup.has_groups else 0
        self._shares_prompts = not (num_groups or self._has_states)
        self.group_windows = [self._group_rng.choice(windows[1:]) for _ in range(num_groups)]
        self.cluster = Cluster(
            self._choose_config(),
            block_size=block_size,
            max_model_len=rng.randint(2, 6) * block_size + rng.randint(4, 30),
            vocab_size=rng.choice((6, 16, 40, 200)),
            make_scheduler=make_scheduler,
            checks_invariants=checks_invariants,
        )
        self.cluster.has_slow_disks = self.setup.has_slow_disks
        self.operators = Operators(self.cluster, self._operator_rng) if self.setup.has_operators else None
        self._prefixes = [
            self._random_tokens(self.cluster.max_model_len) for _ in range(4 if self.setup.is_full else 2)
        ]
        self._roots = rng.choice(((b"",), (b"", b"tenant")))

    # -- choices ------------------------------------------------------------------------------------------------------

    def _choose_setup(self) -> Setup:
        rng = self.rng
        return Setup(
            num_requests=rng.randint(3, 20),
            max_n=rng.choice((1, 4, 4)),
            arrival_rate=rng.choice((0.08, 0.2, 0.5)),
            fault_rate=rng.choice((0.0, 0.0, 0.01, 0.05)),
            failure_rate=rng.choice((0.0, 0.0, 0.02, 0.15)),
            abort_rate=rng.choice((0.0, 0.01, 0.06)),
            eagerness=rng.choice((1.0, 0.9, 0.6)),
            is_lazy=rng.random() < 0.5,
        )

    def _choose_config(self) -> SchedulerConfig:
        rng = self.rng
        return SchedulerConfig(
            max_waiting=rng.choice((1024, 1024, 1024, 3)),
            watermark=rng.choice((0.0, 0.01, 0.1)),
            aging_s=rng.choice((0.05, 2.0)),
            max_bypass=rng.choice((1, 16)),
            placement_alpha=rng.choice((0.0, 3.0)),
            max_pending_prefill_steps=rng.choice((1, 2)),
            expected_output_tokens=rng.choice((1, 8, 256)),
            eos_token_ids=frozenset(rng.choice(((), (0,), (0,), (0, 1)))),
            burst_s=Random(f"burst {self.seed}").choice((0.0, 0.0, 0.3, 1.0)),
            max_step_s=Random(f"longest step {self.seed}").choice((0.0, 0.0, 0.1, 0.5)),
            changes_wait_s=Random(f"changes {self.seed}").choice((0.0, 0.3)),
            prefix_caching=self.setup.is_full
            or Random(f"cache {self.seed}").random() < (0.4 if self._tight_rate else 0.85),
            root_salt=ROOT_SALT,
        )

    def _random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.cluster.vocab_size) for _ in range(count)]

    def _choose_capacity(self, worker_id: str) -> WorkerCapacity:
        """From a pool too small for some requests to one that never fills."""
        rng, bs, max_len = self.rng, self.cluster.block_size, self.cluster.max_model_len
        longest = ceil_div(max_len, bs)
        num_blocks = rng.choice((rng.randint(2, longest), longest, longest + rng.randint(0, longest), 6 * longest))
        if self.setup.has_moves:
            num_blocks = longest + 2 if self.setup.is_full else max(num_blocks, longest + 2)
        max_num_seqs = rng.randint(1, 8)
        if tight := self._tight_pool():
            num_blocks, max_num_seqs = tight, 8
        budget = max_num_seqs + rng.choice((0, 1, 5, 20, 100))
        if self._encoder_rate:
            budget = max(budget, self._encoder_rng.choice((0, max_len)))
        self._next_epoch += 1
        depth, num_snapshots = rng.randint(1, 6), NUM_SNAPSHOTS[2 * self.setup.has_moves :]
        spacings = (1, bs, 3 * bs, 1000)[: 4 - self.setup.has_moves]
        if self.setup.has_turns:
            num_snapshots, spacings = NUM_SNAPSHOTS[3 if self.setup.has_groups else 1 :], (1,)
        groups = self._choose_groups(depth, max_num_seqs)
        return WorkerCapacity(
            worker_id, self._next_epoch, num_blocks, bs, max_num_seqs, budget, max_len,
            pipeline_depth=depth, vocab_size=self.cluster.vocab_size, attention_window=self.window,
            groups=groups, max_adapters=self._adapter_rng.randint(1, 3), movement=self._choose_movement(len(groups)),
            num_snapshots=self._state_rng.choice(num_snapshots) if self._has_states else None,
            snapshot_tokens=self._state_rng.choice(spacings),
        )  # fmt: skip

    def _choose_groups(self, depth: int, max_num_seqs: int) -> tuple[CacheGroup, ...]:
        """From pools for a single row to those for all. Some workers of such a model have one group."""
        rng, bs = self._group_rng, self.cluster.block_size
        if rng.random() < 0.1:
            return ()
        sizes = [blocks_of_row(window, bs, depth) * rng.choice((1, max_num_seqs)) for window in self.group_windows]
        return tuple(
            CacheGroup(window, size + rng.choice((0, 1, 9)))
            for window, size in zip(self.group_windows, sizes, strict=True)
        )

    def _choose_movement(self, num_groups: int) -> BlockMovement | None:
        """From a separate source, as `_choose_beams`."""
        rng = self._move_rng
        if self.setup.is_full:
            has_tier = self.setup.has_slow_disks or self.setup.has_fast_links
            return BlockMovement(b"layout", 1, has_tier=has_tier, can_transfer=not self.setup.has_slow_disks)
        if not self.setup.has_moves or rng.random() < 0.1:
            return None
        layout = b"%s %d" % (b"other" if rng.random() < 0.1 else b"layout", num_groups)
        has_tier, can_transfer = rng.random() < (0.3 if self._has_states else 0.7), rng.random() < 0.8
        role = self._role_rng.choice(list(WorkerRole)) if self._has_roles else WorkerRole.BOTH
        return BlockMovement(layout, 1, has_tier, can_transfer or self._has_roles, role)

    def _tight_pool(self) -> int:
        """Perhaps the number of blocks that the largest open beam search needs: if its beams share less than they
        should, it starts again without end. Else 0.
        """
        searches = [request for request in self.cluster.open.values() if request.beams is not None]
        if not searches or self._tight_rng.random() >= self._tight_rate:
            return 0
        return max(
            self.cluster.num_blocks_of(request, self.window, shares_prompt=self._shares_prompts) for request in searches
        )

    def _choose_prompt(self, conversation: int) -> list[int]:
        """Shared prefixes, repeated prompts and continued conversations are as common as new prompts."""
        rng, limit, kind = self.rng, self.cluster.max_model_len, self.rng.random()
        turns = [one for one in self.cluster.requests.values() if one.conversation == conversation]
        if self.setup.has_turns and turns and kind < 0.9:  # also an edited turn, and one beside an open one
            before = turns[-1].prompt + turns[-1].delivered[0]
            return [*before[: rng.choice((len(before), max(1, len(before) - 6), limit // 2))][: limit - 1], 1]
        if self.setup.has_moves and kind < 0.85:
            room = rng.randint(1, 6) * (6 if self._has_roles else 1)  # for outputs: streams leave after a few tokens
            return rng.choice(self._prefixes)[: max(1, limit - room)] + self._random_tokens(rng.randint(0, 2))
        earlier = list(self.cluster.requests.values())
        if kind < 0.5:
            prompt = rng.choice(self._prefixes)[: rng.randint(0, limit)] + self._random_tokens(rng.randint(0, 4))
        elif kind < 0.8 and earlier:
            request = rng.choice(earlier)
            prompt = request.prompt + rng.choice(request.delivered)[: rng.choice((0, 100))]
        else:
            prompt = self._random_tokens(rng.randint(1, limit))
        return prompt[: limit - rng.randint(0, limit // 2)] or [1]

    def _choose_stop(self, prompt_len: int) -> StopCondition:
        rng = self.rng
        room = max(self.cluster.max_model_len - prompt_len, 0)
        max_tokens = rng.choice((0, 1, room, rng.randint(0, room), rng.randint(0, room)))
        if rng.random() < 0.03:
            max_tokens = room + 1
        stop_ids = frozenset(self._random_tokens(rng.choice((0, 0, 1, 2))))
        repetition = self._choose_repetition()
        return StopCondition(max_tokens, stop_ids, ignore_eos=rng.random() < 0.4, repetition_detection=repetition)

    def _choose_repetition(self) -> RepetitionDetection | None:
        """From a separate source, as `_choose_beams`."""
        rng = self._repetition_rng
        return RepetitionDetection(rng.randint(1, 3), 0, 2) if rng.random() < self._repetition_rate else None

    def _choose_beams(self, stop: StopCondition) -> BeamParams | None:
        """From a separate source, so that seeds of old bugs give the same runs."""
        rng = self._beam_rng
        if rng.random() >= self._beam_rate or not stop.max_tokens or stop.repetition_detection is not None:
            return None
        width = rng.randint(2, 5)
        return BeamParams(width, rng.randint(1, width), rng.choice((0.0, 1.0, 2.0)), rng.choice(list(EarlyStopping)))

    def _put_input(self, prompt: list[int]) -> list[int]:
        """The prompt with content ids at some positions, often with the same content at the same positions as in
        earlier prompts. From a separate source, as `_choose_beams`.
        """
        rng = self._input_rng
        if rng.random() >= self._input_rate or max(prompt) >= FIRST_CONTENT_ID:
            return prompt
        start = rng.randrange(len(prompt)) if rng.random() < 0.3 else min(rng.choice((0, 1, 5)), len(prompt) - 1)
        length = min(rng.choice((1, 3, self.cluster.block_size, 20)), len(prompt) - start)
        item = SimInput(start, length, rng.randrange(NUM_CONTENTS))
        return [*prompt[:start], *item.ids, *prompt[item.end :]]

    def _put_salt(self, prompt: list[int]) -> list[int]:
        """The prompt with a salt after some of its blocks, often after the same number."""
        if not self.setup.has_public:
            return prompt
        prompt, starts = without_salt(prompt), range(self.cluster.block_size, len(prompt), self.cluster.block_size)
        if not starts:
            return prompt
        start = self.rng.choice((starts[0], self.rng.choice(starts)))
        if prompt[start] < FIRST_CONTENT_ID:
            prompt[start] += self.rng.choice((1, 2)) << SALT_SHIFT
        return prompt

    def _choose_pooling(self, prompt: list[int], encoder: list[int]) -> str:
        """How the request pools its prompt; empty: it generates. From a separate source, as `_choose_beams`."""
        if self._pooling_rng.random() >= self._pooling_rate or encoder or max(prompt) >= FIRST_CONTENT_ID:
            return ""
        return self._pooling_rng.choice(("last", "mean", "mean"))

    def _choose_encoder(self) -> list[int]:
        """The encoder input of a request, often that of an earlier one. From a separate source, as `_choose_beams`."""
        rng, bs = self._encoder_rng, self.cluster.block_size
        if rng.random() >= self._encoder_rate:
            return []
        num_blocks = rng.randint(1, max(1, (self.cluster.max_model_len // bs) // 2))
        tokens = [rng.randrange(self.cluster.vocab_size) for _ in range(num_blocks * bs)]
        earlier = [request for request in self.cluster.requests.values() if request.num_encoder_tokens]
        if earlier and rng.random() < 0.6:
            request = rng.choice(earlier)
            tokens = request.prompt[: request.num_encoder_tokens]
        return tokens

    def _choose_adapter(self) -> bytes:
        """From a separate source, as `_choose_beams`."""
        rng = self._adapter_rng
        return rng.choice(ADAPTERS) if rng.random() < self._adapter_rate else b""

    def _choose_priority(self) -> int:
        priority = self.rng.choice((0, 0, 0, -1, 1, 5))
        return LAST_PRIORITY if self.setup.has_background and self.rng.random() < 0.5 else priority

    def _choose_conversation(self) -> int:
        """The number of a conversation; 0: none."""
        has_some = self.operators is not None or self.setup.has_turns
        return self._operator_rng.choice((0, 1, 1, 2)) if has_some else 0

    def _random_worker(self) -> SymbolicWorker:
        return self.rng.choice(list(self.cluster.workers.values()))

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Cause faults until after the last arrival. Then run to the end without faults and check for leaks."""
        for _ in range(self.rng.choice((0, 1, 1, 2, 3)) + 2 * self.setup.has_slow_links):
            self._join()
        while self._num_arrived < self.setup.num_requests:
            self._event()
        for _ in range(self.rng.randint(0, 40)):
            self._event()
        if self.operators is not None:
            self.operators.end_all()
        self._provide_room()
        self.cluster.settle(self.rng.choice)
        self.cluster.check_end()

    def _event(self) -> None:
        self.num_events += 1
        self.cluster.now += self.rng.random() * 0.1
        self._choose_event()()
        self.cluster.check()
        if self.operators is not None:
            self.operators.check_loans()
        if self.rng.random() < self.setup.eagerness:
            self.cluster.schedule()

    def _choose_event(self) -> Callable[[], None]:
        rng, s = self.rng, self.setup
        if not self.cluster.workers and rng.random() < 0.5:
            return self._join
        if self.operators is not None and self._operator_rng.random() < 0.25:
            o = self.operators
            if self.cluster.moves and self._operator_rng.random() < 0.3:
                return o.interrupt
            return self._operator_rng.choice((o.begin, o.end, o.end, o.end, o.lend, o.end_loan))
        if rng.random() < s.arrival_rate and self._num_arrived < s.num_requests:
            return self._arrive
        if rng.random() < s.fault_rate and self.cluster.workers:
            return rng.choice((self._lose, self._reconnect, self._drain, self._restart_scheduler))
        if self._tight_rng.random() < 0.05 * self._tight_rate and self.cluster.workers:
            return self._replace_workers
        if rng.random() < s.failure_rate and self.cluster.workers:
            return self._break_a_row
        if rng.random() < s.abort_rate and self.cluster.open:
            return rng.choice((self._abort, self._stop_sample))
        if rng.random() < 0.02:
            return rng.choice((self._join, self.cluster.talk_nonsense))
        if not self.setup.has_moves and self._update_rng.random() < self._update_rate:
            return self._update_weights
        if self.cluster.swaps and self._adapter_rng.random() < 0.3:
            return self._end_swap
        restart_rate = 0.1 if self.cluster.moves and not self.setup.is_full else 0.01
        if self.setup.has_moves and self._move_rng.random() < restart_rate:
            return self._restart_worker
        if self.cluster.moves and self._move_rng.random() < (0.9 if s.has_fast_links else 0.3):
            return self._end_move
        if self.cluster.tiers and self._move_rng.random() < 0.05:
            return self._damage_a_record
        if not self.cluster.busy_workers() and self._num_arrived < s.num_requests:
            return self._arrive
        return self._answer

    def _arrive(self) -> None:
        rng = self.rng
        self._num_arrived += 1
        conversation = self._choose_conversation()
        prompt = self._put_salt(self._put_input(self._choose_prompt(conversation)))
        encoder = self._choose_encoder()
        if encoder:
            prompt = encoder + prompt[: max(1, self.cluster.max_model_len - 2 * len(encoder))]
        stop = self._choose_stop(len(prompt))
        beams, adapter = self._choose_beams(stop), self._choose_adapter()
        pooling = self._choose_pooling(prompt, encoder)
        if pooling:
            stop, beams = StopCondition(0), None
        seed, n = rng.choice((7, rng.randrange(1 << 32))), rng.choice((1, 1, rng.randint(1, self.setup.max_n)))
        if self._nan_rng.random() < self._nan_rate:
            seed = NAN_SEED
        if conversation and self.setup.has_turns:
            n = 1
        request = self.cluster.make_request(
            prompt,
            stop,
            seed=seed,
            n=1 if pooling else n,
            pooling=pooling,
            priority=self._choose_priority(),
            root_key=_root_key(rng.choice(self._roots), encoder, adapter),
            adapter=adapter,
            owner=rng.randrange(NUM_OWNERS),
            beams=beams,
            num_encoder_tokens=len(encoder),
            conversation=conversation,
        )
        if rng.random() < 0.15 and beams is None:  # another scheduler served it until now
            request.delivered = [e.tokens[: rng.randint(0, len(e.tokens))] for e in request.expected]
        self._choose_old_answer(request)
        self.cluster.submit(request)

    def _choose_old_answer(self, request: Request) -> None:
        """Perhaps its own tokens, often edited, or those of another request. From a separate source, as
        `_choose_beams`.
        """
        rng = self._answer_rng
        if rng.random() >= self._answer_rate:
            return
        source = request if rng.random() < 0.8 else rng.choice(list(self.cluster.requests.values()) or [request])
        tokens = [token for expected in source.expected for token in expected.tokens]
        for _ in range(rng.choice((0, 1, 3))):
            start = rng.randrange(len(tokens) + 1)
            tokens[start : start + rng.randrange(3)] = [
                rng.randrange(self.cluster.vocab_size) for _ in range(rng.randrange(3))
            ]
        self._old_answers[request.request_id] = np.array(tokens, np.uint32)

    def _abort(self) -> None:
        self.cluster.abort(self.rng.choice(list(self.cluster.open.values())))

    def _stop_sample(self) -> None:
        request = self.rng.choice(list(self.cluster.open.values()))
        live = [sample for sample, reason in enumerate(request.finished) if reason is None]
        if request.beams is not None:
            return  # gateways refuse stop strings with beams
        self.cluster.stop_sample(request, self.rng.choice(live))

    def _answer(self) -> None:
        busy = self.cluster.busy_workers()
        if busy:
            self.cluster.answer(self.rng.choice(busy))

    def _end_swap(self) -> None:
        self.cluster.end_swap(self._adapter_rng.choice(self.cluster.swaps))

    def _end_move(self) -> None:
        if ready := self.cluster.ready_moves():
            move = self._move_rng.choice(ready)
            whole = move.num_items
            if move.source is not None and self.setup.has_slow_links and self._move_rng.random() < 0.9:
                self._answer()
            else:
                self.cluster.end_move(
                    move, self._move_rng.randint(0, whole) if self._move_rng.random() < 0.3 else whole
                )

    def _restart_worker(self) -> None:
        """kill -9: another process with the same id and tier, while blocks of the first one may be on their way."""
        if self.cluster.workers:
            worker = self._random_worker()
            self.cluster.lose(worker)
            self._next_epoch += 1
            self.cluster.join(replace(worker.capacity, worker_epoch=self._next_epoch), is_lazy=self.setup.is_lazy)

    def _damage_a_record(self) -> None:
        records = [record for tier in self.cluster.tiers.values() for record in tier.values()]
        if records:
            damage(self._move_rng.choice(records))

    def _join(self) -> None:
        """A new worker, or another one with the id of an earlier one."""
        free = [name for name in WORKER_IDS if name not in self.cluster.workers]
        if free:
            first_step = self.rng.choice((1, 1, 100))
            capacity = self._choose_capacity(free[0])
            worker = self.cluster.join(capacity, first_step=first_step, is_lazy=self.setup.is_lazy)
            worker.draft_rate, worker.old_answers = self._draft_rate, self._old_answers

    def _update_weights(self) -> None:
        self.cluster.update_weights(keeps_kv=self._update_rng.random() < 0.4)

    def _lose(self) -> None:
        self.cluster.lose(self._random_worker())

    def _replace_workers(self) -> None:
        """All sequences continue on one new worker."""
        for worker in list(self.cluster.workers.values()):
            self.cluster.lose(worker)
        self._join()

    def _reconnect(self) -> None:
        self.cluster.reconnect(self._random_worker())

    def _drain(self) -> None:
        self.cluster.drain(self._random_worker())

    def _break_a_row(self) -> None:
        self._random_worker().fail_next = self.rng.choice(("nan", "lost", "silent"))

    def _restart_scheduler(self) -> None:
        order = list(self.cluster.open.values())
        self.rng.shuffle(order)
        if self.operators is not None:
            self.operators.restarted()
        self.cluster.restart_scheduler(order)

    def _provide_room(self) -> None:
        """Like an operator, start a worker that can run the requests that no other worker could."""
        if self.cluster.can_finish():
            return
        c, longest = self.cluster, ceil_div(self.cluster.max_model_len, self.cluster.block_size)
        self._next_epoch += 1
        width = max((request.num_sequences for request in c.open.values() if request.beams is not None), default=1)
        rows, num_blocks = max(4, width), longest * width
        if self._tight_rng.random() < self._tight_rate:
            num_blocks = max(
                c.num_blocks_of(request, self.window, shares_prompt=self._shares_prompts) for request in c.open.values()
            )
        budget = rows + max((request.num_encoder_tokens for request in c.open.values()), default=0)
        worker = c.join(
            WorkerCapacity(
                "ample", self._next_epoch, num_blocks, c.block_size, rows, budget + self.rng.randint(0, 20),
                c.max_model_len, vocab_size=c.vocab_size, attention_window=self.window, max_adapters=1,
                groups=tuple(CacheGroup(w, rows * blocks_of_row(w, c.block_size, 2)) for w in self.group_windows),
            ),
            is_lazy=self.setup.is_lazy,
        )  # fmt: skip
        worker.draft_rate, worker.old_answers = self._draft_rate, self._old_answers

    # -- reports ------------------------------------------------------------------------------------------------------

    def transcript(self, last: int = 40) -> str:
        """The last events as text."""
        lines = [f"seed {self.seed}: {self.setup}", f"config: {self.cluster.config}"]
        lines += [describe(event) for event in self.cluster.trace[-last:]]
        return "\n".join(lines)


def _root_key(root: bytes, encoder: list[int], adapter: bytes) -> bytes:
    salt = hashlib.blake2b(bytes(encoder), key=root, digest_size=8).digest() if encoder else root
    return hashing.root_key(cache_salt=salt, adapter=adapter) if adapter else salt


def run_seed(
    seed: int,
    *,
    make_scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler,
    checks_invariants: bool = True,
    **changes: Any,
) -> Simulation:
    """Run one seed, with `changes` in place of what it chose for Setup.

    A failure carries the seed, how to run it again, and the last events.
    """
    simulation = Simulation(seed, make_scheduler=make_scheduler, checks_invariants=checks_invariants, **changes)
    try:
        simulation.run()
    except Exception as error:
        error.add_note(simulation.transcript())
        error.add_note(f"seed {seed}; run it again: python -m tests.sim.simulation {seed}")
        raise
    return simulation


def main(first: int, last: int) -> None:
    """Run seeds first to last - 1 and print what they covered."""
    start, totals = time.process_time(), Counter[str]()
    for seed in range(first, last):
        simulation = run_seed(seed)
        totals["events"] += simulation.num_events
        for name in ("steps", "tokens", "preemptions", "cached_tokens", "moved_blocks"):
            totals[name] += getattr(simulation.cluster, f"num_{name}")
        for name in ("drafted", "accepted"):
            totals[name] += sum(getattr(worker, f"num_{name}") for worker in simulation.cluster.workers.values())
    print(f"{last - first} seeds in {time.process_time() - start:.1f} s of CPU: {dict(totals)}")


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]] or [0, 2000]
    main(arguments[0], arguments[1] if len(arguments) > 1 else arguments[0] + 1)
