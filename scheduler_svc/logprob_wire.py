"""Conversions of log probabilities between the two internal protocols and the core's columns."""

from __future__ import annotations

import numpy as np
from quire.internal.v1 import logprobs_pb2, worker_pb2

from scheduler_svc.core.logprobs import LogprobColumns, PromptLogprobs
from step_protocol.columns import WireError, f32_from_bytes, f32_to_bytes, u32_from_bytes, u32_to_bytes


def columns_to_proto(columns: LogprobColumns) -> logprobs_pb2.LogprobColumns:
    return logprobs_pb2.LogprobColumns(
        lens=u32_to_bytes(columns.lens),
        logprobs=f32_to_bytes(columns.logprobs),
        token_ids=u32_to_bytes(columns.token_ids),
        ranks=u32_to_bytes(columns.ranks),
    )


def columns_from_proto(message: logprobs_pb2.LogprobColumns, num_tokens: int) -> LogprobColumns:
    """The columns of `num_tokens` tokens. Raises WireError if their lengths disagree."""
    columns = LogprobColumns(
        lens=u32_from_bytes(message.lens, "lens"),
        logprobs=f32_from_bytes(message.logprobs, "logprobs"),
        token_ids=u32_from_bytes(message.token_ids, "logprobs.token_ids"),
        ranks=u32_from_bytes(message.ranks, "ranks"),
    )
    expected = num_tokens, int(columns.lens.sum(dtype=np.uint64)), int(np.count_nonzero(columns.lens))
    found = len(columns.lens), len(columns.logprobs), len(columns.ranks)
    if found != expected or len(columns.token_ids) != expected[1]:
        raise WireError(
            f"log probabilities have {found[0]} lens, {found[1]} logprobs, {len(columns.token_ids)} token_ids and "
            f"{found[2]} ranks; expected {expected[0]}, {expected[1]}, {expected[1]} and {expected[2]}"
        )
    return columns


def prompt_from_proto(message: worker_pb2.StepOutput) -> PromptLogprobs:
    """The log probabilities of prompt tokens in a worker's answer. Raises WireError if columns disagree."""
    rows = u32_from_bytes(message.prompt_rows, "prompt_rows")
    positions = u32_from_bytes(message.prompt_positions, "prompt_positions")
    if len(rows) != len(positions):
        raise WireError(f"{len(rows)} prompt_rows but {len(positions)} prompt_positions")
    return PromptLogprobs(rows, positions, columns_from_proto(message.prompt_logprobs, len(rows)))
