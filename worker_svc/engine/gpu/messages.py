"""Messages of rank 0 to the other ranks, as bytes: a step, adapters for it, close all rows, or stop.

    kind | step id, number of entries of each column, of hashes, of opens | columns | mask | hashes | opens
    kind | digest | a piece of the adapter's matrices
    kind | digests of the adapters that rows of the next step may open with

Columns are uint32, little-endian. An open is a record of fixed size followed by its tokens, block table, banned ids,
token rules, grammar, pooling and inputs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from request_fields.fields import SAMPLER_FIELDS, SamplingParams
from request_fields.fields import Kind as FieldKind
from request_fields.grammar import Grammar, GrammarKind
from step_protocol.columns import U32
from step_protocol.messages import CarriedInput, Pooling, PoolingKind, PoolingTask, RowOpen, StepBatch, TokenRules
from worker_svc.engine.adapters.adapter import Adapter, AdapterPart
from worker_svc.engine.adapters.targets import Module
from worker_svc.engine.decoder.block_contents import HASH_BYTES

COLUMNS = (
    "rows", "query_lens", "context_lens", "slot_mapping", "close_rows", "table_rows", "table_indices", "table_blocks",
    "copy_src", "copy_dst", "commit_blocks", "fork_rows", "fork_parents", "beam_rows", "beam_parents", "beam_tokens",
)  # fmt: skip
HEAD = struct.Struct(f"<BQ{len(COLUMNS) + 2}I")
CODES = {FieldKind.FLOAT: "d", FieldKind.UINT32: "I", FieldKind.UINT64: "Q"}
# row, parent (-1: none), prompt_len, computed, sample index, the fields of SamplingParams, logprobs and prompt_logprobs
# (-1: none), number of candidates, banned before, and the
# numbers of tokens, blocks, banned ids, allowed ids, ids that are always banned, biases, and bad words; then the digest
# of the adapter (zeros: none)
OPEN = struct.Struct(f"<IqIII{''.join(CODES[field.kind] for field in SAMPLER_FIELDS.values())}iiII7I{HASH_BYTES}s")


POOLING = struct.Struct("<BB?3I")  # task, kind, normalize, dimensions, number of token ids, second text
INPUT = struct.Struct("<II4I")  # start, length, numbers of dimensions and of bytes of kind, dtype and digest
POOLING_TASKS, POOLING_KINDS, NO_POOLING = tuple(PoolingTask), tuple(PoolingKind), 255
PIECE_BYTES = 64 << 20
GRAMMAR = struct.Struct("<BI")  # kind, bytes of the text
GRAMMAR_KINDS, NO_GRAMMAR = tuple(GrammarKind), 255


class MessageKind(IntEnum):
    """The first byte of a message."""

    STOP = 0
    RESET_ROWS = 1
    STEP = 2
    ADAPTER_PIECE = 3
    ADAPTERS = 4


STOP, RESET_ROWS = bytes([MessageKind.STOP]), bytes([MessageKind.RESET_ROWS])


def step_to_bytes(batch: StepBatch) -> bytes:
    """The batch must have been checked."""
    columns = [getattr(batch, name) for name in COLUMNS]
    counts = [*map(len, columns), len(batch.commit_digests), len(batch.opens)]
    parts = [HEAD.pack(MessageKind.STEP, batch.step_id, *counts)]
    parts += map(_words, columns)
    parts += [batch.sample_mask.tobytes(), *batch.commit_digests]
    for item in batch.opens:
        rules = item.rules
        parts += [_open_to_bytes(item), *map(_words, (item.token_ids, item.block_table, item.banned_ids))]
        parts += map(_words, (rules.allowed_ids, rules.banned_ids, rules.bias_ids))
        parts.append(rules.biases.astype("<f4", copy=False).tobytes())
        for word in rules.bad_words:
            parts += [len(word).to_bytes(4, "little"), _words(word)]
        parts += [_grammar_to_bytes(item.grammar), _pooling_to_bytes(item.pooling)]
        parts.append(len(item.inputs).to_bytes(4, "little"))
        for carried in item.inputs:
            parts += _input_to_parts(carried)
    return b"".join(parts)


def step_from_bytes(message: bytes) -> StepBatch:
    """The inverse of `step_to_bytes`."""
    _, step_id, *counts, num_hashes, num_opens = HEAD.unpack_from(message)
    reader = _MessageReader(message, HEAD.size)
    columns: dict[str, Any] = {name: reader.words(count) for name, count in zip(COLUMNS, counts, strict=True)}
    mask = np.frombuffer(reader.take(len(columns["rows"])), np.bool_)
    hashes = [reader.take(HASH_BYTES) for _ in range(num_hashes)]
    opens = [reader.open() for _ in range(num_opens)]
    return StepBatch(step_id=step_id, sample_mask=mask, commit_digests=hashes, opens=opens, **columns)


def adapter_pieces(adapter: Adapter) -> Iterator[bytes]:
    """Messages with the matrices of an adapter."""
    tensors: dict[str, torch.Tensor] = {}
    for part in adapter.parts:
        name = ".".join(map(str, part.module))
        tensors |= {f"{name}.a": part.a.contiguous(), f"{name}.b": part.b.contiguous()}
    content = memoryview(save(tensors))
    for begin in range(0, len(content), PIECE_BYTES):
        yield b"".join((bytes([MessageKind.ADAPTER_PIECE]), adapter.digest, content[begin : begin + PIECE_BYTES]))


def adapter_piece(message: bytes) -> tuple[bytes, bytes]:
    """The digest and the piece of a message."""
    return message[1 : 1 + HASH_BYTES], message[1 + HASH_BYTES :]


def adapter_from_bytes(digest: bytes, content: bytes) -> Adapter:
    """The adapter of which `content` are all pieces."""
    tensors = load(content)
    modules = sorted({Module(*map(int, name.split(".")[:-1])) for name in tensors})
    names = {module: ".".join(map(str, module)) for module in modules}
    parts = [AdapterPart(module, tensors[f"{name}.a"], tensors[f"{name}.b"]) for module, name in names.items()]
    return Adapter(digest, max(len(part.a) for part in parts), tuple(parts))


def adapters_to_bytes(digests: Sequence[bytes]) -> bytes:
    return bytes([MessageKind.ADAPTERS]) + b"".join(digests)


def adapters_from_bytes(message: bytes) -> list[bytes]:
    """The digests of the adapters."""
    return [message[begin : begin + HASH_BYTES] for begin in range(1, len(message), HASH_BYTES)]


def _words(column: U32) -> bytes:
    return column.astype("<u4", copy=False).tobytes()


def _open_to_bytes(item: RowOpen) -> bytes:
    parent, rules = -1 if item.fork_of_row is None else item.fork_of_row, item.rules
    return OPEN.pack(
        item.row, parent, item.prompt_len, item.num_computed_tokens, item.sample_index,
        *(getattr(item.sampling, name) for name in SAMPLER_FIELDS),
        *(-1 if num_top is None else num_top for num_top in (item.logprobs, item.prompt_logprobs)),
        item.num_candidates, item.banned_before, len(item.token_ids), len(item.block_table), len(item.banned_ids),
        len(rules.allowed_ids), len(rules.banned_ids), len(rules.bias_ids), len(rules.bad_words), item.adapter,
    )  # fmt: skip


def _grammar_to_bytes(grammar: Grammar | None) -> bytes:
    if grammar is None:
        return GRAMMAR.pack(NO_GRAMMAR, 0)
    text = grammar.text.encode()
    return GRAMMAR.pack(GRAMMAR_KINDS.index(grammar.kind), len(text)) + text


def _pooling_to_bytes(pooling: Pooling | None) -> bytes:
    if pooling is None:
        return POOLING.pack(NO_POOLING, 0, False, 0, 0, 0)
    head = POOLING.pack(
        POOLING_TASKS.index(pooling.task), POOLING_KINDS.index(pooling.kind), pooling.normalize, pooling.dimensions,
        len(pooling.token_ids), pooling.second_text,
    )  # fmt: skip
    return head + _words(pooling.token_ids)


def _input_to_parts(item: CarriedInput) -> list[bytes]:
    texts = item.kind.encode(), item.dtype.encode(), item.digest
    head = INPUT.pack(item.start, item.length, len(item.shape), *map(len, texts))
    return [head, *texts, np.array(item.shape, "<u4").tobytes(), len(item.data).to_bytes(8, "little"), item.data]


class _MessageReader:
    """Reads a message from front to back."""

    def __init__(self, message: bytes, place: int) -> None:
        self._message = message
        self._place = place

    def take(self, size: int) -> bytes:
        self._place += size
        return self._message[self._place - size : self._place]

    def words(self, count: int) -> U32:
        return np.frombuffer(self.take(4 * count), "<u4")

    def open(self) -> RowOpen:
        row, parent, prompt_len, num_computed, sample_index, *values, adapter = OPEN.unpack(self.take(OPEN.size))
        *sampling, logprobs, prompt_logprobs, num_candidates, banned_before = values[:-7]
        num_tokens, num_blocks, num_banned = values[-7:-4]
        return RowOpen(
            row=row,
            token_ids=self.words(num_tokens),
            prompt_len=prompt_len,
            block_table=self.words(num_blocks),
            num_computed_tokens=num_computed,
            sampling=SamplingParams(*sampling),
            sample_index=sample_index,
            fork_of_row=None if parent < 0 else parent,
            banned_ids=self.words(num_banned),
            banned_before=banned_before,
            rules=self.rules(*values[-4:]),
            logprobs=None if logprobs < 0 else logprobs,
            prompt_logprobs=None if prompt_logprobs < 0 else prompt_logprobs,
            num_candidates=num_candidates,
            grammar=self.grammar(),
            pooling=self.pooling(),
            inputs=tuple(self.input() for _ in range(int(self.words(1)[0]))),
            adapter=adapter if any(adapter) else b"",
        )

    def grammar(self) -> Grammar | None:
        kind, size = GRAMMAR.unpack(self.take(GRAMMAR.size))
        text = self.take(size).decode()
        return None if kind == NO_GRAMMAR else Grammar(GRAMMAR_KINDS[kind], text)

    def pooling(self) -> Pooling | None:
        task, kind, normalize, dimensions, num_ids, second_text = POOLING.unpack(self.take(POOLING.size))
        if task == NO_POOLING:
            return None
        ids = self.words(num_ids)
        return Pooling(POOLING_TASKS[task], POOLING_KINDS[kind], normalize, dimensions, ids, second_text)

    def input(self) -> CarriedInput:
        start, length, num_dimensions, *sizes = INPUT.unpack(self.take(INPUT.size))
        kind, dtype, digest = map(self.take, sizes)
        shape = tuple(self.words(num_dimensions).tolist())
        data = self.take(int.from_bytes(self.take(8), "little"))
        return CarriedInput(kind.decode(), digest, start, length, dtype.decode(), shape, data)

    def rules(self, num_allowed: int, num_banned: int, num_biases: int, num_bad_words: int) -> TokenRules:
        return TokenRules(
            allowed_ids=self.words(num_allowed),
            banned_ids=self.words(num_banned),
            bias_ids=self.words(num_biases),
            biases=np.frombuffer(self.take(4 * num_biases), "<f4"),
            bad_words=tuple(self.words(int(self.words(1)[0])) for _ in range(num_bad_words)),
        )
