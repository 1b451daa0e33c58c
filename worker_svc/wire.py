"""Conversions between the protocol and the engine's data. Columns are read-only views of a message, without a copy.

Only the form is checked here: column lengths are whole numbers of items and agree with each other. A batch that fails
here changes nothing. The engine checks rows, blocks and slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
from quire.internal.v1 import encoder_pb2, inputs_pb2, logprobs_pb2, pooling_pb2, scheduler_pb2, worker_pb2
from quire.v1 import types_pb2

from request_fields import checks
from request_fields.fields import FieldError, sampling_params
from request_fields.grammar import Grammar, grammar_of
from step_protocol.messages import (
    EMPTY,
    NO_RULES,
    U32,
    Bools,
    CarriedInput,
    EncoderInput,
    ImageSpan,
    ImageWork,
    LogprobColumns,
    Pooling,
    PoolingKind,
    PoolingTask,
    RowError,
    RowErrorCode,
    RowOpen,
    StepBatch,
    StepOutput,
    TokenRules,
)
from svc_common.errors import InvalidRequestError
from worker_svc.engine.adapters.store import AdapterEntry
from worker_svc.engine.config import EncoderInfo, EngineInfo, PoolingInfo
from worker_svc.seals import TAG_BYTES, Seals

HASH_BYTES = 16

ROW_ERROR_CODES = {
    RowErrorCode.NAN: worker_pb2.ROW_ERROR_CODE_NAN,
    RowErrorCode.BAD_INPUT: worker_pb2.ROW_ERROR_CODE_BAD_INPUT,
    RowErrorCode.INTERNAL: worker_pb2.ROW_ERROR_CODE_INTERNAL,
}
INPUT_KINDS = {
    inputs_pb2.INPUT_KIND_EMBEDDINGS: "embeddings",
    inputs_pb2.INPUT_KIND_IMAGE: "image",
    inputs_pb2.INPUT_KIND_AUDIO: "audio",
}
INPUT_DTYPES = {
    inputs_pb2.INPUT_DTYPE_FLOAT32: "float32",
    inputs_pb2.INPUT_DTYPE_BFLOAT16: "bfloat16",
    inputs_pb2.INPUT_DTYPE_FLOAT16: "float16",
    inputs_pb2.INPUT_DTYPE_INT16: "int16",
    inputs_pb2.INPUT_DTYPE_UINT8: "uint8",
}
POOLING_TASKS: dict[int, PoolingTask] = {
    pooling_pb2.POOLING_TASK_VECTOR: PoolingTask.VECTOR,
    pooling_pb2.POOLING_TASK_LOGITS: PoolingTask.LOGITS,
    pooling_pb2.POOLING_TASK_CLASSES: PoolingTask.CLASSES,
}
POOLING_KINDS: dict[int, PoolingKind] = {
    types_pb2.POOLING_KIND_LAST: PoolingKind.LAST,
    types_pb2.POOLING_KIND_MEAN: PoolingKind.MEAN,
    types_pb2.POOLING_KIND_CLS: PoolingKind.CLS,
}
KIND_NUMBERS = {kind: types_pb2.PoolingKind.ValueType(number) for number, kind in POOLING_KINDS.items()}
DETERMINISM = {"exact": types_pb2.DETERMINISM_EXACT, "best_effort": types_pb2.DETERMINISM_BEST_EFFORT}


# -- columns ---------------------------------------------------------------------------------------------------------


def u32_from_bytes(field: str, data: bytes) -> U32:
    """A packed little-endian u32[] as a read-only array; InvalidRequestError for a partial item."""
    if not data:
        return EMPTY
    if len(data) % 4:
        raise _invalid(field, f"is {len(data)} bytes, expected a multiple of 4")
    return np.frombuffer(data, dtype="<u4")


def u32_to_bytes(values: npt.NDArray[np.integer]) -> bytes:
    """Any integer array as packed little-endian u32[]."""
    return np.ascontiguousarray(values, dtype="<u4").tobytes()


def _column(field: str, data: bytes, length: int, length_of: str) -> U32:
    column = u32_from_bytes(field, data)
    if len(column) != length:
        raise _invalid(field, f"has {len(column)} items, expected {length} ({length_of})")
    return column


def _invalid(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"batch.{field} {problem}", field=f"batch.{field}")


# -- steps in --------------------------------------------------------------------------------------------------------


def step_batch_from_proto(batch: worker_pb2.StepBatch) -> StepBatch:
    """One step for the engine. InvalidRequestError names the column, its value and the expected one."""
    rows = u32_from_bytes("rows", batch.rows)
    query_lens = _query_lens(batch.query_lens, len(rows))
    table_rows = u32_from_bytes("table_rows", batch.table_rows)
    copy_src = u32_from_bytes("copy_src", batch.copy_src)
    commit_blocks = u32_from_bytes("commit_blocks", batch.commit_blocks)
    fork_rows = u32_from_bytes("fork_rows", batch.fork_rows)
    beam_rows = u32_from_bytes("beam_rows", batch.beam_rows)
    num_tokens = int(query_lens.sum(dtype=np.uint64))
    return StepBatch(
        step_id=batch.step_id,
        rows=rows,
        query_lens=query_lens,
        context_lens=_column("context_lens", batch.context_lens, len(rows), "one per item of rows"),
        sample_mask=_sample_mask(batch.sample_mask, len(rows)),
        slot_mapping=_column("slot_mapping", batch.slot_mapping, num_tokens, "the sum of query_lens"),
        close_rows=u32_from_bytes("close_rows", batch.close_rows),
        opens=[_row_open_from_proto(f"opens[{i}]", row_open) for i, row_open in enumerate(batch.opens)],
        table_rows=table_rows,
        table_indices=_column("table_indices", batch.table_indices, len(table_rows), "one per item of table_rows"),
        table_blocks=_column("table_blocks", batch.table_blocks, len(table_rows), "one per item of table_rows"),
        copy_src=copy_src,
        copy_dst=_column("copy_dst", batch.copy_dst, len(copy_src), "one per item of copy_src"),
        commit_blocks=commit_blocks,
        commit_hashes=_hashes(batch.commit_hashes, len(commit_blocks)),
        fork_rows=fork_rows,
        fork_parents=_column("fork_parents", batch.fork_parents, len(fork_rows), "one per item of fork_rows"),
        beam_rows=beam_rows,
        beam_parents=_column("beam_parents", batch.beam_parents, len(beam_rows), "one per item of beam_rows"),
        beam_tokens=_column("beam_tokens", batch.beam_tokens, len(beam_rows), "one per item of beam_rows"),
        images=_image_work(batch.images),
    )


def _image_work(data: bytes) -> tuple[ImageWork, ...]:
    values = u32_from_bytes("images", data)
    if len(values) % 4:
        raise _invalid("images", f"has {len(values)} numbers, expected four per image")
    work = tuple(ImageWork(*item) for item in values.reshape(-1, 4).tolist())
    if any(not 0 < item.done <= item.total for item in work):
        raise _invalid("images", "has work that is 0, or beyond all work of its image")
    return work


def _query_lens(data: bytes, num_rows: int) -> U32:
    if not data:
        return np.ones(num_rows, dtype=np.uint32)
    query_lens = _column("query_lens", data, num_rows, "one per item of rows, or none for all 1")
    if not query_lens.all():
        raise _invalid("query_lens", f"is 0 at index {int(query_lens.argmin())}, expected at least 1")
    return query_lens


def _sample_mask(data: bytes, num_rows: int) -> Bools:
    if not data:
        return np.ones(num_rows, dtype=np.bool_)
    mask = np.frombuffer(data, dtype=np.uint8)
    if len(mask) != num_rows:
        raise _invalid("sample_mask", f"has {len(mask)} items, expected {num_rows} (one per item of rows)")
    if mask.max() > 1:
        raise _invalid("sample_mask", f"has {int(mask.max())} at index {int(mask.argmax())}, expected 0 or 1")
    return mask.view(np.bool_)


def commit_tags(message: worker_pb2.StepBatch) -> bytes:
    """The tags of the committed blocks, 16 bytes each; empty if there are none."""
    expected = TAG_BYTES * (len(message.commit_blocks) // 4)
    if message.commit_tags and len(message.commit_tags) != expected:
        found = f"is {len(message.commit_tags)} bytes"
        raise _invalid("commit_tags", f"{found}, expected {expected} ({TAG_BYTES} per item of commit_blocks) or none")
    return message.commit_tags


def _hashes(data: bytes, num_blocks: int) -> list[bytes]:
    if len(data) != HASH_BYTES * num_blocks:
        expected = f"{HASH_BYTES * num_blocks} ({HASH_BYTES} per item of commit_blocks)"
        raise _invalid("commit_hashes", f"is {len(data)} bytes, expected {expected}")
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]


def _row_open_from_proto(field: str, row_open: worker_pb2.RowOpen) -> RowOpen:
    fork_of_row = row_open.fork_of_row if row_open.HasField("fork_of_row") else None
    if fork_of_row is not None and row_open.token_ids:
        raise _invalid(f"{field}.token_ids", f"has tokens and fork_of_row is {fork_of_row}, expected one of the two")
    return RowOpen(
        row=row_open.row,
        token_ids=u32_from_bytes(f"{field}.token_ids", row_open.token_ids),
        prompt_len=row_open.prompt_len,
        block_table=u32_from_bytes(f"{field}.block_table", row_open.block_table),
        num_computed_tokens=row_open.num_computed_tokens,
        sampling=sampling_params(checks.values_set(row_open.sampling)),
        sample_index=row_open.sample_index,
        fork_of_row=fork_of_row,
        banned_ids=u32_from_bytes(f"{field}.banned_ids", row_open.banned_ids),
        banned_before=row_open.banned_before,
        rules=_rules_from_proto(row_open),
        grammar=_grammar_of(field, row_open.sampling),
        logprobs=row_open.logprobs if row_open.HasField("logprobs") else None,
        prompt_logprobs=row_open.prompt_logprobs if row_open.HasField("prompt_logprobs") else None,
        num_candidates=row_open.num_candidates,
        adapter=_adapter_digest(field, row_open.adapter),
        pooling=_pooling_of(field, row_open),
        inputs=tuple(map(_input_from_proto, row_open.inputs)),
        encoder=_encoder_from_proto(row_open.encoder) if row_open.HasField("encoder") else None,
        images=_spans_from_proto(f"{field}.images", row_open.images),
    )


def _encoder_from_proto(encoder: encoder_pb2.EncoderInput) -> EncoderInput:
    return EncoderInput(
        num_tokens=encoder.num_tokens,
        allowed={entry.position: np.array(entry.ids, np.uint32) for entry in encoder.allowed},
        banned_ids=np.array(encoder.banned_ids, np.uint32),
        first_banned_ids=np.array(encoder.first_banned_ids, np.uint32),
        first_banned_at=encoder.first_banned_at,
    )


def _input_from_proto(carried: inputs_pb2.CarriedInput) -> CarriedInput:
    """One input. The engine checks it, so that a bad input is an error of its row and not of the step."""
    return CarriedInput(
        kind=INPUT_KINDS.get(carried.kind, str(carried.kind)),
        digest=carried.digest,
        start=carried.start,
        length=carried.length,
        dtype=INPUT_DTYPES.get(carried.dtype, str(carried.dtype)),
        shape=tuple(carried.shape),
        data=carried.data,
    )


def _adapter_digest(field: str, digest: bytes) -> bytes:
    if digest and len(digest) != HASH_BYTES:
        raise _invalid(f"{field}.adapter", f"is {len(digest)} bytes, expected {HASH_BYTES} or none")
    return digest


def _pooling_of(field: str, row_open: worker_pb2.RowOpen) -> Pooling | None:
    if not row_open.HasField("pooling"):
        return None
    given = row_open.pooling
    if given.task not in POOLING_TASKS:
        raise _invalid(f"{field}.pooling.task", f"is {given.task}, expected one of {list(POOLING_TASKS)}")
    if given.task == pooling_pb2.POOLING_TASK_VECTOR and given.kind not in POOLING_KINDS:
        raise _invalid(f"{field}.pooling.kind", f"is {given.kind}, expected one of {list(POOLING_KINDS)}")
    return Pooling(
        task=POOLING_TASKS[given.task],
        kind=POOLING_KINDS.get(given.kind, PoolingKind.LAST),
        normalize=given.normalize,
        dimensions=given.dimensions,
        token_ids=np.array(given.token_ids, np.uint32),
        second_text=given.second_text,
    )


def _spans_from_proto(field: str, column: bytes) -> tuple[ImageSpan, ...]:
    values = u32_from_bytes(field, column)
    if len(values) % 3:
        raise _invalid(field, f"has {len(values)} numbers; must have three per image")
    return tuple(ImageSpan(*span) for span in values.reshape(-1, 3).tolist())


def _rules_from_proto(row_open: worker_pb2.RowOpen) -> TokenRules:
    sampling = row_open.sampling
    if not (sampling.allowed_token_ids or sampling.banned_token_ids or sampling.logit_bias or row_open.bad_words_ids):
        return NO_RULES
    return TokenRules(
        allowed_ids=np.array(sampling.allowed_token_ids, np.uint32),
        banned_ids=np.array(sampling.banned_token_ids, np.uint32),
        bad_words=tuple(np.array(word.ids, np.uint32) for word in row_open.bad_words_ids),
        bias_ids=np.array(list(sampling.logit_bias), np.uint32),
        biases=np.array(list(sampling.logit_bias.values()), np.float32),
    )


def _grammar_of(field: str, sampling: types_pb2.SamplingParams) -> Grammar | None:
    try:
        return grammar_of(sampling)
    except FieldError as error:
        raise InvalidRequestError(f"batch.{field}.{error}", field=f"batch.{field}.{error.field}") from None


# -- answers out -----------------------------------------------------------------------------------------------------


def step_output_to_proto(output: StepOutput, *, worker_epoch: int, queue_us: int) -> worker_pb2.StepOutput:
    """The answer to a step. `queue_us` is the time that the step waited for the model."""
    message = worker_pb2.StepOutput(
        step_id=output.step_id,
        worker_epoch=worker_epoch,
        rows=u32_to_bytes(output.rows),
        token_ids=u32_to_bytes(output.token_ids),
        errors=[_row_error_to_proto(error) for error in output.errors],
        queue_us=queue_us,
        forward_us=output.forward_us,
        candidate_rows=u32_to_bytes(output.candidates.rows),
        candidate_ids=u32_to_bytes(output.candidates.token_ids),
        candidate_logprobs=output.candidates.logprobs.astype("<f4").tobytes(),
    )
    if output.logprobs is not None:
        message.logprobs.CopyFrom(_logprobs_to_proto(output.logprobs))
    if output.prompt_logprobs is not None:
        message.prompt_rows = u32_to_bytes(output.prompt_logprobs.rows)
        message.prompt_positions = u32_to_bytes(output.prompt_logprobs.positions)
        message.prompt_logprobs.CopyFrom(_logprobs_to_proto(output.prompt_logprobs.columns))
    if output.pooled is not None:
        message.pooled_rows = u32_to_bytes(output.pooled.rows)
        message.pooled_lens = u32_to_bytes(output.pooled.lens)
        message.pooled_values = output.pooled.values.astype("<f4", copy=False).tobytes()
    return message


def _logprobs_to_proto(columns: LogprobColumns) -> logprobs_pb2.LogprobColumns:
    return logprobs_pb2.LogprobColumns(
        lens=u32_to_bytes(columns.lens),
        logprobs=columns.logprobs.astype("<f4", copy=False).tobytes(),
        token_ids=u32_to_bytes(columns.token_ids),
        ranks=u32_to_bytes(columns.ranks),
    )


def _row_error_to_proto(error: RowError) -> worker_pb2.RowError:
    return worker_pb2.RowError(row=error.row, code=ROW_ERROR_CODES[error.code], message=error.message)


def blocks_to_proto(block_ids: U32, hashes: list[bytes], token_ids: U32, seals: Seals) -> worker_pb2.ListBlocksResponse:
    """Committed blocks. block_ids [N], N digests of 16 bytes, token_ids [N, block_size]."""
    return worker_pb2.ListBlocksResponse(
        block_ids=u32_to_bytes(block_ids),
        hashes=b"".join(hashes),
        token_ids=u32_to_bytes(token_ids),
        seals=seals.of(block_ids),
    )


# -- model info out --------------------------------------------------------------------------------------------------


def model_info_to_proto(info: EngineInfo, bundle_digest: bytes) -> types_pb2.ModelInfo:
    """The facts about the model that a gateway needs. `bundle_digest` is empty if the folder has no bundle."""
    return types_pb2.ModelInfo(
        model=info.model,
        revision=info.revision,
        weights_digest=info.weights_digest,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        default_sampling=types_pb2.SamplingParams(**checks.defaults_of_model(info.default_sampling)),
        bundle_digest=bundle_digest,
        block_size=info.block_size,
        max_num_blocks=info.num_blocks,
        determinism=DETERMINISM[info.determinism],
        dtype=info.dtype,
        max_num_seqs=info.max_num_seqs,
        quantization=info.quantize or "",
        numerics=info.numerics,
        kv_cache_dtype="" if info.kv_cache_dtype == "auto" else info.kv_cache_dtype,
        pooling=_pooling_info_to_proto(info.pooling),
        is_encoder=info.is_encoder,
        build=info.build,
        hidden_size=info.hidden_size,
        attention_window=info.attention_window or 0,
        encoder=None if info.encoder is None else encoder_info_to_proto(info.encoder),
        images=None if info.images is None else types_pb2.ImageInfo(**asdict(info.images)),
    )


def encoder_info_to_proto(info: EncoderInfo) -> types_pb2.EncoderInfo:
    """The encoder of a model."""
    message = types_pb2.EncoderInfo(
        max_tokens=info.max_tokens,
        max_decoder_tokens=info.max_decoder_tokens,
        decoder_start_ids=info.decoder_start_ids,
        forced_bos_token_id=info.forced_bos_token_id,
        forced_eos_token_id=info.forced_eos_token_id,
        suppress_ids=info.suppress_ids,
        begin_suppress_ids=info.begin_suppress_ids,
    )
    if info.audio is not None:
        message.audio.CopyFrom(
            types_pb2.AudioInfo(
                sampling_rate=info.audio.sampling_rate,
                max_samples=info.audio.max_samples,
                language_ids=info.audio.language_ids,
                task_ids=info.audio.task_ids,
                no_timestamps_id=info.audio.no_timestamps_id,
            )
        )
    return message


def _pooling_info_to_proto(info: PoolingInfo | None) -> types_pb2.PoolingInfo | None:
    if info is None:
        return None
    return types_pb2.PoolingInfo(
        kind=KIND_NUMBERS[info.kind],
        normalize=info.normalize,
        dimensions=info.dimensions,
        max_length=info.max_length,
        num_classes=info.num_classes,
        answer_token_ids=info.answer_token_ids,
        has_sigmoid=info.has_sigmoid,
        generates=info.generates,
        embeds=info.embeds,
    )


def capacity_to_proto(info: EngineInfo, *, bundle_digest: bytes, pipeline_depth: int) -> scheduler_pb2.WorkerCapacity:
    """The capacity of this worker, for its registration."""
    return scheduler_pb2.WorkerCapacity(
        info=model_info_to_proto(info, bundle_digest),
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        pipeline_depth=pipeline_depth,
        max_adapters=info.max_adapters,
    )


def adapters_to_proto(entries: Sequence[AdapterEntry]) -> list[worker_pb2.WorkerAdapter]:
    """The adapters of this worker, for its registration."""
    return [worker_pb2.WorkerAdapter(name=entry.name, digest=entry.digest, path=entry.path) for entry in entries]


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    """`data` in pieces of at most `size` bytes; one empty piece if there is none."""
    yield from (data[start : start + size] for start in range(0, max(len(data), 1), size))
