"""Conversions of the worker; tests/contract has the refusals of malformed columns."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from quire.internal.v1 import worker_pb2

from step_protocol.columns import u32_to_bytes
from svc_common.errors import InvalidRequestError
from worker_svc.wire import (
    pieces,
    records_from_wire,
    records_to_wire,
    step_batch_from_proto,
)


def column(*values: int) -> bytes:
    return u32_to_bytes(np.array(values, dtype=np.uint32))


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
