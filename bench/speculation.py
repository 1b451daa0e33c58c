"""Drafts of which a share is right, on the CPU worker's engine alone: bench/worker.py --speculation."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from request_fields.fields import SamplingParams
from step_protocol.messages import RowOpen, StepBatch, StepOutput
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.speculation.drafts import RowDrafts

GREEDY = SamplingParams(0.0, 0, 1.0, 0.0, 1)
PROMPT_LEN = 32


class GivenDrafts:
    """Proposes the tokens of an earlier run. A share of them is right."""

    name = "given"
    draft_s = 0.0

    def __init__(self, rows: OpenRows, expected: list[list[int]], right: float) -> None:
        self._rows, self._expected, self._right = rows, expected, right
        self._rng = np.random.default_rng(1)

    def propose(self, rows: np.ndarray, counts: np.ndarray) -> list[list[int]]:
        return [self._propose(row, most) for row, most in zip(rows.tolist(), counts.tolist(), strict=True)]

    def _propose(self, row: int, most: int) -> list[int]:
        known = len(self._rows.history(row)[1])
        found = self._expected[row][known : known + most]
        return [id_ if self._rng.random() < self._right else (id_ + 1) % 1000 for id_ in found]

    def close(self, row: int) -> None: ...


def decode(runner: ModelRunner, num_rows: int, num_tokens: int) -> tuple[list[list[int]], float]:
    """`decode_prompts` of rows with different prompts."""
    prompts = [np.arange(3 + row, 3 + row + PROMPT_LEN, dtype=np.uint32) for row in range(num_rows)]
    return decode_prompts(runner, prompts, num_tokens, GREEDY)


def decode_prompts(
    runner: ModelRunner, prompts: list[np.ndarray], num_tokens: int, sampling: SamplingParams
) -> tuple[list[list[int]], float]:
    """The outputs of these prompts, as the scheduler asks for them, and the tokens per second after the prompts, until
    the first row has so many tokens.
    """
    size, num_rows, prompt_lens = runner.info.block_size, len(prompts), np.array([len(prompt) for prompt in prompts])
    num_blocks = -(-(int(prompt_lens.max()) + num_tokens + 48) // size)
    rows = np.arange(num_rows, dtype=np.uint32)
    first_slots = np.arange(num_rows, dtype=np.int64) * num_blocks * size
    runner.reset_rows()
    output = StepOutput(0, rows[:0], rows[:0])
    found: list[list[int]] = [[] for _ in range(num_rows)]
    for row, prompt in enumerate(prompts):
        table = np.arange(row * num_blocks, (row + 1) * num_blocks, dtype=np.uint32)
        opened = RowOpen(row, prompt, len(prompt), table, 0, sampling, 0)
        slots = (first_slots[row] + np.arange(len(prompt))).astype(np.uint32)
        one = np.ones(1, np.uint32)
        step = StepBatch(1 + row, one * row, one * len(prompt), one * 0, np.ones(1, np.bool_), slots, opens=[opened])
        output = runner.execute(step)
        found[row] += output.token_ids.tolist()
    wanted, started = np.zeros(num_rows, np.int64), time.perf_counter()
    while max(map(len, found)) < num_tokens:
        starts = prompt_lens + np.array([len(tokens) for tokens in found]) - 1
        slots = (first_slots + starts + wanted).astype(np.uint32)
        every, ones = np.ones(num_rows, np.bool_), np.ones(num_rows, np.uint32)
        step = StepBatch(step.step_id + 1, rows, ones, starts.astype(np.uint32), every, slots)
        if wanted.any():
            step.max_query_lens = (1 + wanted).astype(np.uint32)
        output = runner.execute(step)
        wanted = np.zeros_like(wanted) if output.draft_lens is None else output.draft_lens.astype(np.int64)
        ends = np.cumsum(ones if output.token_lens is None else output.token_lens)
        for row, tokens in enumerate(np.split(output.token_ids, ends[:-1])):
            found[row] += tokens.tolist()
    return found, sum(len(tokens) - 1 for tokens in found) / (time.perf_counter() - started)


def measure_speculation(runner: ModelRunner, num_rows: int, num_tokens: int, repeats: int, name: str) -> dict[str, Any]:
    """Tokens per second by the share of right drafts and the most drafts of a step, in pairs with none. `ideal`: steps
    with drafts take as long as steps without.
    """
    figures = dict[str, Any]()
    decode(runner, num_rows, 4)
    expected, _ = decode(runner, num_rows, num_tokens + 16)
    shares = (0.0, 0.5, 0.7, 0.9) if num_rows == 1 else (0.0, 0.7)
    for most, right in ((most, right) for most in (3, 5) for right in shares):
        drafts = RowDrafts(runner._rows, most, lambda rows, right=right: GivenDrafts(rows, expected, right))
        runner._drafts = drafts
        for _ in range(2):
            decode(runner, num_rows, min(num_tokens, 40))  # measures the times of steps, and adapts
        pairs = []
        for _ in range(repeats):
            runner._drafts = None
            plain = decode(runner, num_rows, num_tokens)[1]
            runner._drafts = drafts
            found, speed = decode(runner, num_rows, num_tokens)
            if any(
                tokens[:num_tokens] != whole[: len(tokens[:num_tokens])]
                for tokens, whole in zip(found, expected, strict=True)
            ):
                raise RuntimeError("the output with drafts differs")
            pairs.append((speed / plain, speed, plain))
        gain, speed, plain = sorted(pairs)[len(pairs) // 2]
        key = f"{num_rows} rows k{most} accept {right}"
        figures[key] = {
            "tok_s": round(speed, 1),
            "off": round(plain, 1),
            "gain": round(gain, 2),
            "ideal": round(sum(right**nth for nth in range(most + 1)), 2),
            "drafted": drafts.counts.drafted.tolist(),
        }
        print(f"{name} {key}: {figures[key]}", flush=True)
        runner._drafts = None
        runner._rows._parts.remove(drafts)
    return figures
