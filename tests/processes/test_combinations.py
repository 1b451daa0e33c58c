"""64 combinations of parameters give the same answers in one batch as alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from quire_client.demo import demo_model_dir

from tests.chaos.parameters import ADAPTER
from tests.chaos.reference import answers_of
from tests.chaos.workload import Request, make_requests
from tests.processes.stack import Stack
from tests.unit.engine.adapters import ATTENTION, make_adapter

ROWS = 64
MAX_TOKENS = 32  # short, because every request runs twice
FLAGS = ("--dtype", "float32", "--num-blocks", "2048", "--max-num-seqs", "192", "--max-num-batched-tokens", "256")


def rows(vocab_size: int) -> list[Request]:
    """Requests with short answers, so that all of them run together. No two have the same options."""
    by_options: dict[str, Request] = {}
    for request in make_requests(5, 2 * ROWS, vocab_size):
        short = {"max_tokens": MAX_TOKENS} | ({"min_tokens": 8} if "min_tokens" in request.options else {})
        options = request.options | short
        by_options.setdefault(str(sorted(options.items())), replace(request, options=options))
    return list(by_options.values())[:ROWS]


@pytest.mark.slow
async def test_rows_of_one_batch_do_not_change_each_other(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        adapter = make_adapter(demo_model_dir(), tmp_path / ADAPTER, target_modules=ATTENTION)
        stack.start_worker(scheduler, demo_model_dir(), *FLAGS, "--adapter", f"{ADAPTER}={adapter}")
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            requests = rows((await client.model()).vocab_size)
            assert len(requests) == ROWS
            alone = [answers_of(await client.generate(**r.prompt, **r.options)) for r in requests]
            together = await asyncio.gather(*(client.generate(**r.prompt, **r.options) for r in requests))
    wrong = [str(r) for r, a, b in zip(requests, alone, together, strict=True) if a != answers_of(b)]
    assert not wrong, "\n".join(wrong)
