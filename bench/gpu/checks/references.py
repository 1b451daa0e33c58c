"""Expected results of integer kernels and the sampler, in plain Python and numpy. Other kernels have a torch form."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from request_fields.fields import SamplingParams
from worker_svc.engine.gpu.kernels.attention import WHOLE
from worker_svc.engine.gpu.kernels.record import TABLE, WORDS
from worker_svc.engine.gpu.kernels.work_list import Splits
from worker_svc.engine.sampling.noise import keep_threshold, sample_token


def prepared(
    state: torch.Tensor, rows: list[int], starts: list[int], contexts: list[int], known: list[int], block_size: int
) -> list[tuple[int, int, int]]:
    """(token, position, slot) of every token of the batch."""
    result = []
    for i, row in enumerate(rows):
        for token in range(starts[i], starts[i + 1]):
            position = contexts[i] + token - starts[i]
            value = known[token] if known[token] >= 0 else int(state[row, WORDS["last_token"]])
            slot = int(state[row, TABLE + position // block_size]) * block_size + position % block_size
            result.append((value, position + int(state[row, WORDS["position_delta"]]), slot))
    return result


def work_items(
    starts: list[int],
    contexts: list[int],
    *,
    queries_per_tile: int,
    min_split: int,
    splits: Splits,
    min_queries: int,
    window: int | None = None,
    fixed_split: int = 0,
) -> tuple[list[tuple[int, int, int, int]], int]:
    """The work items in order, and the keys of a split."""
    counts = [after - before for before, after in itertools.pairwise(starts)]
    keys = {row: contexts[row] + count for row, count in enumerate(counts)}
    if not min_split:
        rows = sorted((row for row in keys if counts[row] >= min_queries), key=lambda row: (-keys[row], row))
        divided = _divided(rows, counts, keys, queries_per_tile, splits, window, fixed_split) if fixed_split else {}
        whole = [row for row in rows if row not in divided]
        items = [(row, q, 0, WHOLE.value) for row in whole for q in reversed(range(0, counts[row], queries_per_tile))]
        part = 0
        for row, count in divided.items():
            items += [(row, 0, index, part) for index in range(count)]
            part += count * counts[row]
        return items, fixed_split
    rows = [row for row in keys if min_queries <= counts[row] <= queries_per_tile]
    if window is not None:
        keys = {row: n - max(n - counts[row] + 1 - window, 0) // min_split * min_split for row, n in keys.items()}
    split = splits.keys(
        sum(keys[row] for row in rows), max((keys[row] for row in rows), default=0), min_split,
        sum(keys[row] * counts[row] for row in rows),
    )  # fmt: skip
    full, tails, part = [], [], 0
    for row in rows:
        num_full, tail = divmod(keys[row], split)
        full += [(row, 0, index, part) for index in range(num_full)]
        tails += [(-tail, (row, 0, num_full, part))] if tail else []
        part += (num_full + bool(tail)) * counts[row]
    return full + [item for _, item in sorted(tails)], split


def _divided(
    rows: list[int],
    counts: list[int],
    keys: dict[int, int],
    queries_per_tile: int,
    splits: Splits,
    window: int | None,
    size: int,
) -> dict[int, int]:
    """The numbers of fixed splits of the rows that are divided."""
    first = {row: 0 if window is None else max(keys[row] - counts[row] + 1 - window, 0) // size * size for row in rows}
    lengths = {row: keys[row] - first[row] for row in rows}
    work = sum(-(-counts[row] // queries_per_tile) * lengths[row] for row in rows)
    found, total = {}, 0
    for row in sorted(rows):
        if counts[row] > queries_per_tile or lengths[row] <= size or lengths[row] <= work * splits.factor:
            continue
        total += -(-lengths[row] // size) * counts[row]
        if total <= splits.most:
            found[row] = -(-lengths[row] // size)
    return found


def threshold_of(logits: torch.Tensor, params: SamplingParams) -> np.float32:
    """The threshold of one row of logits [vocab]."""
    return keep_threshold((logits.float().numpy() / np.float32(params.temperature)).astype(np.float32), params)


def token_of(logits: torch.Tensor, params: SamplingParams, sample_index: int, position: int) -> int | None:
    """The token for logits [vocab]; None if they hold NaN, +inf or no finite number."""
    return sample_token(logits.float().numpy().astype(np.float32), params, sample_index, position)
