"""Steps and answers through the worker protocol: one service reads exactly the other's message."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.internal.v1 import worker_pb2

from step_protocol.columns import WireError
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
from step_protocol.proto import CHANGES, batch_from_proto, batch_to_proto, output_from_proto, output_to_proto
from step_protocol.types import RowError, RowErrorCode

IDS = st.integers(0, 2**32 - 1)
ONE_SIDE_ONLY = {"worker_id", "is_decode", "then", "opens", "draft_lens"}


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def id_columns(num: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(IDS, min_size=num, max_size=num).map(lambda values: u32(*values))


@st.composite
def batches(draw: st.DrawFn) -> StepBatch:
    num_rows = draw(st.integers(0, 3))
    query_lens = draw(st.lists(st.integers(1, 3), min_size=num_rows, max_size=num_rows))
    batch = StepBatch(
        step_id=draw(st.integers(0, 2**64 - 1)),
        rows=draw(id_columns(num_rows)),
        query_lens=u32(*query_lens),
        context_lens=draw(id_columns(num_rows)),
        sample_mask=np.array(draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)), np.bool_),
        slot_mapping=draw(id_columns(sum(query_lens))),
    )
    if length := draw(st.integers(0, 2)):
        batch.add(BeamMoves(*(draw(id_columns(length)) for _ in BeamMoves.FIELDS)))
    if count := draw(st.integers(0, 2)):
        batch.add(ImageSteps(tuple(ImageWork(draw(IDS), draw(IDS), 1, 2) for _ in range(count))))
    if length := draw(st.integers(0, 2)):
        batch.add(TakenSnapshots(*(draw(id_columns(length)) for _ in TakenSnapshots.FIELDS)))
    for names in CHANGES:
        length = draw(st.integers(0, 2))
        for name in names if length else ():
            setattr(batch, name, draw(id_columns(length)))
    if num_rows and draw(st.booleans()):
        batch.max_query_lens = u32(*(draw(st.integers(0, 9)) if length == 1 else 0 for length in query_lens))
    batch.commit_digests = [draw(st.binary(min_size=16, max_size=16)) for _ in batch.commit_blocks]
    return batch


def plain(value: Any) -> Any:
    """A message with lists in place of arrays, so that it can be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def sent(batch: StepBatch) -> StepBatch:
    message = worker_pb2.StepBatch()
    batch_to_proto(batch, message)
    return batch_from_proto(worker_pb2.StepBatch.FromString(message.SerializeToString()))


@given(batches())
def test_a_step_arrives_as_it_was_sent(batch: StepBatch) -> None:
    assert plain(sent(batch)) == plain(batch)


def test_the_test_above_fills_every_column() -> None:
    always = {"step_id", "rows", "query_lens", "context_lens", "sample_mask", "slot_mapping"}
    sometimes = {"commit_digests", "parts", "max_query_lens", *(name for group in CHANGES for name in group)}
    assert {field.name for field in fields(StepBatch)} == always | sometimes | ONE_SIDE_ONLY


PROMPT = LogprobColumns(u32(1), np.array([-3], np.float32), u32(6), u32(2))
ANSWER = StepOutput(
    step_id=5,
    rows=u32(1, 2),
    token_ids=u32(7, 2**32 - 1, 8),
    token_lens=u32(1, 2),
    draft_lens=u32(0, 4),
    errors=[RowError(3, "NaN", RowErrorCode.NAN), RowError(4, "", RowErrorCode.INTERNAL)],
    forward_us=99,
    logprobs=LogprobColumns(u32(2, 0, 0), np.array([-1, -2], np.float32), u32(7, 8), u32(1)),
    parts=(
        PromptLogprobs(u32(1), u32(4), PROMPT),
        BeamCandidates(u32(1, 1), u32(9, 8), np.array([-0.5, -0.75], np.float32)),
        PooledRows(u32(6), u32(2), np.array([1, 2], np.float32)),
    ),
)
BARE = StepOutput(step_id=6, rows=u32(), token_ids=u32())


@pytest.mark.parametrize("output", [ANSWER, BARE])
def test_an_answer_arrives_as_it_was_sent(output: StepOutput) -> None:
    message = output_to_proto(output, worker_epoch=6, queue_us=11)
    assert (message.worker_epoch, message.queue_us) == (6, 11)
    assert plain(output_from_proto(message)) == plain(output)


GROUPS = (*CHANGES, BeamMoves.FIELDS, TakenSnapshots.FIELDS)
FOLLOWERS = [(names[0], name) for names in GROUPS for name in names[1:]]


@pytest.mark.parametrize(("first", "name"), FOLLOWERS)
def test_columns_of_different_length_are_refused(first: str, name: str) -> None:
    others = {other: u32(1, 2).tobytes() for group in GROUPS if group[0] == first for other in group}
    for columns in (others | {name: u32(1).tobytes()}, {name: u32(1).tobytes()}):
        with pytest.raises(WireError, match=name) as caught:
            batch_from_proto(worker_pb2.StepBatch(**columns))
        assert caught.value.field in others


MALFORMED = {
    "query_lens": {"query_lens": u32(1, 1).tobytes()},
    "context_lens": {"context_lens": b""},
    "sample_mask": {"sample_mask": b"\1\1"},
    "slot_mapping": {"slot_mapping": u32(1, 2).tobytes()},
    "commit_hashes": {"commit_blocks": u32(1).tobytes(), "commit_hashes": b"short"},
    "close_rows": {"close_rows": b"123"},
    "images": {"images": u32(1, 2, 3).tobytes()},
    "max_query_lens": {"max_query_lens": u32(1, 1).tobytes()},
}


@pytest.mark.parametrize("field", MALFORMED)
def test_a_malformed_column_is_named(field: str) -> None:
    good = {"rows": u32(0).tobytes(), "context_lens": u32(3).tobytes(), "slot_mapping": u32(3).tobytes()}
    with pytest.raises(WireError, match=field) as caught:
        batch_from_proto(worker_pb2.StepBatch(**(good | MALFORMED[field])))  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("token_ids", u32(7), "2 rows but 1 token_ids"),
        (
            "parts",
            (BeamCandidates(u32(1, 1), u32(9), np.zeros(2, np.float32)),),
            "candidate_ids has 1 items, expected 2",
        ),
        ("parts", (PooledRows(u32(6), u32(3), np.zeros(2, np.float32)),), "pooled_values has 2 items, expected 3"),
        ("parts", (PromptLogprobs(u32(1, 2), u32(4), PROMPT),), "prompt_positions has 1 items, expected 2"),
        ("logprobs", LogprobColumns(u32(2, 0), np.zeros(2, np.float32), u32(7, 8), u32()), "0 ranks; expected 3, 2, 2"),
        ("logprobs", LogprobColumns(u32(2), np.zeros(2, np.float32), u32(7, 8), u32(1)), "1 lens"),
    ],
)
def test_an_answer_whose_columns_disagree_is_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(WireError, match=says):
        output_from_proto(output_to_proto(replace(ANSWER, **{name: value}), worker_epoch=0, queue_us=0))


def test_an_unknown_row_error_of_a_newer_worker_is_an_internal_one() -> None:
    errors = [worker_pb2.RowError(row=4, code=99, message="new")]  # type: ignore[arg-type]
    assert output_from_proto(worker_pb2.StepOutput(errors=errors)).errors == [RowError(4, "code 99: new")]
