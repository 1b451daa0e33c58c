"""Turns plans into requests to schedulers, with hints for the choice of a replica; and when their handlers wake up."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

from quire.internal.v1 import pooling_pb2
from quire.internal.v1 import scheduler_pb2 as internal
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.callers.caller import current_caller
from gateway_svc.request.models import ServedModel
from gateway_svc.request.plan import GenerationPlan
from gateway_svc.request.pooling import PooledInput
from gateway_svc.request.threads import Lane
from gateway_svc.schedulers.dispatcher import Dispatcher, Hints
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from gateway_svc.schedulers.wire import submit_from_plan
from prefix_index.hashing import (
    encoder_digest,
    extend_digests,
    extra_keys,
    model_salt,
    root_digest,
    root_key,
    token_bytes,
)
from svc_common.flush import FlushTimer
from svc_common.tasks import Slices

MIN_BLOCKS_TO_LOOK_UP = 2  # computing a shorter prefix takes less time than the lookup
NO_HINTS = Hints()
DRAIN_TURNS = 3  # loop iterations per round: handlers run and write, writes complete, handlers sleep again
REST_FRACTION = 0.25  # pause after a round, as a fraction of the round's duration
MAX_SHARE = 0.1  # of the time that rounds may take at an interval, which is set where cores are shared with a model
MAX_STRETCH = 4  # intervals between two rounds, at most, for that
MAX_REST_S = 0.05  # if the process was frozen during a round, its duration is far too long


class WakePacer:
    """Decides when handlers wake up for new tokens: at once while the gateway keeps up, in rounds when it is busy.

    A chunk costs the same for any number of tokens, so all handlers with new tokens are woken together in one round,
    each at most once. The next round starts after the loop has finished this round and then had a quarter of the
    round's time for other work: reading from schedulers, accepting requests. Meanwhile tokens collect in the journals
    and are sent as larger chunks. `interval_s`: least time between the starts of rounds. It grows with the duration of
    rounds, because many streams would take the cores from the model.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._waiting: dict[SchedulerRequest, None] = {}
        self._rounds = FlushTimer(self._run_round, interval_s, holds=True, joins_turn=True)

    def wake(self, handler: SchedulerRequest) -> None:
        """Wake the handler in the next round."""
        self._waiting[handler] = None
        self._rounds.soon()

    def begin_interval(self) -> None:
        """A handler sends a first token outside of the rounds. If no round is in progress, the next one keeps the
        interval to that token.
        """
        self._rounds.begin()

    def _run_round(self) -> None:
        loop = asyncio.get_running_loop()
        handlers, self._waiting = self._waiting, {}
        for handler in handlers:
            handler.wake()
        loop.call_soon(self._drain, loop.time(), DRAIN_TURNS)

    def _drain(self, started_at: float, turns: int) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._drain, started_at, turns - 1)
            return
        now = loop.time()
        took_s = now - started_at
        rest_s = min(REST_FRACTION * took_s, MAX_REST_S)
        interval_s = max(self._interval_s, min(took_s / MAX_SHARE, MAX_STRETCH * self._interval_s))
        self._rounds.free(max(now + rest_s, started_at + interval_s))


class PrefixReader(Protocol):
    """Reads the prefix index that schedulers publish to. Never raises; waits at most its timeout."""

    async def lookup(self, digests: Sequence[bytes]) -> Mapping[int, int]:
        """Cached blocks of a prompt by scheduler epoch."""


class Submission:
    """A request that is ready to be sent to a scheduler."""

    __slots__ = ("_dispatcher", "_hints", "_model", "request")

    def __init__(self, request: SchedulerRequest, dispatcher: Dispatcher, model: ServedModel, hints: Hints) -> None:
        self.request = request
        self._dispatcher = dispatcher
        self._model = model
        self._hints = hints

    def send(self) -> None:
        """Send it, unless nothing is expected from a scheduler. Raises UnavailableError if no replica is ready."""
        if not self.request.is_over:
            self._dispatcher.submit(self.request, self._model.info, self._hints)


