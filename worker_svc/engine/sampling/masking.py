"""Applies the masks of grammars to logits, after all other processing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker_svc.engine.sampling.grammars import RowMasks


def apply_masks(
    logits: torch.Tensor,
    masks: RowMasks,
    eos_token_ids: Sequence[int],
    *,
    has_rules: bool,
    first_id: int = 0,
    max_over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> None:
    """Sets the logits [S, vocab] of forbidden tokens to minus infinity. If the grammar of a row failed, sets one of its
    logits to NaN.

    `has_rules`: other processing may have excluded all tokens that a grammar allows. If the grammar also allows EOS,
    EOS is sampled, even if min_tokens bans it. With several ranks, each rank passes the logits of its part of the
    vocabulary, which starts at `first_id`.
    """
    lines = torch.from_numpy(masks.lines).to(logits.device)
    is_whole = len(lines) == len(logits)
    picked = logits if is_whole else logits[lines]
    is_banned = torch.from_numpy(masks.is_banned[:, first_id : first_id + logits.shape[1]]).to(logits.device)
    picked.masked_fill_(is_banned, -torch.inf)
    if has_rules:
        is_empty = max_over_ranks(picked.amax(dim=1)) == -torch.inf  # [P]
        for token_id in set(eos_token_ids) & set(range(first_id, first_id + logits.shape[1])):
            picked[:, token_id - first_id].masked_fill_(is_empty & ~is_banned[:, token_id - first_id], 0.0)
    for line in masks.failures:
        picked[int((masks.lines == line).argmax()), 0] = torch.nan
    if not is_whole:
        logits[lines] = picked
