"""Device tables for the logits processing of the open rows. The kernels and tables are in kernels/process.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from step_protocol.columns import F32, I64, U32
from step_protocol.messages import RowOpen
from worker_svc.engine.gpu.kernels.sampler.banned import mask_banned
from worker_svc.engine.gpu.kernels.sampler.process import (
    IN_PROMPT,
    RECENT,
    Drafts,
    ban_bad_words,
    process,
    record_tokens,
)
from worker_svc.engine.gpu.uploads import to_device
from worker_svc.engine.rows.open_rows import OpenRows


class DeviceProcessing:
    """Tables of all rows; only rows that ask for processing use theirs. 8 bytes per row and id of the vocabulary."""

    def __init__(self, state: torch.Tensor, vocab: range) -> None:
        """`state` are the row records, `vocab` is this rank's part of the vocabulary."""
        max_rows, self._device = len(state), state.device
        self._state = state
        self._vocab = vocab
        self._added = torch.zeros(max_rows, len(vocab), device=self._device)
        self._counts = torch.zeros(max_rows, len(vocab), dtype=torch.int32, device=self._device)
        self._recent = torch.zeros(max_rows, RECENT, dtype=torch.int32, device=self._device)
        self._bad_words: dict[
            int, tuple[U32, ...]
        ] = {}  # by row; a closed row keeps its words until it is opened again
        self._words = self._upload_words()

    def open(self, opens: list[RowOpen], rows: OpenRows) -> None:
        """Sets the tables of rows that were opened in this step. Call it before the step is launched."""
        has_new_words = False
        for item in opens:
            if item.row >= len(rows.is_open) or not rows.is_open[item.row]:
                continue
            has_new_words |= self._set_words(item.row, item.rules.bad_words)
            if rows.is_always_processed(item.row):
                self._open_one(item, *rows.history(item.row))
        if has_new_words:
            self._words = self._upload_words()

    def _set_words(self, row: int, words: tuple[U32, ...]) -> bool:
        """Sets the bad words of a row. Returns whether any table must be uploaded."""
        former = self._bad_words.pop(row, ())
        if words:
            self._bad_words[row] = words
        return bool(former or words)

    def _open_one(self, item: RowOpen, prompt: U32, output: U32) -> None:
        rules, added = item.rules, self._added[item.row]
        added.zero_()
        if len(rules.allowed_ids):
            added.fill_(-torch.inf).index_fill_(0, self._local(rules.allowed_ids), 0.0)
        is_here = self._is_here(rules.bias_ids)
        added.index_add_(0, self._local(rules.bias_ids), self._upload(rules.biases[is_here]))
        added.index_fill_(0, self._local(rules.banned_ids), -torch.inf)
        self._count(item.row, prompt, output)

    def move(self, beams: I64, rows: OpenRows) -> None:
        """Sets the counted tokens of beams that continue other beams. Call it before the step is launched."""
        for row in beams.tolist():
            if rows.is_always_processed(row):
                self._count(row, *rows.history(row))

    def _count(self, row: int, prompt: U32, output: U32) -> None:
        counts = self._counts[row]
        counts.zero_().index_fill_(0, self._local(prompt), IN_PROMPT)
        seen = self._local(output)
        counts.index_add_(0, seen, torch.ones_like(seen, dtype=torch.int32))
        last = np.arange(max(0, len(output) - RECENT), len(output))
        recent = self._upload(output[last].astype(np.int32))
        self._recent[row].index_copy_(0, self._upload(last % RECENT), recent)

    def process(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, drafts: Drafts = None
    ) -> torch.Tensor:
        """float32 logits of rows (-1: padding) that sample at these output positions, with all processing."""
        logits = process(logits, self._state, rows, self._added, self._counts, self._vocab.start, drafts)
        ban_bad_words(logits, rows, positions, self._words, self._recent, self._vocab.start, drafts)
        mask_banned(logits, self._state, rows, positions, self._vocab.start)
        return logits

    def note(self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Records the tokens that these rows sampled."""
        record_tokens(tokens, rows, positions, self._counts, self._recent, self._vocab.start)

    def _is_here(self, ids: U32) -> npt.NDArray[np.bool_]:
        is_here: npt.NDArray[np.bool_] = (ids >= self._vocab.start) & (ids < self._vocab.stop)
        return is_here

    def _local(self, ids: U32) -> torch.Tensor:
        """Indices of those ids that are in this rank's part of the vocabulary."""
        return self._upload(ids[self._is_here(ids)].astype(np.int64) - self._vocab.start)

    def _upload(self, values: npt.NDArray[np.int64] | npt.NDArray[np.int32] | F32) -> torch.Tensor:
        return to_device(values, self._device)

    def _upload_words(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The bad words of all rows, in the form of `ban_bad_words`."""
        ranges = np.zeros((len(self._state), 2), np.int32)
        words: list[U32] = []
        for row, of_row in self._bad_words.items():
            ranges[row] = len(words), len(words) + len(of_row)
            words += of_row
        starts = np.cumsum([0, *map(len, words)]).astype(np.int32)
        ids = np.concatenate([np.zeros(1, np.uint32), *words])[1:].astype(np.int32)
        return self._upload(ranges), self._upload(starts), self._upload(ids)