class Submitter:
    """Prepares requests. Without a `reader`, hints have no cached tokens."""

    def __init__(
        self, dispatcher: Dispatcher, lane: Lane, reader: PrefixReader | None = None, chunk_interval_s: float = 0.0
    ) -> None:
        self._dispatcher = dispatcher
        self._lane = lane
        self._reader = reader
        self._pacer = WakePacer(chunk_interval_s)

    async def prepare(
        self, plan: GenerationPlan, *, scoped_id: str, resumes: bool, deadline: float | None
    ) -> Submission:
        """The request of a plan. `resumes`: its client has lost the stream of an earlier submission."""
        request = SchedulerRequest(
            submit_from_plan(plan, request_id=scoped_id),
            *plan.resume.computed,
            resumes=resumes,
            deadline=deadline,
            pacer=self._pacer,
            num_prompt_logprobs=plan.resume.num_prompt_logprobs,
        )
        hints = await self._look_up(plan) if self._dispatcher.has_choice(plan.model.info) else NO_HINTS
        return Submission(request, self._dispatcher, plan.model, hints)

    async def prepare_pooled(
        self,
        inputs: Sequence[PooledInput],
        pooling: pooling_pb2.Pooling,
        model: ServedModel,
        scheduling: pb.SchedulingParams,
        *,
        scoped_id: str,
        cache_salt: str,
        deadline: float | None,
    ) -> list[Submission]:
        """One request per input. With several inputs, the ids have a number."""
        submissions, slices = list[Submission](), Slices()
        for i, item in enumerate(inputs):
            submit = internal.Submit(
                request_id=scoped_id if len(inputs) == 1 else f"{scoped_id}#{i}",
                prompt_token_ids=token_bytes(item.ids),
                sampling=types.SamplingParams(seed=0),
                stop=types.StopParams(max_tokens=0),
                priority=scheduling.priority,
                cache_salt=cache_salt,
                tenant_id=current_caller.get().owner or scheduling.tenant_id,
                pooling=pooling,
            )
            submit.pooling.second_text = item.second_text
            request = SchedulerRequest(submit, [array("I")], [False], deadline=deadline)
            submissions.append(Submission(request, self._dispatcher, model, NO_HINTS))
            await slices.rest()
        return submissions

    async def _look_up(self, plan: GenerationPlan) -> Hints:
        digests = await self._lane.run(4 * len(plan.prompt.ids), chain_of, plan)
        block_size = plan.model.info.block_size
        affinity = plan.prompt.ids.tobytes()
        if digests:  # the first block that not all tenants share
            affinity = digests[min(plan.prompt.num_public_tokens // block_size, len(digests) - 1)]
        if self._reader is None or len(digests) < MIN_BLOCKS_TO_LOOK_UP:
            return Hints(affinity)
        blocks = await self._reader.lookup(digests)
        return Hints(affinity, {epoch: count * block_size for epoch, count in blocks.items()})


def chain_of(plan: GenerationPlan) -> list[bytes]:
    """Digests of the prompt's full blocks, the same as in the model's schedulers."""
    info = plan.model.info
    digests: list[bytes] = []
    if info.block_size:
        prompt = plan.prompt
        salt = model_salt(info.revision, info.dtype, info.determinism, info.weights_revision)
        encoder = b"" if prompt.encoder is None else encoder_digest(prompt.ids)
        adapter = plan.model.adapter_digest
        cache_salt, border = prompt.cache_salt.encode(), prompt.num_public_tokens // info.block_size
        keys = extra_keys(prompt.inputs, info.block_size)
        if border:
            keys[border] = root_key(cache_salt=cache_salt) + keys.get(border, b"")
        key = root_key(cache_salt=b"" if border else cache_salt, encoder=encoder, adapter=adapter)
        root = root_digest(salt, info.block_size, key)
        extend_digests(digests, root, prompt.column, info.block_size, keys)
    return digests
