"""Messages of rank 0 reach the other ranks unchanged."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from multiprocessing import Pipe

import numpy as np
import pytest
import torch

from request_fields.fields import SamplingParams
from request_fields.parameters import Grammar, GrammarKind
from step_protocol.messages import RowOpen, StepBatch, TokenRules
from step_protocol.types import CarriedInput, Pooling, PoolingKind, PoolingTask
from tests.carried import random_embeddings
from worker_svc.engine.backend import Adapter, AdapterPart, Module
from worker_svc.engine.gpu import messages
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.messages import RESET_ROWS, STOP, step_from_bytes, step_to_bytes

GREEDY = SamplingParams(0.0, 0, 1.0, 0.0, 0)


def columns(*lengths):
    return (np.arange(length, dtype=np.uint32) + 2**31 for length in lengths)


def full_batch():
    prompt, table, more = columns(7, 2, 1)
    opens = [
        RowOpen(
            3,
            prompt,
            7,
            table,
            4,
            SamplingParams(0.7, 2**31, 0.9, 0.05, 2**64 - 1, 1.25, -0.5, 2.0),
            2**32 - 1,
            banned_ids=more,
            banned_before=9,
            rules=TokenRules(
                allowed_ids=prompt,
                banned_ids=more,
                bad_words=(prompt, table),
                bias_ids=table,
                biases=np.array([1.5, -100], np.float32),
            ),
            grammar=Grammar(GrammarKind.LARK, 'start: "é"'),
            adapter=bytes(range(16)),
        ),
        RowOpen(4, prompt[:0], 5, more, 5, GREEDY, 1, fork_of_row=0, num_candidates=2**31),
        RowOpen(5, prompt, 7, more, 0, GREEDY, 0, pooling=Pooling(PoolingTask.LOGITS, token_ids=table)),
        RowOpen(6, prompt, 7, more, 0, GREEDY, 0, pooling=Pooling(PoolingTask.VECTOR, PoolingKind.CLS, True, 9)),
        RowOpen(7, prompt, 7, more, 0, GREEDY, 0, inputs=(random_embeddings(2, 3), random_embeddings(1, 3, start=5))),
    ]
    rows, lens, contexts, slots, close, *table_changes = columns(3, 3, 3, 9, 1, 2, 2, 2)
    copies = list(columns(2, 2, 1))
    return StepBatch(
        2**40, rows, lens, contexts, np.array([True, False, True]), slots, close, opens, *table_changes, *copies,
        [b"h" * 16], *columns(1, 1),
    )  # fmt: skip


def plain(value):
    """A comparable form: arrays as lists with their dtype."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    is_record = isinstance(value, RowOpen | TokenRules | Pooling | CarriedInput)
    return {f.name: plain(getattr(value, f.name)) for f in fields(value)} if is_record else value


@pytest.mark.parametrize("batch", [full_batch(), StepBatch(1, *columns(0, 0, 0), np.empty(0, np.bool_), *columns(0))])
def test_a_step_round_trips(batch):
    found = step_from_bytes(step_to_bytes(batch))
    for field in fields(StepBatch):
        assert plain(getattr(found, field.name)) == plain(getattr(batch, field.name)), field.name


def test_an_adapter_round_trips_in_pieces(monkeypatch):
    modules = [Module(11, 0, 0, 4, 8), Module(2, 1, 0, 8, 4), Module(2, 0, 4, 4, 8)]
    parts = [AdapterPart(m, torch.rand(3, m.num_inputs), torch.rand(m.num_outputs, 3)) for m in sorted(modules)]
    adapter = Adapter(b"d" * 16, 3, tuple(parts))
    monkeypatch.setattr(messages, "PIECE_BYTES", 100)
    pieces = [messages.adapter_piece(message) for message in messages.adapter_pieces(adapter)]
    assert len(pieces) > 2
    assert {digest for digest, _ in pieces} == {adapter.digest}
    found = messages.adapter_from_bytes(adapter.digest, b"".join(piece for _, piece in pieces))
    assert (found.digest, found.max_rank) == (adapter.digest, 3)
    for part, expected in zip(found.parts, adapter.parts, strict=True):
        assert part.module == expected.module
        assert torch.equal(part.a, expected.a)
        assert torch.equal(part.b, expected.b)


def test_messages_of_all_lengths_arrive():
    pipes = [Pipe(duplex=False) for _ in range(2)]
    sender = Group(0, 3, outboxes=[outbox for _, outbox in pipes])
    messages = [STOP, RESET_ROWS, b"x", bytes(range(256)) * 64, b"y" * 300_000]  # a pipe holds 64 KiB
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(lambda: [sender.send(message) for message in messages])
        followers = [Group(rank, 3, inbox=inbox) for rank, (inbox, _) in enumerate(pipes, 1)]
        received = [pool.submit(lambda group=group: [group.receive() for _ in messages]) for group in followers]
        sending.result()
        assert [found.result() for found in received] == [messages] * 2
