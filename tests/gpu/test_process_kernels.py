"""The processing kernels give the bits of their specification, `worker_svc/engine/sampling/processors.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from step_protocol.messages import RowOpen, StepBatch
from tests.gpu.builders import DEVICE, ints
from tests.unit.engine.driver import u32
from tests.unit.engine.processor_cases import CASES, Asked
from worker_svc.engine.gpu.kernels.record import apply_deltas
from worker_svc.engine.gpu.kernels.sampler import process
from worker_svc.engine.gpu.step.device_rows import HEAD_WORDS, changed_words, make_state
from worker_svc.engine.gpu.step.processing import DeviceProcessing
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.positions import RowPositions
from worker_svc.engine.step import RowErrors

VOCAB = 2500  # two chunks
BLOCKS = 4


class Device:
    """Rows on the host and on the device; both get the same operations."""

    def __init__(self, num_rows: int, vocab: range = range(VOCAB)) -> None:
        self.rows = OpenRows(num_rows, 16 * BLOCKS, 16, 1, VOCAB)
        self.state = make_state(num_rows, BLOCKS, DEVICE)
        self.processing = DeviceProcessing(self.state, vocab)
        self.rows.add_parts(self.processing.serve(self.rows))
        self.places = RowPositions(num_rows)
        self.vocab = vocab

    def open(self, row: int, asked: Asked, prompt: list[int], output: list[int]) -> None:
        item = RowOpen(
            row, u32(*prompt, *output), len(prompt), u32(), 0, asked.sampling, 0, banned_ids=u32(*asked.banned),
            banned_before=asked.banned_before, rules=asked.rules,
        )  # fmt: skip
        errors = RowErrors()
        self.rows.close(u32(row))
        self.rows.open([item], errors)
        assert list(errors.values()) == []
        none = u32()
        batch = StepBatch(1, none, none, none, np.empty(0, np.bool_), none, opens=[item])
        apply_deltas(
            self.state, torch.from_numpy(changed_words(batch, self.rows, self.places, self.state.shape[1])).to(DEVICE)
        )

    def note(self, rows: list[int], tokens: list[int]) -> None:
        """Append a sampled token to each row."""
        positions = self.positions(rows)
        self.processing.note(ints(*tokens, 0), ints(*rows, -1), ints(*positions, 0))
        index = np.array(rows)
        self.rows.append(index, self.rows.num_tokens[index], np.array(tokens, np.uint32))

    def positions(self, rows: list[int]) -> list[int]:
        return [len(self.rows.history(row)[1]) for row in rows]

    def processed(self, logits: torch.Tensor, rows: list[int]) -> np.ndarray:
        """The kernels' result; the last line of `logits` is padding."""
        found = self.processing.processed(logits, ints(*rows, -1), ints(*self.positions(rows), 0))
        return found[:-1].cpu().numpy()

    def expected(self, logits: torch.Tensor, rows: list[int]) -> np.ndarray:
        result = logits[:-1].float().cpu().numpy()
        index = np.array(rows)
        selected = self.rows.processed_rows(index, self.rows.num_tokens[index])
        for i, line in enumerate([] if selected is None else selected.lines.tolist()):
            selected.process_one(result[line], i)
        return result[:, self.vocab.start : self.vocab.stop]


def randn(num_rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (4 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))).to(dtype).to(DEVICE)


def draw_history(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    prompt = rng.choice([3, 7, 9, 33, 2048, 2499, 50], rng.integers(1, 20)).tolist()
    return prompt, rng.choice([3, 11, 13, 15, 17, 21, 2048], rng.integers(0, 12)).tolist()


def check(device: Device, logits: torch.Tensor, rows: list[int]) -> None:
    own = logits[:, device.vocab.start : device.vocab.stop].contiguous()
    found, expected = device.processed(own, rows), device.expected(logits, rows)
    np.testing.assert_array_equal(found.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [range(VOCAB), range(1250, VOCAB), range(1250)])
def test_processing_follows_the_specification(dtype: torch.dtype, vocab: range) -> None:
    rng = np.random.default_rng(3)
    device, cases = Device(len(CASES), vocab), list(CASES.values())
    order = rng.permutation(len(cases)).tolist()
    for row in order:
        device.open(row, cases[row], *draw_history(rng))
    check(device, randn(len(order) + 1, dtype), order)
    for _ in range(3):  # tokens that the host has not sent
        device.note(order, rng.choice([3, 11, 13, 15, 17, 21], len(order)).tolist())
        check(device, randn(len(order) + 1, dtype), order)


def test_noted_tokens_leave_the_state_of_a_row_that_is_opened_with_them() -> None:
    rng = np.random.default_rng(5)
    device = Device(2)
    prompt, output = draw_history(rng)
    device.open(0, CASES["all"], prompt, [])
    for token in output:
        device.note([0], [token])
    device.open(1, CASES["all"], prompt, output)
    logits = randn(3)
    logits[1] = logits[0]
    first, second = device.processed(logits, [0, 1])
    np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))


def test_a_reopened_row_keeps_nothing() -> None:
    device = Device(2)
    device.open(0, CASES["all"], [3, 3, 9], [5, 5, 13, 15])
    device.open(1, CASES["bad_words"], [3], [3])
    check(device, randn(3), [0, 1])
    for name in ("frequency_penalty", "none", "logit_bias"):
        device.open(0, CASES[name], [7], [3])
        check(device, randn(3), [0, 1])


def test_long_bad_words_match_across_the_end_of_the_ring_of_tokens() -> None:
    device = Device(1)
    words = (u32(*range(100, 140), 7), u32(*range(100, 139), 99, 8))
    rules = replace(CASES["bad_words"].rules, bad_words=words)
    device.open(0, Asked(rules=rules), [1], [])
    for position in range(process.RECENT - 20, process.RECENT + 20):  # positions behind a long output
        token = 100 + position - (process.RECENT - 20)
        device.processing.note(ints(token), ints(0), ints(position))
    logits = torch.zeros(1, VOCAB, device=DEVICE)
    found = device.processing.processed(logits, ints(0), ints(process.RECENT + 20))
    assert torch.isinf(found[0]).nonzero().flatten().tolist() == [7]


def test_the_head_of_a_row_has_a_word_for_the_flag() -> None:
    assert process.IS_PROCESSED < HEAD_WORDS
