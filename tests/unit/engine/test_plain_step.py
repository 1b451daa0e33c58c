"""Calls and modules of one decode step of the CPU engine, compared with budget.toml."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from quire_client.demo import demo_model_dir

from request_fields.fields import SamplingParams
from step_protocol.columns import EMPTY
from step_protocol.messages import RowOpen, StepBatch
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner

ROOT = Path(__file__).resolve().parents[3]
LIMITS = tomllib.loads((ROOT / "budget.toml").read_text())["plain_request"]
PROMPT = np.arange(5, 14, dtype=np.uint32)
TABLE = np.arange(8, dtype=np.uint32)
SAMPLING = SamplingParams(temperature=0.7, top_k=0, top_p=0.9, min_p=0.0, seed=1)


def step(step_id: int, context_len: int, query_len: int, block_size: int, *opens: RowOpen) -> StepBatch:
    positions = np.arange(context_len, context_len + query_len)
    slots = TABLE[positions // block_size] * block_size + positions % block_size
    return StepBatch(
        step_id=step_id,
        rows=np.zeros(1, np.uint32),
        query_lens=np.full(1, query_len, np.uint32),
        context_lens=np.full(1, context_len, np.uint32),
        sample_mask=np.ones(1, bool),
        slot_mapping=slots.astype(np.uint32),
        opens=list(opens),
        close_rows=EMPTY,
    )


def decode_step(sampling: SamplingParams) -> tuple[int, set[str]]:
    """The calls of the third decode step of a row, and the modules that they enter."""
    runner = ModelRunner(EngineConfig(demo_model_dir(), "float32", num_blocks=16, max_num_seqs=4, threads=1))
    size, entered, calls = runner.info.block_size, set(), 0

    def record(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(f"{ROOT}/") and "/.venv/" not in name and name != __file__:
            calls += 1
            entered.add(name.removeprefix(f"{ROOT}/"))

    row = RowOpen(0, PROMPT, len(PROMPT), TABLE, 0, sampling, 0)
    batches = [step(1, 0, len(PROMPT), size, row)] + [step(2 + i, len(PROMPT) + i, 1, size) for i in range(3)]
    for batch in batches[:-1]:
        assert not runner.execute(batch).errors
    sys.setprofile(record)
    try:
        runner.execute(batches[-1])
    finally:
        sys.setprofile(None)
    return calls, entered


def test_a_plain_decode_step_is_within_its_budget() -> None:
    calls, entered = decode_step(SAMPLING)
    assert calls <= LIMITS["step_calls"], sorted(entered)
    assert len(entered) <= LIMITS["step_modules"], sorted(entered)


def test_a_step_that_uses_features_is_noticed() -> None:
    plain, _ = decode_step(SAMPLING)
    calls, _ = decode_step(replace(SAMPLING, presence_penalty=0.5, frequency_penalty=0.5))
    assert calls > max(plain, LIMITS["step_calls"])
