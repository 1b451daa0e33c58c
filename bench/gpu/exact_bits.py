"""Bits on which exact mode relies, and bits that would permit faster tiles if they are equal.

A row without a verdict only informs: other tiles may have other bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.gpu.kernels import Case, using
from bench.gpu.model import EXACT_SETTINGS, GREEDY, Rows, load, make_checkpoint
from bench.gpu.report import Report
from worker_svc.engine.gpu.attention import paged
from worker_svc.engine.gpu.kernels.linears import linear
from worker_svc.engine.gpu.runner import DeviceRunner

LINES = linear.TILE.rows
NUM_LOGPROBS = 20
DECODED = 12


def exact_bits(report: Report) -> None:
    _linear_lines(report)
    _attention_lines(report)
    _engine(report)


def _linear_inputs(report: Report) -> tuple[torch.Tensor, torch.Tensor]:
    out_size, in_size = (130, 64) if report.is_smoke else (3072, 1024)
    x, weight = (torch.randn(n, in_size, device=report.device).to(report.dtype) for n in (LINES, out_size))
    return x, weight


def _linear_lines(report: Report) -> None:
    """A row of inputs at each line of a tile, among others. 16 lines are HMMA's, 64 HGMMA's."""
    x, weight = _linear_inputs(report)
    row, different = x[0].clone(), []
    expected = linear.linear(row[None], weight, None)[0]
    for line in range(0, LINES, 21) if report.is_smoke else range(LINES):
        others = x.roll(line + 1, 0)
        others[line] = row
        if not torch.equal(linear.linear(others, weight, None)[line], expected):
            different.append(line)
    report.row("exact_bits", "linear: a row at every line", ok=not different, note=f"lines that differ: {different}")


def _attention_lines(report: Report) -> None:
    """The last query of a prompt, whose chunk begins at every place: it is at another line each time. Then other
    tiles."""
    context, count = (20, 6) if report.is_smoke else (1500, 40)
    whole = Case.make(report, [context], count)
    _, out = whole.run(whole.triton("exact"))
    different = []
    for length in range(1, count):
        part = whole.last(length)
        _, found = part.run(part.triton("exact"))
        if not torch.equal(found[-1], out[-1]):
            different.append(length)
    note = f"lengths of the last chunk that differ: {different}"
    report.row("exact_bits", "attention: a query at every line", ok=not different, note=note)
    with using("exact", replace(paged.EXACT_TILES, block_m=128, num_warps=8)):
        attention = whole.triton("exact")
    try:
        _, found = whole.run(attention)
        report.row("exact_bits", "attention: block_m 128", note=_said(torch.equal(found, out)))
    except Exception as error:  # it may need more registers or memory than there are
        report.row("exact_bits", "attention: block_m 128", note=f"{type(error).__name__}: {str(error)[:120]}")


def _said(is_equal: bool) -> str:
    return "the same bits" if is_equal else "other bits"


def _engine(report: Report) -> None:
    """Log probabilities of a long row: by graphs, kernel by kernel, without early starts, and after its tokens were
    computed as a prompt."""
    runner = load(make_checkpoint(report), report, **EXACT_SETTINGS)
    length = 40 if report.is_smoke else 3000
    prompt = np.random.default_rng(2).integers(3, runner.info.vocab_size, length).tolist()
    tokens, expected = _decoded(runner, prompt)
    with runner._compute.eager():
        _compare(report, "graph = eager", _decoded(runner, prompt), (tokens, expected))
        forms = runner._forms
        runner._forms = replace(forms, may_overlap=False)
        _compare(report, "early starts = without", _decoded(runner, prompt), (tokens, expected))
        runner._forms = forms
    rows = Rows(runner, [prompt + tokens[:-1]], room=8, fields=_asking())
    found = rows.launch({0: len(rows.prompts[0])}).result()
    _compare(
        report, f"prompt = decode at {length} tokens", (tokens, [found.logprobs.logprobs]), (tokens, expected[-1:])
    )


def _decoded(runner: DeviceRunner, prompt: list[int]) -> tuple[list[int], list[Any]]:
    """The tokens after a prompt, and the log probabilities at each."""
    rows = Rows(runner, [prompt], room=DECODED + 8, sampling=GREEDY, fields=_asking())
    tokens, values = [], []
    for count in [len(prompt)] + [1] * (DECODED - 1):
        output = rows.launch({0: count}).result()
        tokens += output.token_ids.tolist()
        values.append(output.logprobs.logprobs)
    return tokens, values


def _asking() -> list[dict[str, Any]]:
    return [{"logprobs": NUM_LOGPROBS}]


def _compare(
    report: Report, name: str, found: tuple[list[int], list[Any]], expected: tuple[list[int], list[Any]]
) -> None:
    different = [i for i, pair in enumerate(zip(found[1], expected[1], strict=True)) if not np.array_equal(*pair)]
    note = f"tokens whose log probabilities differ: {different}"
    report.row("exact_bits", name, ok=not different and found[0] == expected[0], note=note)
