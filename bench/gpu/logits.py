"""Logits of the whole model against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.model import Rows, load, make_checkpoint, model_of
from bench.gpu.report import Report, relative_error
from worker_svc.engine.gpu.runner import DeviceRunner

# Ways to serve one checkpoint.
KINDS: dict[str, dict[str, Any]] = {
    "model's dtype": {}, "exact": {"determinism": "exact"}, "float16": {"dtype": "float16"},
    "fp8 cache": {"kv_cache_dtype": "fp8"}, "fp8 weights": {"quantize": "fp8"},
}  # fmt: skip
FP8_ERROR = 1.0  # the error of fp8 is reported, and fails the run only if it indicates a bug
NOT_IN_SMOKE = ("exact", "float16", "fp8 weights")  # for time; the noise of transformers is not measured in float16


def logits(report: Report) -> None:
    """Chunks, mixed batches and decode against transformers in float32. Its bfloat16 error is the noise level."""
    lengths = [3, 20, 33] if report.is_smoke else [1, 255, 256, 257, 700, 1500]
    vocab = model_of(report)["vocab_size"]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, vocab, n).tolist() for n in lengths]
    folder = make_checkpoint(report)
    # Logits can be read in eager steps only. Another section compares graphs with eager steps.
    settings = {"cuda_graphs": "off"} | ({} if report.is_smoke else {"num_blocks": 256})
    tokens, wanted = [], {}
    for name, fields in KINDS.items():
        if report.is_smoke and name in NOT_IN_SMOKE:
            continue
        runner = load(folder, report, **(settings | fields))
        seen, own_tokens = run_ours(runner, prompts)
        del runner
        report.release()
        if not tokens:
            tokens = own_tokens
            wanted = {dtype: reference_logits(folder, dtype, tokens, report) for dtype in (torch.float32, report.dtype)}
        _compare(report, name, seen, own_tokens, tokens, wanted)


def reference_logits(folder: Path, dtype: torch.dtype, tokens: list[list[int]], report: Report) -> list[torch.Tensor]:
    """Logits of transformers for the tokens of each row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(report.device).eval()
    with torch.no_grad():
        found = [model(torch.tensor([ids], device=report.device)).logits[0].float() for ids in tokens]
    del model
    report.release()
    return found


def _compare(report: Report, name: str, seen: dict, own_tokens: list, tokens: list, wanted: dict) -> None:
    """Compares only logits over the tokens that transformers was given: another dtype may have sampled other tokens."""
    for row, ids in enumerate(tokens):
        same = next(
            (i for i, pair in enumerate(zip(ids, own_tokens[row], strict=True)) if len(set(pair)) > 1), len(ids)
        )
        positions = sorted(position for r, position in seen if r == row and position <= same)
        ours = torch.stack([seen[row, position] for position in positions]).float()
        index = torch.tensor(positions, device=report.device) - 1
        right, own = wanted[torch.float32][row][index], wanted[report.dtype][row][index]
        error, noise = relative_error(ours, right), relative_error(own, right)
        is_fp8 = name.startswith("fp8")
        ok = error < (FP8_ERROR if is_fp8 else 1e-4)
        if not report.is_smoke and not is_fp8:
            ok = error <= 1.5 * noise + 0.005 and error < 0.15
        note = f"error {error:.4f}, of transformers {noise:.4f}"
        report.row("logits", f"{name}, row {row}, {len(positions)} tokens", ok=ok, note=note)


def run_ours(
    runner: DeviceRunner, prompts: list[list[int]], fields: Sequence[dict[str, Any]] = ()
) -> tuple[dict[tuple[int, int], torch.Tensor], list[list[int]]]:
    """Logits by (row, tokens before) from eager steps, and the tokens of each row. `fields` are those of Rows."""
    compute, rows = runner._compute, Rows(runner, prompts, room=8, fields=fields)
    original, recorded = compute._model.forward, []
    compute._model.forward = lambda *args: recorded.append(original(*args)) or recorded[-1]
    tokens, seen = [list(prompt) for prompt in prompts], {}
    last = len(prompts) - 1

    def step(counts: dict[int, int]) -> None:
        output = rows.launch(counts).result()
        if output.errors:
            raise RuntimeError(str(output.errors[0]))
        for i, (row, token) in enumerate(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)):
            seen[row, len(tokens[row])] = recorded[-1][i].clone()
            tokens[row].append(token)

    step({last: 17})
    step({0: len(prompts[0]), last: 3})
    step({row: len(prompts[row]) for row in range(1, last)} | {0: 1, last: len(prompts[last]) - 20})
    for _ in range(5):
        step(dict.fromkeys(range(len(prompts)), 1))
    compute._model.forward = original
    return seen, tokens
