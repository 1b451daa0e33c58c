"""Processing of logits before sampling, only for rows that ask for it. `process_logits` is the specification.

The processing of a row is a function of its logits, its RowOpen and its tokens, so a row that is opened again with the
same prompt and output gets the same logits. The steps in this order, all in float32:

    1. allowed_token_ids   all other ids get minus infinity
    2. banned_token_ids    minus infinity
    3. bad_words           the last id of a sequence gets minus infinity if the output ends with the ids before it
    4. banned_ids          minus infinity at output positions below `banned_before` (min_tokens)
    5. logit_bias          added
    6. repetition_penalty  for each id in prompt or output: divides a positive logit, multiplies others; content ids of
                           the prompt are no ids of the vocabulary and have no effect
    7. frequency_penalty   for each id in the output: penalty * number of occurrences is subtracted
    8. presence_penalty    for each id in the output: penalty is subtracted once

Sampling (noise.py) follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from request_fields.fields import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORDS,
    MAX_BANNED_IDS,
    MAX_LOGIT_BIAS,
    MAX_RULE_IDS,
    SamplingParams,
)
from step_protocol.columns import F32, I64, U32
from step_protocol.messages import RowOpen, TokenRules
from worker_svc.engine.row_part import SomeRows
from worker_svc.engine.step import Logits, Step, StepPart

ALWAYS = 2**31  # output position that no row reaches

# A row's record for the kernel: `ProcessorRow` of kernels/processors.cpp. Pointers refer to arrays of the table.
RECORD = np.dtype(
    [
        ("repetition_penalty", np.float32), ("frequency_penalty", np.float32), ("presence_penalty", np.float32),
        ("num_bad_words", np.int32), ("prompt_len", np.int64), ("banned_before", np.int64),
        *((name, np.int64) for name in ("num_allowed", "num_banned", "num_early", "num_biases")),
        *((name, np.uint64) for name in ("tokens", "allowed", "banned", "early", "bias_ids", "biases")),
        *((name, np.uint64) for name in ("bad_word_ids", "bad_word_ends")),
    ],
    align=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowProcessing:
    """The processing that one row asks for."""

    sampling: SamplingParams
    rules: TokenRules
    early_banned: U32  # banned at output positions below `banned_before`
    banned_before: int

    @property
    def has_penalty(self) -> bool:
        sampling = self.sampling
        return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0

    @property
    def asks_before(self) -> int:
        """The first output position from which the row needs no processing; 0 if it never needs any."""
        rules = self.rules
        is_ruled = len(rules.allowed_ids) or len(rules.banned_ids) or rules.bad_words or len(rules.bias_ids)
        if is_ruled or self.has_penalty:
            return ALWAYS
        return self.banned_before if len(self.early_banned) else 0


def process_logits(logits: F32, asked: RowProcessing, prompt: U32, output: U32) -> None:
    """Changes logits [vocab] in place, before the token that follows `output` is sampled."""
    rules = asked.rules
    if len(rules.allowed_ids):
        kept = logits[rules.allowed_ids]
        logits.fill(-np.inf)
        logits[rules.allowed_ids] = kept
    logits[rules.banned_ids] = -np.inf
    for word in rules.bad_words:
        if len(word) <= len(output) + 1 and np.array_equal(output[len(output) + 1 - len(word) :], word[:-1]):
            logits[word[-1]] = -np.inf
    if len(output) < asked.banned_before:
        logits[asked.early_banned] = -np.inf
    logits[rules.bias_ids] += rules.biases
    if asked.has_penalty:
        _penalize(logits, asked.sampling, prompt, output)


def _penalize(logits: F32, params: SamplingParams, prompt: U32, output: U32) -> None:
    repetition = np.float32(params.repetition_penalty)
    seen = np.union1d(prompt[prompt < len(logits)], output)
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / repetition, values * repetition)
    ids, counts = np.unique(output, return_counts=True)
    logits[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    logits[ids] -= np.float32(params.presence_penalty)


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """The rows of one step that ask for processing: P of the S rows of logits."""

    lines: I64  # [P] indices into the logits; ascending
    rows: I64  # [P] rows of the table
    num_tokens: I64  # [P] known tokens, prompt and output
    table: ProcessorTable

    @property
    def has_more_than_early_bans(self) -> bool:
        """Whether some row asks for more than the bans of min_tokens."""
        return bool(self.table.asks_always(self.rows).any())

    def process_one(self, logits: F32, index: int) -> None:
        """Processes the logits [vocab] of one of the P rows in place, as `process_logits` specifies."""
        self.table.process_row(logits, int(self.rows[index]), int(self.num_tokens[index]))


class ProcessorTable(SomeRows[tuple[RowProcessing, object]], StepPart):
    """The processing that each open row requests. All its state comes from RowOpen and the row's tokens."""

    def __init__(self, tokens: U32, vocab_size: int) -> None:
        """`tokens` [max_num_seqs, width] are the token histories of all rows; the row table writes them."""
        super().__init__()  # with the arrays of each row's record
        self._tokens = tokens
        self.start_of: Callable[[RowOpen], int] = lambda _item: 0  # the position of a row's first token with an effect
        self._vocab_size = vocab_size
        self._asks_before: I64 = np.zeros(len(tokens), np.int64)
        self._starts: I64 = np.zeros(len(tokens), np.int64)  # the tokens before have no effect: encoder positions
        self.records = np.zeros(len(tokens), RECORD)

    def refusal(self, item: RowOpen) -> str | None:
        """The error in the rules of a row; None if they are valid."""
        rules = item.rules
        if len(rules.bias_ids) != len(rules.biases):
            return f"logit_bias has {len(rules.bias_ids)} ids and {len(rules.biases)} values"
        if not (np.abs(rules.biases) <= MAX_LOGIT_BIAS).all():  # false for NaN
            return f"logit_bias has a value outside -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
        return (
            self._ids_refusal("banned_ids", item.banned_ids, min(MAX_BANNED_IDS, self._vocab_size - 1))
            or self._ids_refusal("allowed_token_ids", rules.allowed_ids, MAX_ALLOWED_IDS)
            or self._ids_refusal("banned_token_ids", rules.banned_ids, MAX_RULE_IDS)
            or self._ids_refusal("logit_bias", rules.bias_ids, MAX_RULE_IDS)
            or self._bad_words_refusal(rules.bad_words)
        )

    def _bad_words_refusal(self, bad_words: tuple[U32, ...]) -> str | None:
        if len(bad_words) > 2 * MAX_BAD_WORDS:
            return f"bad_words has {len(bad_words)} sequences, expected at most {2 * MAX_BAD_WORDS}"
        for ids in bad_words:
            refusal = self._ids_refusal("bad_words", ids, MAX_BAD_WORD_IDS) if len(ids) else "bad_words has no ids"
            if refusal is not None:
                return refusal
        return None

    def _ids_refusal(self, name: str, ids: U32, most: int) -> str | None:
        if len(ids) > most:
            return f"{name} has {len(ids)} ids, expected at most {most}"
        if len(ids) and int(ids.max()) >= self._vocab_size:
            return f"{name} has id {int(ids.max())}, which is not below the vocabulary size {self._vocab_size}"
        return None

    def _state_of(self, item: RowOpen) -> tuple[RowProcessing, object] | None:
        asked = RowProcessing(item.sampling, item.rules, item.banned_ids, item.banned_before)
        self._asks_before[item.row] = asked.asks_before
        if not asked.asks_before:
            return None
        start = self._starts[item.row] = self.start_of(item)
        return asked, self._write_record(item.row, asked, item.prompt_len - start)

    def close(self, rows: U32) -> None:
        if self.in_use:
            super().close(rows)
            self._asks_before[rows[rows < len(self._asks_before)]] = 0

    def reset(self) -> None:
        super().reset()
        self._asks_before[:] = 0

    def process(self, step: Step, logits: Logits) -> None:
        selected = self.select(logits.rows, logits.positions, logits.outputs)
        if selected is not None:
            step.backend.process_logits(logits.as_float(), selected)
            logits.has_rules = True

    def select(self, rows: I64, positions: I64, output_positions: I64 | U32) -> ProcessedRows | None:
        """The rows of a step that ask for processing before they sample the token at these sequence and output
        positions; None if there are none."""
        lines = np.flatnonzero(output_positions < self._asks_before[rows])
        if not len(lines):
            return None
        return ProcessedRows(lines, rows[lines], positions[lines] - self._starts[rows[lines]], self)

    def asks_always(self, rows: I64) -> npt.NDArray[np.bool_]:
        """Whether each row asks for processing at every output position."""
        is_always: npt.NDArray[np.bool_] = self._asks_before[rows] == ALWAYS
        return is_always

    def process_row(self, logits: F32, row: int, num_tokens: int) -> None:
        """Processes the logits [vocab] of one row in place, as `process_logits` specifies."""
        prompt_len = int(self.records["prompt_len"][row])
        tokens = self._tokens[row, self._starts[row] :]
        process_logits(logits, self.in_use[row][0], tokens[:prompt_len], tokens[prompt_len:num_tokens])

    def _write_record(self, row: int, asked: RowProcessing, prompt_len: int) -> object:
        """Writes the kernel's record of a row. Returns the arrays that it refers to."""
        rules = asked.rules
        lists = {
            "allowed": rules.allowed_ids,
            "banned": rules.banned_ids,
            "early": asked.early_banned,
            "bias_ids": rules.bias_ids,
            "bad_word_ids": np.concatenate(rules.bad_words) if rules.bad_words else np.empty(0, np.uint32),
        }
        arrays: dict[str, npt.NDArray[np.generic]] = {
            name: np.ascontiguousarray(ids, np.uint32) for name, ids in lists.items()
        }
        arrays["biases"] = np.ascontiguousarray(rules.biases, np.float32)
        arrays["bad_word_ends"] = np.cumsum([len(word) for word in rules.bad_words], dtype=np.int64)
        record = self.records[row]
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            record[name] = getattr(asked.sampling, name)
        record["prompt_len"], record["banned_before"] = prompt_len, asked.banned_before
        record["tokens"] = self._tokens[row, self._starts[row] :].ctypes.data
        for name, array in arrays.items():
            record[name] = array.ctypes.data
        counts = {"num_allowed": "allowed", "num_banned": "banned", "num_early": "early", "num_biases": "bias_ids"}
        for name, of in counts.items():
            record[name] = len(arrays[of])
        record["num_bad_words"] = len(rules.bad_words)
        return arrays
