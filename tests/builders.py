"""Builders for tests of the scheduler core: `make_scheduler()`, `make_group(10)`, `make_capacity()`,
`run_to_end(scheduler)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from quire.internal.v1 import worker_pb2

from request_fields.parameters import BeamParams
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.features.adapters import UsesAdapter
from scheduler_svc.core.features.beams import Beams
from scheduler_svc.core.features.encoder import EncoderPositions
from scheduler_svc.core.features.inputs import Inputs
from scheduler_svc.core.features.pooled import PooledRequest
from scheduler_svc.core.features.prompt_logprobs import PromptDelivery
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Feature, Features, SequenceGroup, StopCondition
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import CacheGroup


def make_capacity(
    worker_id: str = "w0",
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 256,
    pipeline_depth: int = 1,
    worker_epoch: int = 1,
    attention_window: int | None = None,
    groups: tuple[CacheGroup, ...] = (),
    num_snapshots: int | None = None,
) -> WorkerCapacity:
    """The capacity of a small worker with one step in flight."""
    return WorkerCapacity(
        worker_id=worker_id,
        worker_epoch=worker_epoch,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        pipeline_depth=pipeline_depth,
        attention_window=attention_window,
        groups=groups,
        num_snapshots=num_snapshots,
    )


def make_scheduler(*workers: WorkerCapacity, eos_token_ids: Iterable[int] = (), **config: Any) -> Scheduler:
    """A scheduler with these workers (one default worker if none is given)."""
    scheduler = Scheduler(SchedulerConfig(eos_token_ids=frozenset(eos_token_ids), **config))
    for capacity in workers or (make_capacity(),):
        scheduler.add_worker(capacity)
    return scheduler


def make_group(
    prompt: int | Iterable[int] = 10,
    request_id: str = "r0",
    *,
    max_tokens: int = 16,
    n: int = 1,
    stop_token_ids: Iterable[int] = (),
    ignore_eos: bool = False,
    outputs: Sequence[Iterable[int]] = (),
    **fields: Any,
) -> SequenceGroup:
    """A request. `prompt`: its tokens, or their number (then they are 1, 2, 3, ...). `outputs`: a continuation.
    `fields`: those of the group, or of its features (see `make_features`).
    """
    own = {field.name for field in dataclasses.fields(SequenceGroup)}
    features = make_features(**{name: value for name, value in fields.items() if name not in own})
    fields = {"options": worker_pb2.RowOpen(request_id=request_id)} | {
        name: value for name, value in fields.items() if name in own
    }
    tokens = range(1, prompt + 1) if isinstance(prompt, int) else prompt
    return SequenceGroup(
        request_id=request_id,
        prompt=np.array(list(tokens), dtype=np.uint32),
        stop=StopCondition(max_tokens, frozenset(stop_token_ids), ignore_eos),
        n=n,
        outputs=[np.array(list(output), dtype=np.uint32) for output in outputs],
        features=features,
        **fields,
    )


def make_features(
    *,
    beam_params: BeamParams | None = None,
    num_encoder_tokens: int = 0,
    inputs: Sequence[Any] = (),
    num_input_bytes: int = 0,
    image_work: Sequence[tuple[int, int]] = (),
    prompt_logprobs: int | None = None,
    num_prompt_logprobs: int = 1,
    pooling: PooledRequest | None = None,
    adapter: bytes = b"",
    others: Sequence[Feature] = (),
) -> Features:
    """The features of a request that uses these."""
    features: list[Feature] = [*others]
    if beam_params is not None:
        features.append(Beams(beam_params))
    if num_encoder_tokens:
        features.append(EncoderPositions(num_encoder_tokens))
    if inputs or num_input_bytes:
        features.append(Inputs(inputs, num_input_bytes, image_work=image_work))
    if prompt_logprobs is not None:
        features.append(PromptDelivery(prompt_logprobs, num_prompt_logprobs))
    if pooling is not None:
        features.append(pooling)
    if adapter:
        features.append(UsesAdapter(adapter))
    return Features(*features)


def inputs_in(group: SequenceGroup) -> Sequence[Any]:
    """The inputs of a request besides tokens."""
    found = group.features.find(Inputs)
    return () if found is None else found.items


def answer(scheduler: Scheduler, batch: StepBatch, now: float = 0.0) -> None:
    """Answer a step: each sample gets token 9."""
    rows = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows))
    scheduler.update(StepOutput(batch.step_id, rows, np.full_like(rows, 9), worker_id=batch.worker_id), now)


def run_to_end(scheduler: Scheduler, before_step: Callable[[int], None] = lambda step: None) -> int:
    """Answer every step until no request is left, each sample with token 9. Returns the number of steps."""
    in_flight: list[StepBatch] = []
    num_steps = 0
    while scheduler.has_work:
        before_step(num_steps)
        in_flight += scheduler.schedule(0.0)
        batch = in_flight.pop(0)
        answer(scheduler, batch)
        num_steps += 1
    return num_steps
