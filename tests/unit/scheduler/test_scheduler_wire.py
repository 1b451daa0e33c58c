"""Conversions and checks, without I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire.v1 import types_pb2

from request_fields.parameters import BeamParams, EarlyStopping
from scheduler_svc.core.features.beams import Beams
from scheduler_svc.core.messages import Deltas, Finished, RowAssignment, split_deltas
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.gateways import wire
from scheduler_svc.gateways.submits import MAX_KEPT, SubmitReader
from scheduler_svc.workers import wire as worker_wire
from step_protocol import columns
from step_protocol.messages import StepBatch
from svc_common.errors import InvalidRequestError, OverloadedError
from tests.builders import make_group
from tests.unit.scheduler.toy_worker import make_info, make_submit

FENCE = worker_pb2.Fence(scheduler_epoch=3, worker_epoch=4)


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def info() -> types_pb2.ModelInfo:
    return make_info(max_num_blocks=40, max_num_seqs=8)


def test_equal_parameters_are_checked_once_and_keep_their_own_seeds() -> None:
    reader = SubmitReader(info())
    first, second, other = (make_submit(handle, [1, 2], max_tokens=9) for handle in range(3))
    second.sampling.seed = 77
    other.sampling.top_k = 3
    groups = [reader.group(submit, owner=0) for submit in (first, second, other)]
    assert groups[0].stop is groups[1].stop
    assert groups[0].stop is not groups[2].stop
    assert [group.options.sampling.seed for group in groups] == [first.sampling.seed, 77, other.sampling.seed]


def test_the_number_of_kept_parameters_is_limited() -> None:
    reader = SubmitReader(info())
    for top_k in range(MAX_KEPT + 50):
        submit = make_submit(1, [1, 2], max_tokens=9)
        submit.sampling.top_k = top_k
        reader.group(submit, owner=0)
        assert len(reader._kept) <= MAX_KEPT


def test_a_row_whose_token_is_outside_the_vocabulary_has_failed() -> None:
    rows, tokens = columns.u32_to_bytes(column(1, 2, 3)), columns.u32_to_bytes(column(9, 8, 2**32 - 1))
    message = worker_pb2.StepOutput(step_id=2, worker_epoch=4, rows=rows, token_ids=tokens)
    output = worker_wire.step_output_from_proto(message, worker_id="w0", worker_epoch=4, step_id=2, vocab_size=9)
    assert (output.rows.tolist(), output.token_ids.tolist()) == ([2], [8])
    assert [(failure.row, failure.message) for failure in output.errors] == [
        (1, "token id 9 is not below vocab_size 9"),
        (3, "token id 4294967295 is not below vocab_size 9"),
    ]


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (worker_pb2.StepOutput(step_id=2, worker_epoch=5), "worker_epoch is 0x5"),
        (worker_pb2.StepOutput(step_id=3, worker_epoch=4), "step 3"),
        (worker_pb2.StepOutput(step_id=2, worker_epoch=4, rows=b"123"), "rows has 3 bytes"),
        (worker_pb2.StepOutput(step_id=2, worker_epoch=4, rows=b"1234"), "1 rows but 0"),
    ],
)
def test_refuses_an_answer_that_breaks_the_protocol(message: worker_pb2.StepOutput, match: str) -> None:
    with pytest.raises(columns.WireError, match=match):
        worker_wire.step_output_from_proto(message, worker_id="w0", worker_epoch=4, step_id=2, vocab_size=9)


def test_reads_a_request() -> None:
    submit = make_submit(
        5,
        [1, 2, 3],
        max_tokens=9,
        n=2,
        priority=-3,
        cache_salt="tenant",
        continuation=types_pb2.Continuation(samples=[types_pb2.SampleState(index=1, output_token_ids=[4, 5])]),
    )
    submit.stop.stop_token_ids.append(7)
    group = SubmitReader(info()).group(submit, owner=2)
    assert (group.owner, group.handle, group.n, group.priority, group.root_key) == (
        2,
        5,
        2,
        -3,
        b"cache_salt:6:tenant|",
    )
    assert group.prompt.tolist() == [1, 2, 3]
    assert (group.stop.max_tokens, group.stop.stop_token_ids) == (9, {7})
    assert [output.tolist() for output in group.outputs] == [[], [4, 5]]
    assert group.options.sampling.seed == 1
    assert (group.tenant_id, group.timeout_s, group.takes_over) == ("", None, False)
    submit.tenant_id, submit.deadline_ms, submit.takes_over = "acme", 1500, True
    group = SubmitReader(info()).group(submit, owner=2)
    assert (group.tenant_id, group.timeout_s, group.takes_over) == ("acme", 1.5, True)


@pytest.mark.parametrize(
    ("stop", "banned"),
    [
        ({}, []),
        ({"min_tokens": 2}, [2, 7, 9]),
        ({"min_tokens": 2, "ignore_eos": True}, [7, 9]),
    ],
)
def test_the_worker_bans_what_would_end_a_sample_too_early(stop: dict[str, Any], banned: list[int]) -> None:
    submit = make_submit(1, [1, 2, 3], max_tokens=8)
    submit.stop.CopyFrom(types_pb2.StopParams(max_tokens=8, stop_token_ids=[9, 7], **stop))
    model = make_info(max_num_blocks=40, max_num_seqs=8, eos_token_ids=[2, 5000])
    group = SubmitReader(model).group(submit, owner=0)
    assert columns.u32_from_bytes(group.options.banned_ids, "banned_ids").tolist() == banned
    assert group.options.banned_before == stop.get("min_tokens", 0)


def test_a_request_that_bans_every_id_is_refused() -> None:
    submit = make_submit(1, [1, 2, 3], max_tokens=8)
    submit.stop.MergeFrom(types_pb2.StopParams(stop_token_ids=range(4), min_tokens=1))
    model = make_info(max_num_blocks=40, max_num_seqs=8, vocab_size=4, eos_token_ids=[])
    with pytest.raises(InvalidRequestError, match=r"bans 4 ids .* at most 3 can be banned"):
        SubmitReader(model).group(submit, owner=0)


Change = Callable[[scheduler_pb2.Submit], object]


def samples(*states: types_pb2.SampleState) -> types_pb2.Continuation:
    return types_pb2.Continuation(samples=states)


def add_bad_words(submit: scheduler_pb2.Submit, *words: list[int]) -> None:
    submit.bad_words_ids.extend(types_pb2.TokenIds(ids=ids) for ids in words)


def test_what_a_request_uses_reaches_the_worker() -> None:
    submit = make_submit(1, [1, 2, 3], max_tokens=8)
    submit.sampling.allowed_token_ids.extend([5, 6])
    submit.sampling.logit_bias[6] = 2.5
    submit.sampling.frequency_penalty = 0.5
    submit.adapter_digest, submit.logprobs = b"d" * 16, 0
    add_bad_words(submit, [5, 6], [6, 6])
    opened = RowAssignment(1, SubmitReader(info()).group(submit, owner=0), 0, column(1, 2, 3), 3, column(7), 0)
    batch = StepBatch(1, column(), column(), column(), np.array([], np.bool_), column(), opens=[opened], worker_id="w0")
    [message] = worker_wire.step_batch_to_proto(batch, FENCE).opens
    assert (message.sampling, message.adapter) == (submit.sampling, submit.adapter_digest)
    assert (message.HasField("logprobs"), message.request_id) == (True, submit.request_id)
    assert [list(word.ids) for word in message.bad_words_ids] == [[5, 6], [6, 6]]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda s: setattr(s, "prompt_token_ids", b"12345"), "prompt_token_ids"),
        (lambda s: s.stop.ClearField("max_tokens"), "stop.max_tokens"),
        (lambda s: setattr(s.stop, "min_tokens", 9), "stop.min_tokens"),
        (lambda s: setattr(s.sampling, "n", 9), "sampling.n"),
        (lambda s: setattr(s.sampling, "n", 0), "sampling.n"),
        (lambda s: s.sampling.ClearField("seed"), "sampling.seed"),
        (lambda s: s.continuation.CopyFrom(samples(types_pb2.SampleState(index=1))), "continuation.samples.index"),
        (
            lambda s: s.continuation.CopyFrom(samples(types_pb2.SampleState(output_token_ids=[1] * 9))),
            "continuation.samples.output_token_ids",
        ),
        (lambda s: s.continuation.CopyFrom(samples(types_pb2.SampleState(finished=True))), "continuation"),
        (lambda s: setattr(s.sampling, "beam_width", 9), "sampling.beam_width"),
        (lambda s: (setattr(s.sampling, "regex", "a"), setattr(s.sampling, "json_schema", "{}")), "sampling.regex"),
        (lambda s: setattr(s, "adapter_digest", b"short"), "adapter_digest"),
        (lambda s: setattr(s, "num_public_tokens", 4), "num_public_tokens"),
        (lambda s: s.pooling.SetInParent(), "pooling"),
        (lambda s: s.encoder.SetInParent(), "encoder"),
    ],
)
def test_refuses_an_invalid_request_with_its_field(change: Change, field: str) -> None:
    submit = make_submit(1, [1, 2, 3], max_tokens=8)
    change(submit)
    with pytest.raises(InvalidRequestError) as caught:
        SubmitReader(info()).group(submit, owner=0)
    assert caught.value.field == field


def test_a_beam_search_ignores_the_output_of_its_client() -> None:
    submit = make_submit(1, [1, 2, 3], max_tokens=8)
    submit.sampling.beam_width, submit.sampling.n, submit.sampling.length_penalty = 3, 2, 0.5
    submit.sampling.early_stopping = types_pb2.EARLY_STOPPING_NEVER
    submit.continuation.samples.add(index=0, output_token_ids=[4, 5], finished=True)
    submit.continuation.samples.add(index=1, output_token_ids=[4])
    group = SubmitReader(info()).group(submit, owner=0)
    beams = group.features.find(Beams)
    assert beams is not None
    assert beams.params == BeamParams(3, 2, 0.5, EarlyStopping.NEVER)
    assert (group.n, group.num_sequences, group.outputs, group.finished_samples) == (2, 3, (), frozenset())


def test_refuses_more_beams_than_rows() -> None:
    submit = make_submit(1, [1])
    submit.sampling.beam_width = info().max_num_seqs + 1
    with pytest.raises(InvalidRequestError) as caught:
        SubmitReader(info()).group(submit, owner=0)
    assert caught.value.field == "sampling.beam_width"


def finished(owner: int, handle: int, **fields: object) -> Finished:
    group = make_group(4, owner=owner, handle=handle)
    return Finished(group, 0, FinishReason.STOP, 3, 2, 1, 5, **fields)  # type: ignore[arg-type]


def test_deltas_are_split_by_owner_and_merged_in_order() -> None:
    first = Deltas(column(1, 2), column(5, 6), column(0, 1), column(0, 0), column(7, 8), [finished(2, 6)])
    parts = split_deltas(first)
    assert parts[1].handles.tolist() == [5]
    assert parts[1].finished == []
    assert parts[2].sample_indices.tolist() == [1]
    later = Deltas(column(2), column(9), column(0), column(1), column(3), [])
    message = wire.deltas_to_proto([parts[2], later])
    assert columns.u32_from_bytes(message.handles, "handles").tolist() == [6, 9]
    assert columns.u32_from_bytes(message.sample_indices, "sample_indices").tolist() == [1, 0]
    assert len(message.finished) == 1


def test_refusals_have_code_field_and_retry_delay() -> None:
    refusal = wire.refusal_to_proto(OverloadedError("full", field="f", retry_after_s=0.25))
    assert (refusal.code, refusal.message, refusal.field, refusal.retry_after_ms) == (8, "full", "f", 250)
    assert wire.refusal_to_proto(InvalidRequestError("bad")).retry_after_ms == 0


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (worker_pb2.ListBlocksResponse(block_ids=b"\1\0\0\0", hashes=b"x" * 15, token_ids=b"\0" * 16), "15 bytes"),
        (worker_pb2.ListBlocksResponse(block_ids=b"\1\0\0\0", hashes=b"x" * 16, token_ids=b"\0" * 12), "3 token_ids"),
        (worker_pb2.ListBlocksResponse(block_ids=b"\x40\0\0\0", hashes=b"x" * 16, token_ids=b"\0" * 16), "contains 64"),
    ],
)
def test_refuses_invalid_cached_blocks(message: worker_pb2.ListBlocksResponse, match: str) -> None:
    with pytest.raises(columns.WireError, match=match):
        worker_wire.cached_blocks_from_proto([message], block_size=4, num_blocks=64)


def test_the_salt_covers_what_kv_depends_on() -> None:
    salts = {
        worker_wire.root_salt(make_info(**change))
        for change in (
            {},
            {"revision": "r2"},
            {"dtype": "bfloat16"},
            {"determinism": types_pb2.DETERMINISM_BEST_EFFORT},
        )
    }
    assert len(salts) == 4
