"""Applies the masks of grammars and thinking budgets to logits, after all other processing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from step_protocol.columns import I64
from worker_svc.engine.sampling.grammars import PendingMasks, RowGrammars, RowMasks
from worker_svc.engine.step import Logits, Step, StepPart


class GrammarMasks(StepPart):
    """Lets each row sample what its grammar and its thinking budget allow. The masks are computed while the forward
    pass runs."""

    def __init__(self, grammars: RowGrammars) -> None:
        self._grammars, self.in_use = grammars, grammars.in_use
        self._started: tuple[I64 | None, PendingMasks | None] = None, None  # rows of the step

    def before(self, step: Step) -> None:
        rows = step.plan.sampling_rows
        self._started = rows, self._grammars.start(rows, step.plan.sampled_positions)

    def process(self, step: Step, logits: Logits) -> None:
        is_started = self._started[0] is logits.rows
        masks = self._started[1] if is_started else self._grammars.start(logits.rows, logits.positions)
        if masks is None:
            return
        found = masks.result()
        if is_started:
            step.errors.add_all(found.errors(logits.rows))
        apply_masks(logits.values, found, self._grammars.eos_token_ids, has_rules=logits.has_rules)


def apply_masks(
    logits: torch.Tensor,
    masks: RowMasks,
    eos_token_ids: Iterable[int],
    *,
    has_rules: bool,
    first_id: int = 0,
    max_over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> None:
    """Sets the logits [S, vocab] of forbidden tokens to minus infinity. If the grammar of a row failed, sets one of its
    logits to NaN.

    `has_rules`: other processing may have excluded all tokens that a grammar allows. If the grammar also allows EOS,
    EOS is sampled, even if min_tokens bans it. With several ranks, each rank passes the logits of its part of the
    vocabulary, which starts at `first_id`. A forced token is sampled, even if other processing bans it.
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
    for line, token_id in masks.forced.items():
        logits[line] = -torch.inf
        if first_id <= token_id < first_id + logits.shape[1]:
            logits[line, token_id - first_id] = 0.0
