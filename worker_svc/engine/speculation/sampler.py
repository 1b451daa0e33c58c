"""What models that propose drafts have in common: passes over tokens of rows, and tokens from logits with the noise of
the rows. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from step_protocol.columns import I64, U32, Bools
from worker_svc.engine.backend import Backend, ForwardBatch
from worker_svc.engine.rows.open_rows import OpenRows

Sampled = tuple[U32, Bools]  # tokens, and which of them are of bad logits
NO_TOKENS: Sampled = np.empty(0, np.uint32), np.empty(0, np.bool_)
TIME_WEIGHT = 0.1  # of the newest pass in the running mean
KIND_WEIGHT = 0.05  # of the newest draft that tells the two kinds apart


class DraftKind:
    """Whether drafts are most likely tokens, or sampled with the noise of the row: what was right more often where both
    differ.
    """

    def __init__(self) -> None:
        self.is_greedy: bool | None = None  # fixed, by measurements of either
        self._gain = 0.0  # mean of 1 where the most likely token was right, -1 where the sampled one was
        self._firsts: dict[int, tuple[int, int, int]] = {}  # row -> position, sampled token, most likely token

    def choose(self, sampled: U32, likely: U32) -> U32:
        is_greedy = self._gain > 0 if self.is_greedy is None else self.is_greedy
        return likely if is_greedy else sampled

    def note(self, rows: I64, positions: I64, sampled: U32, likely: U32) -> None:
        """The first drafts of rows."""
        for i in np.flatnonzero(sampled != likely).tolist():
            self._firsts[int(rows[i])] = int(positions[i]), int(sampled[i]), int(likely[i])

    def learn(self, row: int, tokens: U32) -> None:
        """A row has tokens behind its first draft."""
        if (first := self._firsts.pop(row, None)) is not None:
            position, sampled, likely = first
            token = int(tokens[position])
            self._gain += KIND_WEIGHT * ((token == likely) - (token == sampled) - self._gain)

    def forget(self, row: int) -> None:
        self._firsts.pop(row, None)


class DraftSampler:
    """Samples drafts of rows, whose tokens it learns from."""

    def __init__(self, backend: Backend, rows: OpenRows) -> None:
        self._backend, self._rows, self.kind = backend, rows, DraftKind()

    def learn(self, rows: I64) -> None:
        """Rows have their newest token."""
        for row in rows.tolist():
            self.kind.learn(row, self._rows.tokens_of(row))

    def batch(self, rows: I64, context_lens: I64, query_lens: I64, samples: Bools) -> ForwardBatch:
        """A pass over tokens of rows, with logits of the last one of those rows that sample."""
        rows_of, starts = np.repeat(rows, query_lens), np.append(0, np.cumsum(query_lens))
        positions = np.arange(starts[-1]) + np.repeat(context_lens - starts[:-1], query_lens)
        return ForwardBatch(
            token_ids=self._rows.token_ids(rows_of, positions),
            positions=positions.astype(np.int32),
            slots=self._rows.expected_slots(rows_of, positions),
            rows=rows.astype(np.int32),
            query_starts=starts.astype(np.int32),
            context_lens=context_lens.astype(np.int32),
            tables=self._rows.tables,
            head_tokens=starts[1:][samples] - 1,
        )

    def sample(self, logits: torch.Tensor, rows: I64, positions: I64) -> Sampled:
        """What the rows sample at these positions if these are their logits."""
        if not len(rows):
            return NO_TOKENS
        logits = self._in_vocabulary(logits)
        processed = self._rows.processed_rows(rows, positions)
        if processed is not None:
            logits = logits.float()
            self._backend.process_logits(logits, processed)
        sampled, is_bad = self._backend.sample(logits, self._rows.sampling_columns(rows, positions))
        likely: U32 = logits.argmax(1).numpy().astype(np.uint32)
        is_first = positions == self._rows.num_tokens[rows]
        self.kind.note(rows[is_first], positions[is_first], sampled[is_first], likely[is_first])
        return self.kind.choose(sampled, likely), is_bad

    def _in_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the row's vocabulary: one of the two is padded further."""
        size, own = self._rows.vocab_size, logits.shape[1]
        if own == size:
            return logits
        if own > size:
            return logits[:, :size].contiguous()
        return torch.nn.functional.pad(logits, (0, size - own), value=-torch.inf)

    def extend(
        self, rows: I64, counts: I64, first: Sampled, compute: Callable[[I64, int], Sampled]
    ) -> dict[int, list[int]]:
        """Drafts by row: the first ones, and those that `compute` samples after the n-th ones of some of these rows,
        up to the count of each row."""
        drafts: dict[int, list[int]] = {row: [] for row in rows.tolist()}
        (token_ids, is_bad), nth = first, 0
        while len(rows):
            rows, counts, token_ids = rows[~is_bad], counts[~is_bad], token_ids[~is_bad]
            self._rows.add_draft(rows, self._rows.num_tokens[rows] + nth, token_ids)
            for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
                drafts[row].append(token)
            nth += 1
            rows, counts = rows[counts > nth], counts[counts > nth]
            token_ids, is_bad = compute(rows, nth)
        return drafts


def mean_draft_s(before_s: float, started: float, num_rows: int) -> float:
    """The mean time of a draft, with a pass of these rows that began at `started`."""
    return before_s + TIME_WEIGHT * ((time.perf_counter() - started) / num_rows - before_s)
