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
from worker_svc.engine.gpu.step.device_step import DeviceLogits, DevicePart, DeviceStep
from worker_svc.engine.gpu.uploads import to_device
from worker_svc.engine.row_part import RowPart
from worker_svc.engine.rows.open_rows import OpenRows

BadWords = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DeviceProcessing(RowPart, DevicePart):
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
        self._words: BadWords | None = None  # of all rows on the device; None: some have changed

    def serve(self, rows: OpenRows) -> DeviceProcessing:
        """Keeps the tables of these rows from now on."""
        self._rows = rows
        return self

    def open(self, item: RowOpen) -> None:
        former, words = self._bad_words.pop(item.row, ()), item.rules.bad_words
        if words:
            self._bad_words[item.row] = words
        if former or words:
            self._words = None
        if self._rows.is_always_processed(item.row):
            self._open_one(item, *self._rows.history(item.row))

    def _open_one(self, item: RowOpen, prompt: U32, output: U32) -> None:
        rules, added = item.rules, self._added[item.row]
        added.zero_()
        if len(rules.allowed_ids):
            added.fill_(-torch.inf).index_fill_(0, self._local(rules.allowed_ids), 0.0)
        is_here = self._is_here(rules.bias_ids)
        added.index_add_(0, self._local(rules.bias_ids), self._upload(rules.biases[is_here]))
        added.index_fill_(0, self._local(rules.banned_ids), -torch.inf)
        self._count(item.row, prompt, output)

    def move(self, sources: I64, targets: I64) -> None:
        for row in targets.tolist():
            if self._rows.is_always_processed(row):
                self._count(row, *self._rows.history(row))

    def _count(self, row: int, prompt: U32, output: U32) -> None:
        counts = self._counts[row]
        counts.zero_().index_fill_(0, self._local(prompt), IN_PROMPT)
        seen = self._local(output)
        counts.index_add_(0, seen, torch.ones_like(seen, dtype=torch.int32))
        last = np.arange(max(0, len(output) - RECENT), len(output))
        recent = self._upload(output[last].astype(np.int32))
        self._recent[row].index_copy_(0, self._upload(last % RECENT), recent)

    def process(self, step: DeviceStep, logits: DeviceLogits) -> None:
        columns = logits.columns
        drafts = (columns.nth, columns.sample_tokens, columns.token_ids) if columns.bucket.has_drafts else None
        logits.values = self.processed(logits.values, columns.sample_rows, columns.output_positions, drafts)

    def sampled(self, step: DeviceStep, logits: DeviceLogits, tokens: torch.Tensor) -> None:
        self.note(tokens, logits.kept, logits.columns.output_positions)

    def processed(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, drafts: Drafts = None
    ) -> torch.Tensor:
        """float32 logits of rows (-1: padding) that sample at these output positions, with all processing."""
        if self._words is None:
            self._words = self._upload_words()
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

    def _upload_words(self) -> BadWords:
        """The bad words of all rows, in the form of `ban_bad_words`."""
        ranges = np.zeros((len(self._state), 2), np.int32)
        words: list[U32] = []
        for row, of_row in self._bad_words.items():
            ranges[row] = len(words), len(words) + len(of_row)
            words += of_row
        starts = np.cumsum([0, *map(len, words)]).astype(np.int32)
        ids = np.concatenate([np.zeros(1, np.uint32), *words])[1:].astype(np.int32)
        return self._upload(ranges), self._upload(starts), self._upload(ids)
