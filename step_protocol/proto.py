"""Steps and their answers as messages of the worker protocol: the scheduler writes what the worker reads, and reversed.

Columns are read-only views of a message, without a copy. Only the form is checked here: a column has whole items, and
as many as the column that it belongs to. A message that fails here changes nothing. The engine checks rows, blocks and
slots against its pool; the scheduler checks answers against the step that it sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from quire.internal.v1 import pooling_pb2, worker_pb2
from quire.v1 import types_pb2

from request_fields import checks
from request_fields.fields import FieldError, has_grammar, sampling_params
from request_fields.parameters import Grammar, grammar_of
from step_protocol.columns import (
    EMPTY,
    U32,
    Bools,
    WireError,
    by_field,
    parts_of,
    u32_column,
    u32_from_bytes,
    u32_to_bytes,
)
from step_protocol.features import ANSWER_PARTS, STEP_PARTS, LogprobColumns, ThinkingBudget
from step_protocol.messages import NO_RULES, ImageSpan, RowOpen, StepBatch, StepOutput, TokenRules
from step_protocol.types import (
    POOLING_KINDS,
    POOLING_TASKS,
    ROW_ERROR_CODES,
    CarriedInput,
    EncoderInput,
    Pooling,
    RowError,
)

DIGEST_BYTES = 16

# Columns that are empty in most steps, in groups of equal length.
CHANGES = (
    ("close_rows",), ("table_rows", "table_indices", "table_blocks"), ("copy_src", "copy_dst"), ("commit_blocks",),
    ("fork_rows", "fork_parents"),
)  # fmt: skip
STEP_FIELDS, ANSWER_FIELDS = by_field(STEP_PARTS), by_field(ANSWER_PARTS)
ROW_ERROR_NUMBERS = {code: worker_pb2.RowErrorCode.ValueType(number) for number, code in ROW_ERROR_CODES.items()}


# -- steps -----------------------------------------------------------------------------------------------------------


def batch_to_proto(batch: StepBatch, message: worker_pb2.StepBatch) -> None:
    """Fills a message with a step, except for its fence, opens and tags. Written out, because every step costs it."""
    message.step_id = batch.step_id
    message.rows = u32_to_bytes(batch.rows)
    message.context_lens = u32_to_bytes(batch.context_lens)
    message.slot_mapping = u32_to_bytes(batch.slot_mapping)
    if len(batch.slot_mapping) > len(batch.rows):  # some row computes several tokens
        message.query_lens = u32_to_bytes(batch.query_lens)
    if batch.max_query_lens is not None:
        message.max_query_lens = u32_to_bytes(batch.max_query_lens)
    if not batch.is_decode and np.count_nonzero(batch.sample_mask) < len(batch.sample_mask):
        message.sample_mask = batch.sample_mask.tobytes()
    if batch.close_rows is not EMPTY:
        message.close_rows = u32_to_bytes(batch.close_rows)
    if batch.table_rows is not EMPTY:
        message.table_rows = u32_to_bytes(batch.table_rows)
        message.table_indices = u32_to_bytes(batch.table_indices)
        message.table_blocks = u32_to_bytes(batch.table_blocks)
    if batch.copy_src is not EMPTY:
        message.copy_src = u32_to_bytes(batch.copy_src)
        message.copy_dst = u32_to_bytes(batch.copy_dst)
    if batch.commit_blocks is not EMPTY:
        message.commit_blocks = u32_to_bytes(batch.commit_blocks)
    if batch.fork_rows is not EMPTY:
        message.fork_rows = u32_to_bytes(batch.fork_rows)
        message.fork_parents = u32_to_bytes(batch.fork_parents)
    if batch.commit_digests:
        message.commit_hashes = b"".join(batch.commit_digests)
    for part in batch.parts:
        part.write(message)


def batch_from_proto(message: worker_pb2.StepBatch) -> StepBatch:
    """One step for the engine. WireError names the column, its value and the expected one."""
    rows = u32_from_bytes(message.rows, "rows")
    query_lens = _query_lens(message.query_lens, len(rows))
    num_tokens = int(query_lens.sum(dtype=np.uint64))
    changes: dict[str, Any] = _changes(message)
    return StepBatch(
        step_id=message.step_id,
        rows=rows,
        query_lens=query_lens,
        context_lens=u32_column("context_lens", message.context_lens, len(rows), "one per item of rows"),
        sample_mask=_sample_mask(message.sample_mask, len(rows)),
        slot_mapping=u32_column("slot_mapping", message.slot_mapping, num_tokens, "the sum of query_lens"),
        max_query_lens=_max_query_lens(message.max_query_lens, query_lens),
        opens=[_row_open(f"opens[{i}]", row_open) for i, row_open in enumerate(message.opens)],
        commit_digests=_digests(message.commit_hashes, len(changes.get("commit_blocks", EMPTY))),
        parts=parts_of(message, STEP_FIELDS),
        **changes,
    )


def _changes(message: worker_pb2.StepBatch) -> dict[str, U32]:
    found = {}
    for names in CHANGES:
        columns = [getattr(message, name) for name in names]
        if not any(columns):
            continue
        length = len(columns[0]) // 4
        for name, data in zip(names, columns, strict=True):
            found[name] = u32_column(name, data, length, f"one per item of {names[0]}")
    return found


def _invalid(field: str, problem: str) -> WireError:
    return WireError(f"{field} {problem}", field)


def _query_lens(data: bytes, num_rows: int) -> U32:
    if not data:
        return np.ones(num_rows, dtype=np.uint32)
    query_lens = u32_column("query_lens", data, num_rows, "one per item of rows, or none for all 1")
    if not query_lens.all():
        raise _invalid("query_lens", f"is 0 at index {int(query_lens.argmin())}, expected at least 1")
    return query_lens


def _max_query_lens(data: bytes, query_lens: U32) -> U32 | None:
    if not data:
        return None
    found = u32_column("max_query_lens", data, len(query_lens), "one per item of rows, or none for all 0")
    if ((found > 0) & (query_lens != 1)).any():
        raise _invalid("max_query_lens", "is above 0 for a row whose query_len is not 1")
    return found


def _sample_mask(data: bytes, num_rows: int) -> Bools:
    if not data:
        return np.ones(num_rows, dtype=np.bool_)
    mask = np.frombuffer(data, dtype=np.uint8)
    if len(mask) != num_rows:
        raise _invalid("sample_mask", f"has {len(mask)} items, expected {num_rows} (one per item of rows)")
    if mask.max() > 1:
        raise _invalid("sample_mask", f"has {int(mask.max())} at index {int(mask.argmax())}, expected 0 or 1")
    return mask.view(np.bool_)


def _digests(data: bytes, num_blocks: int) -> list[bytes]:
    if len(data) != DIGEST_BYTES * num_blocks:
        expected = f"{DIGEST_BYTES * num_blocks} ({DIGEST_BYTES} per item of commit_blocks)"
        raise _invalid("commit_hashes", f"has {len(data)} bytes, expected {expected}")
    return [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]


# -- rows that open --------------------------------------------------------------------------------------------------


def _row_open(field: str, message: worker_pb2.RowOpen) -> RowOpen:
    fork_of_row = message.fork_of_row if message.HasField("fork_of_row") else None
    sampling = message.sampling
    num_forced = sampling.num_forced_tokens
    if num_forced and (fork_of_row is not None or num_forced >= message.prompt_len):
        words = f"is {num_forced}, expected less than prompt_len, {message.prompt_len}, and 0 for a fork"
        raise _invalid(f"{field}.sampling.num_forced_tokens", words)
    if fork_of_row is not None and message.token_ids:
        raise _invalid(f"{field}.token_ids", f"has tokens and fork_of_row is {fork_of_row}, expected one of the two")
    return RowOpen(
        row=message.row,
        token_ids=u32_from_bytes(message.token_ids, f"{field}.token_ids"),
        prompt_len=message.prompt_len - num_forced,
        block_table=u32_from_bytes(message.block_table, f"{field}.block_table"),
        num_computed_tokens=message.num_computed_tokens,
        sampling=sampling_params(checks.values_set(message.sampling)),
        sample_index=message.sample_index,
        fork_of_row=fork_of_row,
        banned_ids=u32_from_bytes(message.banned_ids, f"{field}.banned_ids"),
        banned_before=message.banned_before,
        rules=_rules(message),
        grammar=_grammar(field, sampling),
        thinking=_thinking(sampling),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        processed_logprobs=sampling.logprobs_mode == types_pb2.LOGPROBS_MODE_PROCESSED,
        logits_digests=sampling.logits_digests,
        num_forced=num_forced,
        num_candidates=message.num_candidates,
        adapter=_adapter_digest(field, message.adapter),
        pooling=_pooling(field, message.pooling) if message.HasField("pooling") else None,
        inputs=tuple(map(CarriedInput.read, message.inputs)),
        encoder=EncoderInput.read(message.encoder) if message.HasField("encoder") else None,
        images=_spans(f"{field}.images", message.images),
        snapshot=message.snapshot if message.HasField("snapshot") else None,
        group_tables=tuple(u32_from_bytes(table, f"{field}.group_tables") for table in message.group_tables),
        speculates=message.sampling.speculative or not message.sampling.HasField("speculative"),
        draft_token_ids=u32_from_bytes(message.draft_token_ids, f"{field}.draft_token_ids"),
    )


def _adapter_digest(field: str, digest: bytes) -> bytes:
    if digest and len(digest) != DIGEST_BYTES:
        raise _invalid(f"{field}.adapter", f"has {len(digest)} bytes, expected {DIGEST_BYTES} or none")
    return digest


def _pooling(field: str, message: pooling_pb2.Pooling) -> Pooling:
    if message.task not in POOLING_TASKS:
        raise _invalid(f"{field}.pooling.task", f"is {message.task}, expected one of {list(POOLING_TASKS)}")
    if message.task == pooling_pb2.POOLING_TASK_VECTOR and message.kind not in POOLING_KINDS:
        raise _invalid(f"{field}.pooling.kind", f"is {message.kind}, expected one of {list(POOLING_KINDS)}")
    return Pooling.read(message)


def _spans(field: str, data: bytes) -> tuple[ImageSpan, ...]:
    values = u32_from_bytes(data, field)
    if len(values) % 3:
        raise _invalid(field, f"has {len(values)} numbers, expected three per image")
    return tuple(ImageSpan(*span) for span in values.reshape(-1, 3).tolist())


def _rules(message: worker_pb2.RowOpen) -> TokenRules:
    sampling = message.sampling
    if not (sampling.allowed_token_ids or sampling.banned_token_ids or sampling.logit_bias or message.bad_words_ids):
        return NO_RULES
    return TokenRules(
        allowed_ids=np.array(sampling.allowed_token_ids, np.uint32),
        banned_ids=np.array(sampling.banned_token_ids, np.uint32),
        bad_words=tuple(np.array(word.ids, np.uint32) for word in message.bad_words_ids),
        bias_ids=np.array(list(sampling.logit_bias), np.uint32),
        biases=np.array(list(sampling.logit_bias.values()), np.float32),
    )


def _grammar(field: str, sampling: types_pb2.SamplingParams) -> Grammar | None:
    try:
        return grammar_of(sampling) if has_grammar(sampling) else None
    except FieldError as error:
        raise WireError(f"{field}.{error}", f"{field}.{error.field}") from None


def _thinking(sampling: types_pb2.SamplingParams) -> ThinkingBudget | None:
    if not sampling.thinking_end_ids or not sampling.HasField("thinking_token_budget"):
        return None
    return ThinkingBudget(
        num_tokens=sampling.thinking_token_budget,
        start_ids=np.array(sampling.thinking_start_ids, np.uint32),
        end_ids=np.array(sampling.thinking_end_ids, np.uint32),
        last_ids=np.array(sampling.thinking_last_ids, np.uint32),
        repeats=sampling.thinking_repeats,
    )


# -- answers ---------------------------------------------------------------------------------------------------------


def output_to_proto(output: StepOutput, *, worker_epoch: int, queue_us: int) -> worker_pb2.StepOutput:
    """The answer to a step. `queue_us` is the time that the step waited for the model."""
    message = worker_pb2.StepOutput(
        step_id=output.step_id,
        worker_epoch=worker_epoch,
        rows=u32_to_bytes(output.rows),
        token_ids=u32_to_bytes(output.token_ids),
        queue_us=queue_us,
        forward_us=output.forward_us,
    )
    if output.token_lens is not None:
        message.token_lens = u32_to_bytes(output.token_lens)
    if output.draft_lens is not None:
        message.draft_lens = u32_to_bytes(output.draft_lens)
    for error in output.errors:
        message.errors.add(row=error.row, code=ROW_ERROR_NUMBERS[error.code], message=error.message)
    if output.logprobs is not None:
        output.logprobs.write(message.logprobs)
    for part in output.parts:
        part.write(message)
    return message


def output_from_proto(message: worker_pb2.StepOutput) -> StepOutput:
    """A worker's answer. Raises WireError if its columns disagree."""
    rows = u32_from_bytes(message.rows, "rows")
    token_ids = u32_from_bytes(message.token_ids, "token_ids")
    token_lens = _lens_of_rows("token_lens", message.token_lens, rows)
    num_tokens = len(rows) if token_lens is None else int(token_lens.sum(dtype=np.uint64))
    if num_tokens != len(token_ids):
        raise WireError(f"{num_tokens} tokens of {len(rows)} rows but {len(token_ids)} token_ids")
    return StepOutput(
        step_id=message.step_id,
        rows=rows,
        token_ids=token_ids,
        token_lens=token_lens,
        draft_lens=_lens_of_rows("draft_lens", message.draft_lens, rows),
        errors=[_row_error(error) for error in message.errors],
        forward_us=message.forward_us,
        logprobs=LogprobColumns.read(message.logprobs, num_tokens) if message.HasField("logprobs") else None,
        parts=parts_of(message, ANSWER_FIELDS),
    )


def _lens_of_rows(field: str, data: bytes, rows: U32) -> U32 | None:
    return u32_column(field, data, len(rows), "one per item of rows, or none") if data else None


def _row_error(message: worker_pb2.RowError) -> RowError:
    if message.code in ROW_ERROR_CODES:
        return RowError(message.row, message.message, ROW_ERROR_CODES[message.code])
    return RowError(message.row, f"code {message.code}: {message.message}".removesuffix(": "))  # a newer worker's code
