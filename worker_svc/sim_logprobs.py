"""Log probabilities of a simulated worker. They depend on the context only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from step_protocol.columns import I64, U32
from step_protocol.messages import LogprobColumns, PromptLogprobs
from worker_svc.engine.backend import TopLogprobs
from worker_svc.engine.rows.logprobs import Asked, PromptTargets, spread, to_columns

U64 = npt.NDArray[np.uint64]


def top_logprobs(draws: U64, chosen: U32, num_top: int, vocab_size: int) -> TopLogprobs:
    """As `sim_tokens.sim_logprobs`, for each of n tokens. `draws` [n]: the mixed digests of their contexts."""
    shifts = (draws % np.uint64(vocab_size)).astype(np.int64)[:, None]
    top = (shifts + np.arange(num_top)) % vocab_size
    ids = np.concatenate((chosen[:, None].astype(np.int64), top), axis=1)
    ranks = (ids - shifts) % vocab_size + 1
    values = (ranks / -8).astype(np.float32)
    return TopLogprobs(values, ids.astype(np.uint32), ranks[:, 0].astype(np.uint32), np.zeros(len(ids), np.bool_))


def sampled_columns(draws: U64, token_ids: U32, asked: Asked, vocab_size: int) -> LogprobColumns:
    """Columns of the sampled tokens; `draws` [S] and `token_ids` [S] are of all rows that sampled."""
    lines = asked.lines
    found = top_logprobs(draws[lines], token_ids[lines], int(asked.num_top.max()), vocab_size)
    return spread(to_columns(found, asked.num_top), lines, len(token_ids))


def prompt_columns(draws: U64, targets: PromptTargets, bad_rows: I64, vocab_size: int) -> PromptLogprobs:
    """Columns of prompt tokens, without those of bad rows. `draws` [n] are of the contexts of the targets."""
    found = top_logprobs(draws, targets.token_ids, int(targets.num_top.max()), vocab_size)
    is_kept = ~np.isin(targets.rows, bad_rows)
    columns = to_columns(found, targets.num_top).select(is_kept)
    return PromptLogprobs(
        targets.rows[is_kept].astype(np.uint32), targets.positions[is_kept].astype(np.uint32), columns
    )
