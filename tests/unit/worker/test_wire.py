"""Conversions of the worker; tests/contract has the refusals of malformed columns."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from quire.internal.v1 import worker_pb2
from quire.v1 import types_pb2

from request_fields.fields import SamplingParams
from step_protocol.columns import u32_from_bytes, u32_to_bytes
from step_protocol.messages import NO_RULES, StepOutput
from step_protocol.proto import output_to_proto
from step_protocol.types import RowError, RowErrorCode
from svc_common.errors import InvalidRequestError
from tests.contract.worker_fakes import make_info
from worker_svc.seals import Seals
from worker_svc.wire import (
    blocks_to_proto,
    capacity_to_proto,
    pieces,
    records_from_wire,
    records_to_wire,
    step_batch_from_proto,
)

SAMPLING = types_pb2.SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, top_a=0.5, seed=2**64 - 1)


def column(*values: int) -> bytes:
    return u32_to_bytes(np.array(values, dtype=np.uint32))


def test_every_column_arrives() -> None:
    message = worker_pb2.StepBatch(
        step_id=4,
        close_rows=column(9),
        opens=[
            worker_pb2.RowOpen(
                row=1,
                token_ids=column(5, 6),
                prompt_len=1,
                block_table=column(3),
                num_computed_tokens=1,
                sampling=SAMPLING,
                sample_index=2,
            ),
            worker_pb2.RowOpen(row=2, prompt_len=1, sampling=SAMPLING, fork_of_row=0),
        ],
        table_rows=column(1),
        table_indices=column(1),
        table_blocks=column(4),
        copy_src=column(6),
        copy_dst=column(7),
        commit_blocks=column(8, 9),
        commit_hashes=b"a" * 16 + b"b" * 16,
        rows=column(1, 3),
        query_lens=column(2, 1),
        context_lens=column(0, 5),
        sample_mask=b"\0\1",
        slot_mapping=column(12, 13, 20),
        fork_rows=column(2),
        fork_parents=column(0),
    )
    batch = step_batch_from_proto(message)
    lists = {
        name: getattr(batch, name).tolist()
        for name in ("close_rows", "table_rows", "table_indices", "table_blocks", "copy_src", "copy_dst", "rows")
    }
    assert lists == {
        "close_rows": [9],
        "table_rows": [1],
        "table_indices": [1],
        "table_blocks": [4],
        "copy_src": [6],
        "copy_dst": [7],
        "rows": [1, 3],
    }
    assert (batch.query_lens.tolist(), batch.context_lens.tolist()) == ([2, 1], [0, 5])
    assert (batch.sample_mask.tolist(), batch.slot_mapping.tolist()) == ([False, True], [12, 13, 20])
    assert (batch.commit_blocks.tolist(), batch.commit_digests) == ([8, 9], [b"a" * 16, b"b" * 16])
    assert (batch.fork_rows.tolist(), batch.fork_parents.tolist(), batch.step_id) == ([2], [0], 4)
    opened, forked = batch.opens
    assert (opened.row, opened.token_ids.tolist(), opened.block_table.tolist()) == (1, [5, 6], [3])
    assert (opened.prompt_len, opened.num_computed_tokens, opened.sample_index) == (1, 1, 2)
    assert opened.sampling == SamplingParams(0.5, top_k=3, top_p=0.25, min_p=0.125, top_a=0.5, seed=2**64 - 1)
    assert (opened.fork_of_row, forked.fork_of_row, forked.token_ids.tolist()) == (None, 0, [])


def test_empty_columns_mean_all_ones() -> None:
    batch = step_batch_from_proto(
        worker_pb2.StepBatch(step_id=1, rows=column(0, 1), context_lens=column(3, 4), slot_mapping=column(3, 8))
    )
    assert (batch.query_lens.tolist(), batch.sample_mask.tolist()) == ([1, 1], [True, True])


def test_an_empty_batch_is_valid() -> None:
    batch = step_batch_from_proto(worker_pb2.StepBatch(step_id=1))
    assert (len(batch.rows), len(batch.query_lens), len(batch.sample_mask), batch.opens) == (0, 0, 0, [])


def test_unset_sampling_means_the_default() -> None:
    opens = [
        worker_pb2.RowOpen(),
        worker_pb2.RowOpen(sampling=types_pb2.SamplingParams(temperature=0, top_p=0.5, top_k=4, min_p=0.25, seed=9)),
    ]
    unset, given = (item.sampling for item in step_batch_from_proto(worker_pb2.StepBatch(opens=opens)).opens)
    assert (unset.temperature, unset.top_k, unset.top_p, unset.min_p, unset.seed) == (1.0, 0, 1.0, 0.0, 0)
    assert (given.temperature, given.top_k, given.top_p, given.min_p, given.seed) == (0.0, 4, 0.5, 0.25, 9)


def test_banned_ids_arrive() -> None:
    opened = worker_pb2.RowOpen(banned_ids=column(7, 2**32 - 1), banned_before=3)
    [item] = step_batch_from_proto(worker_pb2.StepBatch(opens=[opened])).opens
    assert (item.banned_ids.tolist(), item.banned_before) == ([7, 2**32 - 1], 3)


def test_rules_for_tokens_arrive() -> None:
    sampling = types_pb2.SamplingParams(
        allowed_token_ids=[3, 5], banned_token_ids=[9], logit_bias={5: -1.5, 3: 2}, repetition_penalty=1.5,
        frequency_penalty=0.25, presence_penalty=-0.5,
    )  # fmt: skip
    words = [types_pb2.TokenIds(ids=[3, 5]), types_pb2.TokenIds(ids=[9])]
    opens = [worker_pb2.RowOpen(sampling=sampling, bad_words_ids=words), worker_pb2.RowOpen()]
    given, unset = step_batch_from_proto(worker_pb2.StepBatch(opens=opens)).opens
    rules, params = given.rules, given.sampling
    assert (rules.allowed_ids.tolist(), rules.banned_ids.tolist()) == ([3, 5], [9])
    assert dict(zip(rules.bias_ids.tolist(), rules.biases.tolist(), strict=True)) == {5: -1.5, 3: 2}
    assert [word.tolist() for word in rules.bad_words] == [[3, 5], [9]]
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.5, 0.25, -0.5)
    assert unset.rules is NO_RULES
    params = unset.sampling
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1, 0, 0)


@pytest.mark.parametrize(
    ("row_open", "says"),
    [
        (worker_pb2.RowOpen(token_ids=b"123"), "batch.opens[0].token_ids has 3 bytes"),
        (worker_pb2.RowOpen(block_table=b"1"), "batch.opens[0].block_table has 1 bytes"),
        (worker_pb2.RowOpen(token_ids=column(1), fork_of_row=0), "fork_of_row is 0, expected one of the two"),
    ],
)
def test_a_malformed_open_is_named(row_open: worker_pb2.RowOpen, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        step_batch_from_proto(worker_pb2.StepBatch(opens=[row_open]))
    assert says in caught.value.message
    assert caught.value.field.startswith("batch.opens[0]")


def test_a_sum_beyond_32_bits_does_not_wrap() -> None:
    lens = column(2**31, 2**31)
    with pytest.raises(InvalidRequestError, match="expected 4294967296"):
        step_batch_from_proto(worker_pb2.StepBatch(rows=column(0, 1), query_lens=lens, context_lens=column(0, 0)))


def test_an_answer_carries_tokens_and_errors() -> None:
    output = StepOutput(
        step_id=5,
        rows=np.array([1, 2], np.uint32),
        token_ids=np.array([7, 8], np.uint32),
        errors=[RowError(3, "NaN", RowErrorCode.NAN)],
        forward_us=99,
    )
    message = output_to_proto(output, worker_epoch=6, queue_us=11)
    assert u32_from_bytes(message.rows, "rows").tolist() == [1, 2]
    assert u32_from_bytes(message.token_ids, "token_ids").tolist() == [7, 8]
    assert [(e.row, e.code, e.message) for e in message.errors] == [(3, worker_pb2.ROW_ERROR_CODE_NAN, "NaN")]
    assert (message.step_id, message.worker_epoch, message.queue_us, message.forward_us) == (5, 6, 11, 99)


def test_blocks_are_columns() -> None:
    tokens = np.array([[1, 2], [3, 4]], np.uint32)
    message = blocks_to_proto(np.array([8, 9], np.uint32), [b"a" * 16, b"b" * 16], tokens, Seals())
    assert u32_from_bytes(message.block_ids, "block_ids").tolist() == [8, 9]
    assert message.hashes == b"a" * 16 + b"b" * 16
    assert u32_from_bytes(message.token_ids, "token_ids").tolist() == [1, 2, 3, 4]
    assert message.seals == b""


def test_capacity_has_the_facts_of_the_engine() -> None:
    capacity = capacity_to_proto(make_info(), bundle_digest=b"d" * 16, pipeline_depth=3)
    info = capacity.info
    assert (capacity.num_blocks, capacity.block_size, capacity.max_num_seqs) == (32, 4, 8)
    assert (capacity.max_num_batched_tokens, capacity.pipeline_depth) == (64, 3)
    assert (info.model, info.revision, info.max_model_len, info.vocab_size) == ("tiny", "r1", 64, 211)
    assert (list(info.eos_token_ids), info.bundle_digest, info.block_size) == ([2], b"d" * 16, 4)
    assert (info.max_num_blocks, info.max_num_seqs, info.dtype) == (32, 8, "float32")
    assert info.determinism == types_pb2.DETERMINISM_EXACT
    assert (info.quantization, info.attention_window) == ("", 0)
    other = capacity_to_proto(make_info(quantize="int8", attention_window=9), bundle_digest=b"", pipeline_depth=1)
    assert (other.info.quantization, other.info.attention_window) == ("int8", 9)
    slower = capacity_to_proto(make_info(degradations=("no graphs", "x" * 900)), bundle_digest=b"", pipeline_depth=1)
    assert list(slower.degradations) == ["no graphs", "x" * 500]
    sampling = info.default_sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 20, 0.75, 0.0)
    assert not sampling.HasField("seed")


def test_pieces() -> None:
    assert list(pieces(b"abcde", 2)) == [b"ab", b"cd", b"e"]
    assert list(pieces(b"", 2)) == [b""]


@pytest.mark.parametrize("num_bytes", [0, 1, 127, 128, 1 << 14, (1 << 21) + 3])
def test_records_are_read_as_protobuf_reads_them(num_bytes):
    data = np.random.default_rng(num_bytes).bytes(num_bytes)
    sent = records_to_wire(memoryview(data))
    assert worker_pb2.ReadBlocksResponse.FromString(sent) == worker_pb2.ReadBlocksResponse(data=data)
    assert records_from_wire(sent) == (data, 0)
    message = worker_pb2.ReadBlocksResponse(data=data, num_shared=num_bytes)
    assert records_from_wire(message.SerializeToString()) == (data, num_bytes)
    with pytest.raises(DecodeError):
        records_from_wire(sent + b"\x0a")
