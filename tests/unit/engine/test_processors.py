"""Processing of logits: the specification against a computation in double, the kernel against the specification."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from step_protocol.messages import RowOpen
from tests.unit.engine.driver import u32
from tests.unit.engine.processor_cases import CASES, Asked
from worker_svc.engine.cpu.backend import CpuBackend
from worker_svc.engine.cpu.reference import ReferenceBackend
from worker_svc.engine.sampling.processors import RECORD, ProcessedRows, ProcessorTable

VOCAB = 60
WIDTH = 300  # tokens of a row


def expected(logits: list[float], asked: Asked, prompt: list[int], output: list[int]) -> list[float]:
    """The processed logits in double, id by id."""
    rules, sampling = asked.rules, asked.sampling
    biases = dict(zip(rules.bias_ids.tolist(), rules.biases.tolist(), strict=True))
    counts = Counter(output)
    result = []
    for token_id, value in enumerate(logits):
        is_banned = token_id in rules.banned_ids or (len(rules.allowed_ids) and token_id not in rules.allowed_ids)
        for *before, last in (word.tolist() for word in rules.bad_words):
            is_ending = len(before) <= len(output) and output[len(output) - len(before) :] == before
            is_banned |= last == token_id and is_ending
        is_banned |= token_id in asked.banned and len(output) < asked.banned_before
        value += biases.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value -= sampling.frequency_penalty * counts[token_id] + sampling.presence_penalty * (token_id in counts)
        result.append(-np.inf if is_banned else value)
    return result


class Table:
    """A processor table whose rows are opened by tests."""

    def __init__(self, num_rows: int) -> None:
        self.tokens = np.zeros((num_rows, WIDTH), np.uint32)
        self.table = ProcessorTable(self.tokens, VOCAB)

    def open(self, row: int, asked: Asked, prompt: list[int], output: list[int]) -> None:
        self.tokens[row, : len(prompt) + len(output)] = prompt + output
        none = u32()
        item = RowOpen(
            row, none, len(prompt), none, 0, asked.sampling, 0, banned_ids=u32(*asked.banned),
            banned_before=asked.banned_before, rules=asked.rules,
        )  # fmt: skip
        assert self.table.refusal(item) is None
        self.table.open(item)

    def select(self, histories: dict[int, tuple[list[int], list[int]]]) -> ProcessedRows | None:
        rows = np.array([*histories])
        lens = np.array([[len(prompt) + len(output), len(output)] for prompt, output in histories.values()])
        return self.table.select(rows, lens[:, 0], lens[:, 1])


def draw_history(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """A prompt, and an output with few ids, so that ids and sequences recur."""
    prompt = rng.integers(0, VOCAB, rng.integers(1, 60)).tolist()
    return prompt, rng.choice([3, 11, 13, 15, 17, 21, 40], rng.integers(0, 30)).tolist()


def processed(backend: CpuBackend | ReferenceBackend, logits: np.ndarray, selected: ProcessedRows) -> np.ndarray:
    result = torch.from_numpy(logits.copy())
    backend.process_logits(result, selected)
    return result.numpy()


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(20))
def test_processing_follows_the_definition(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (1, VOCAB)).astype(np.float32)
    table, history = Table(1), draw_history(rng)
    table.open(0, CASES[name], *history)
    selected = table.select({0: history})
    wanted = expected(logits[0].tolist(), CASES[name], *history)
    if selected is None:
        assert wanted == logits[0].tolist()
        return
    result = processed(ReferenceBackend("exact"), logits, selected)
    np.testing.assert_allclose(result[0], wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_gives_the_bits_of_the_specification(threads: int) -> None:
    rng = np.random.default_rng(5)
    kernel, reference = CpuBackend(threads), ReferenceBackend("exact")
    for _ in range(20):
        table, histories = Table(40), {row: draw_history(rng) for row in rng.permutation(40).tolist()}
        for row, history in histories.items():
            table.open(row, rng.choice(list(CASES.values())), *history)
        logits = rng.normal(0, 4, (40, VOCAB)).astype(np.float32)
        logits[rng.random(logits.shape) < 0.02] = -np.inf
        selected = table.select(histories)
        assert selected is not None
        together = processed(kernel, logits, selected)
        np.testing.assert_array_equal(bits(together), bits(processed(reference, logits, selected)))
        for line, (row, history) in enumerate(histories.items()):  # alone
            alone = table.select({row: history})
            result = logits[[line]] if alone is None else processed(kernel, logits[[line]], alone)
            np.testing.assert_array_equal(bits(result[0]), bits(together[line]))


def test_long_histories_are_shared_among_threads() -> None:
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, 40_000)).astype(np.uint32)
    table = ProcessorTable(tokens, VOCAB)
    none = u32()
    for row in range(8):
        table.open(RowOpen(row, none, 100, none, 0, CASES["all"].sampling, 0))
    rows = np.arange(8)
    selected = table.select(rows, np.full(8, 40_000), np.full(8, 39_900))
    assert selected is not None
    logits = np.random.default_rng(1).normal(0, 4, (8, VOCAB)).astype(np.float32)
    results = [processed(backend, logits, selected) for backend in (CpuBackend(2), ReferenceBackend("exact"))]
    np.testing.assert_array_equal(bits(results[0]), bits(results[1]))


def test_records_have_the_layout_of_the_kernel() -> None:
    assert CpuBackend(1)._kernels.quire_processor_row_bytes() == RECORD.itemsize


def test_a_row_is_selected_only_while_it_needs_processing() -> None:
    table = Table(4)
    table.open(0, CASES["none"], [1], [])
    table.open(1, CASES["min_tokens"], [1], [])
    assert table.select({0: ([1], [])}) is None
    assert table.select({1: ([1], [2] * 4)}) is None
    selected = table.select({0: ([1], []), 1: ([1], [2] * 3)})
    assert selected is not None
    assert (selected.lines.tolist(), selected.rows.tolist()) == ([1], [1])
    table.table.close(u32(1, 3, 9))
    assert table.select({1: ([1], [])}) is None


def test_a_reopened_row_keeps_nothing() -> None:
    table = Table(1)
    table.open(0, CASES["all"], [1], [])
    table.open(0, CASES["none"], [1], [])
    assert table.select({0: ([1], [])}) is None
