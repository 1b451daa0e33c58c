"""The encoder inputs of open rows: how many positions they take, and which ids their outputs can begin and end with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from step_protocol.columns import I32, I64, Bools
from step_protocol.messages import RowOpen
from step_protocol.types import EncoderInfo, EncoderInput
from worker_svc.engine.row_part import SomeRows
from worker_svc.engine.step import Logits, Step, StepPart

if TYPE_CHECKING:
    import torch  # rows use this type even if torch is not installed

    from worker_svc.engine.rows.open_rows import OpenRows

MAX_RULE_IDS = 1024


class EncoderTable(SomeRows["OutputRules"], StepPart):
    """The encoder input of each open row, of a model with an encoder."""

    why_bad = "positions {context_len} to {last} are no chunk of an encoder or a decoder"

    def __init__(self, rows: OpenRows, info: EncoderInfo) -> None:
        super().__init__()
        self._info, self._block_size, self._vocab_size = info, rows.block_size, rows.vocab_size
        self._lens: I32 = np.zeros(rows.max_num_seqs, np.int32)
        self._ends: I32 = np.zeros(rows.max_num_seqs, np.int32)

    def refusal(self, item: RowOpen) -> str | None:
        if item.encoder is None:
            return "the model has an encoder, but the row has no encoder input"
        num, end = item.encoder.num_tokens, self._end_of(item.encoder.num_tokens)
        least, most = 1 if self._info.audio is None else self._info.max_tokens, self._info.max_tokens
        if not least <= num <= most:
            return f"encoder.num_tokens is {num}, expected {least} to {most}"
        if end >= item.prompt_len:
            return f"the encoder input takes {end} positions, but the prompt has {item.prompt_len}"
        if 0 < item.num_computed_tokens < end:
            return f"num_computed_tokens is {item.num_computed_tokens}, inside the {end} encoder positions"
        if self._info.audio is not None and not item.num_computed_tokens and not item.inputs:
            return "the model takes audio, but the row has none"
        if item.prompt_logprobs is not None:
            return "prompt_logprobs cannot be combined with an encoder input"
        ids = [item.encoder.banned_ids, item.encoder.first_banned_ids, *item.encoder.allowed.values()]
        if any(len(some) > MAX_RULE_IDS or (len(some) and int(some.max()) >= self._vocab_size) for some in ids):
            return f"encoder has more than {MAX_RULE_IDS} ids in one rule, or an id beyond the vocabulary"
        return None

    def _end_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) * self._block_size

    def _state_of(self, item: RowOpen) -> OutputRules | None:
        if item.encoder is None:
            return None
        self._lens[item.row] = item.encoder.num_tokens
        self._ends[item.row] = self._end_of(item.encoder.num_tokens)
        rules = OutputRules(item.encoder)
        return rules if rules.has_any else None

    def start_of(self, item: RowOpen) -> int:
        """Where the decoder's positions of a row begin."""
        return 0 if item.encoder is None else self._end_of(item.encoder.num_tokens)

    def columns(self, rows: I64) -> tuple[I32, I32]:
        """Encoder positions of each row, without and with their padding."""
        return self._lens[rows], self._ends[rows]

    def are_bad(self, rows: I64, context_lens: I64, ends: I64, num_computed: I64) -> Bools:
        """Rows whose chunk has encoder positions, but not all of them and no others; rows whose encoder positions are
        computed already; and rows whose chunk is longer than the decoder allows.
        """
        own = self._ends[rows]
        is_whole = (context_lens == 0) & (ends == own) & (num_computed == 0)
        bad: Bools = ((context_lens < own) & ~is_whole) | (ends - own > self._info.max_decoder_tokens)
        return bad

    def process(self, step: Step, logits: Logits) -> None:
        for line, (row, output) in enumerate(zip(logits.rows.tolist(), logits.outputs.tolist(), strict=True)):
            rules = self.in_use.get(row)
            if rules is not None and rules.applies_at(output):
                rules.apply(logits.as_float()[line], output)


@dataclass(frozen=True, slots=True)
class OutputRules:
    """Which ids a row can sample, by output position."""

    given: EncoderInput

    @property
    def has_any(self) -> bool:
        given = self.given
        return bool(given.allowed or len(given.banned_ids) or len(given.first_banned_ids))

    def applies_at(self, position: int) -> bool:
        """Whether there is a rule at this output position."""
        given = self.given
        is_first = position == given.first_banned_at and len(given.first_banned_ids) > 0
        return len(given.banned_ids) > 0 or position in given.allowed or is_first

    def apply(self, logits: torch.Tensor, position: int) -> None:
        """Changes float32 logits [vocab] in place. As in transformers, a forced id gets 0 and all others minus
        infinity, after all other processing."""
        given = self.given
        allowed = given.allowed.get(position)
        if allowed is None:
            logits[given.banned_ids.tolist()] = -math.inf
            if position == given.first_banned_at:
                logits[given.first_banned_ids.tolist()] = -math.inf
            return
        ids = allowed.tolist()
        kept = logits[ids] if len(ids) > 1 else logits.new_zeros(1)
        logits.fill_(-math.inf)
        logits[ids] = kept
