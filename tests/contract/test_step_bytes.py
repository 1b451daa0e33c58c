"""The bytes of steps and answers that services of other versions read and send: recorded once, in step_bytes.txt.

A line is a name and the message in hexadecimal. A step that uses no feature has no bytes of a feature.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.internal.v1 import encoder_pb2, inputs_pb2, pooling_pb2, worker_pb2
from quire.v1 import types_pb2

from scheduler_svc.core.messages import RowAssignment
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.workers.wire import step_batch_to_proto
from step_protocol.features import (
    BeamCandidates,
    BeamMoves,
    ImageSteps,
    ImageWork,
    LogprobColumns,
    PooledRows,
    PromptLogprobs,
    TakenSnapshots,
)
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.proto import batch_from_proto, output_from_proto, output_to_proto
from step_protocol.types import RowError, RowErrorCode
from tests.builders import make_group

RECORDED = dict(line.split() for line in (Path(__file__).parent / "step_bytes.txt").read_text().splitlines())
FENCE = worker_pb2.Fence(scheduler_epoch=3, worker_epoch=4, nonce=5)
DIGESTS = [b"a" * 16, b"b" * 16]


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def group(traceparent: str = "", **fields: Any) -> SequenceGroup:
    """A request with these fields of its rows."""
    sampling = types_pb2.SamplingParams(seed=9, temperature=0.5, top_p=0.75)
    options = worker_pb2.RowOpen(request_id="request", sampling=sampling, **fields)
    return make_group(3, "request", options=options, traceparent=traceparent)


def opening(made: SequenceGroup, **fields: Any) -> StepBatch:
    """A step that computes the three tokens of a new row."""
    row = RowAssignment(1, made, 0, u32(1, 2, 3), 3, u32(7), 0, **fields)
    return StepBatch(1, u32(1), u32(3), u32(0), np.array([True]), u32(28, 29, 30), opens=[row])


def decode(**fields: Any) -> StepBatch:
    """A step of two rows with one token each."""
    return StepBatch(7, u32(0, 2), u32(1, 1), u32(9, 4), np.array([True, True]), u32(17, 2**32 - 1), **fields)


def forked() -> StepBatch:
    batch = opening(group())
    batch.opens.append(RowAssignment(2, group(), 1, u32(), 3, u32(7), 3, fork_of_row=1))
    batch.fork_rows, batch.fork_parents = u32(2), u32(1)
    return batch


IMAGE = inputs_pb2.CarriedInput(
    kind=inputs_pb2.INPUT_KIND_IMAGE, digest=b"i" * 16, start=1, length=2, dtype=inputs_pb2.INPUT_DTYPE_UINT8,
    shape=[2, 4, 3], data=b"pixels",
)  # fmt: skip
POOLING = pooling_pb2.Pooling(
    task=pooling_pb2.POOLING_TASK_VECTOR, kind=types_pb2.POOLING_KIND_MEAN, normalize=True, dimensions=8
)
ENCODER = encoder_pb2.EncoderInput(
    num_tokens=2,
    allowed=[encoder_pb2.AllowedIds(position=0, ids=[5])],
    banned_ids=[6, 7],
    first_banned_ids=[8],
    first_banned_at=1,
)
WORDS = (types_pb2.TokenIds(ids=[1, 2]), types_pb2.TokenIds(ids=[3]))
PLAIN_STEPS: dict[str, Callable[[], StepBatch]] = {
    "open": lambda: opening(group()),
    "decode": decode,
    "fork": forked,
    "tables": lambda: decode(
        close_rows=u32(5),
        table_rows=u32(0),
        table_indices=u32(1),
        table_blocks=u32(8),
        copy_src=u32(3),
        copy_dst=u32(4),
        commit_blocks=u32(4, 5),
        commit_digests=DIGESTS,
    ),
    "min-tokens": lambda: opening(group(banned_ids=u32(2).tobytes(), banned_before=4)),
}
STEPS: dict[str, Callable[[], StepBatch]] = PLAIN_STEPS | {
    "bad-words": lambda: opening(group(bad_words_ids=WORDS)),
    "logprobs": lambda: opening(group(logprobs=2), prompt_logprobs=1),
    "pooling": lambda: opening(group(pooling=POOLING)),
    "encoder": lambda: opening(group(encoder=ENCODER)),
    "images": lambda: opening(group(images=u32(1, 1, 2).tobytes()), inputs=[IMAGE]),
    "adapter": lambda: opening(group(adapter=b"d" * 16)),
    "snapshot": lambda: opening(group(), snapshot=6),
    "groups": lambda: opening(group(), group_tables=(u32(70), u32(90))),
    "beam": lambda: opening(group(), num_candidates=4),
    "trace": lambda: opening(group(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")),
    "beam-moves": lambda: decode(parts=(BeamMoves(u32(0, 2), u32(2, 2), u32(8, 9)),)),
    "snapshots": lambda: decode(parts=(TakenSnapshots(u32(0), u32(10), u32(3)),)),
    "image-work": lambda: decode(parts=(ImageSteps((ImageWork(0, 1, 2, 4),)),)),
    "drafts": lambda: decode(max_query_lens=u32(0, 4)),
}
LOGPROBS = LogprobColumns(u32(2, 0), f32(-1, -2), u32(7, 8), u32(1))
PROCESSED = LogprobColumns(u32(1), f32(-1), u32(7), u32(1), f32(-3), u32(5), np.array([2**63 + 1], np.uint64))


def answer(**fields: Any) -> StepOutput:
    return StepOutput(7, u32(0, 2), u32(11, 2**32 - 1), forward_us=99, **fields)


ANSWERS: dict[str, Callable[[], StepOutput]] = {
    "answer": answer,
    "answer-errors": lambda: answer(errors=[RowError(3, "NaN", RowErrorCode.NAN), RowError(4, "")]),
    "answer-logprobs": lambda: answer(logprobs=LOGPROBS),
    "answer-prompt-logprobs": lambda: answer(parts=(PromptLogprobs(u32(1), u32(4), PROCESSED),)),
    "answer-beams": lambda: answer(parts=(BeamCandidates(u32(0, 0), u32(9, 8), f32(-0.5, -0.75)),)),
    "answer-pooled": lambda: answer(parts=(PooledRows(u32(6), u32(2), f32(1, 2)),)),
    "answer-drafts": lambda: StepOutput(
        7, u32(0, 2), u32(11, 12, 13), token_lens=u32(1, 2), draft_lens=u32(0, 4), forward_us=99
    ),
}


def step_bytes(batch: StepBatch) -> bytes:
    return step_batch_to_proto(batch, FENCE).SerializeToString(deterministic=True)


def answer_bytes(output: StepOutput) -> bytes:
    return output_to_proto(output, worker_epoch=4, queue_us=6).SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_the_recorded_bytes(name: str) -> None:
    assert step_bytes(STEPS[name]()).hex() == RECORDED[name]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_recorded_bytes(name: str) -> None:
    assert answer_bytes(ANSWERS[name]()).hex() == RECORDED[name]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_recorded_answer_is_read_as_it_was_meant(name: str) -> None:
    read = output_from_proto(worker_pb2.StepOutput.FromString(bytes.fromhex(RECORDED[name])))
    assert answer_bytes(read).hex() == RECORDED[name]


@pytest.mark.parametrize("name", STEPS)
def test_a_recorded_step_is_read_as_it_was_meant(name: str) -> None:
    """Its opens are another type in the scheduler, so only their number is compared here."""
    message = worker_pb2.StepBatch.FromString(bytes.fromhex(RECORDED[name]))
    read = batch_from_proto(message)
    assert len(read.opens) == len(message.opens)
    read.opens = []
    written = worker_pb2.StepBatch.FromString(step_bytes(read))
    for field in ("opens", "traces"):
        message.ClearField(field)
    assert written == message


def test_every_line_is_tested() -> None:
    assert list(RECORDED) == [*STEPS, *ANSWERS]
