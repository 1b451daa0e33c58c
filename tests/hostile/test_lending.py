"""Calls of LendBlocks with foreign values: what is lent is what the caller could name, and is given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from quire.internal.v1.scheduler_pb2 import LendBlocksRequest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.other_schedulers import MAX_ASKED, lend
from step_protocol.columns import u32_from_bytes, u32_to_bytes
from step_protocol.types import BlockMovement, CacheGroup
from svc_common.errors import InvalidRequestError, NotFoundError
from tests.builders import make_capacity, make_group, make_scheduler, run_to_end
from tests.invariants import check_scheduler

PROMPT = list(range(1, 41))  # ten blocks
EXTRAS: dict[str, dict[str, Any]] = {  # needs of a model's rows besides blocks
    "": {},
    "snapshots": {"num_snapshots": 8, "snapshot_tokens": 4},
    "groups": {"groups": (CacheGroup(6, 120),)},
}
LAYOUT, EPOCH = b"layout", make_capacity("theirs").worker_epoch


class Lender:
    """Stands for the step loop of a scheduler whose worker has computed a prompt, also for a tenant. `extras`: a key of
    EXTRAS.
    """

    def __init__(self, extras: str = "") -> None:
        movement = BlockMovement(LAYOUT, 1, can_transfer=True)
        capacity = replace(make_capacity("theirs", num_blocks=128), movement=movement, **EXTRAS[extras])
        self.core: Scheduler = make_scheduler(capacity)
        for name, options in (("a", {}), ("b", {"root_key": b"tenant"})):
            self.core.add_group(make_group(PROMPT, name, max_tokens=1, **options), 0.0)
            run_to_end(self.core)
        self.pool = self.core._workers["theirs"].pool
        self.block_of = dict(self.pool.held)

    def report(self, event: Callable[[Scheduler, float], None]) -> None:
        event(self.core, 0.0)

    def address_of(self, worker_id: str) -> str:
        return "there:1"


def foreign(lender: Lender, rng: Random) -> LendBlocksRequest:
    """Most fields are right, so that each check is reached."""
    digests = list(lender.block_of)
    chain, tokens = rng.choice((digests[:10], digests[10:20])), np.array(PROMPT, np.uint32)
    if rng.random() < 0.3:
        chain, tokens = chain[:3], tokens[:12]
    hashes, column = b"".join(chain), u32_to_bytes(tokens)

    def choose(right: Any, *others: Any) -> Any:
        return right if rng.random() < 0.8 else rng.choice(others)

    return LendBlocksRequest(
        worker_id=choose("theirs", "", "ours", "x" * 100_000),
        worker_epoch=choose(EPOCH, 0, EPOCH - 1, EPOCH + 1, (1 << 64) - 1),
        layout=choose(LAYOUT, b"", LAYOUT * 1000, b"Layout"),
        hashes=choose(
            hashes, b"", hashes[::-1], hashes[:-1], hashes[16:], chain[0] * len(chain), hashes * 500,
            chain[0] * 10, rng.randbytes(160), b"".join(reversed(chain)), hashes + chain[0],
            bytes(16 * (MAX_ASKED + 1)),
        ),
        token_ids=choose(
            column, b"", column[::-1], column[:-1], column[4:], column * 500, bytes(len(column)),
            column[:20] + b"\xff" * 20, column[:16] * 10,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("seed", range(2))
async def test_only_blocks_that_the_caller_names_are_lent(seed: int, extras: str) -> None:
    lender, rng, calls, num_lent = Lender(extras), Random(seed), list[Any](), 0
    for _ in range(700):
        if calls and rng.random() < 0.4:
            await calls.pop(rng.randrange(len(calls))).aclose()
        request = foreign(lender, rng)
        call = lend(lender, request)  # type: ignore[arg-type]
        try:
            answer = await anext(call)
        except (InvalidRequestError, NotFoundError):
            continue
        blocks = u32_from_bytes(answer.block_ids, "block_ids").tolist()
        named = [request.hashes[16 * i : 16 * i + 16] for i in range(len(blocks))]
        assert blocks == [lender.block_of[digest] for digest in named]
        assert lender.pool._tokens[blocks].tobytes() == request.token_ids[: 16 * len(blocks)]
        assert (request.worker_id, request.worker_epoch, request.layout) == ("theirs", EPOCH, LAYOUT)
        num_lent += 1
        calls.append(call)
        check_scheduler(lender.core)
    assert num_lent > 50
    for call in calls:
        await call.aclose()
    check_scheduler(lender.core)
    assert not lender.core.is_source("theirs")
    assert not lender.pool.num_used


async def test_a_prefix_that_repeats_a_block_is_not_lent() -> None:
    """Its block would be counted once and freed ten times."""
    lender, tokens = Lender(), np.array(PROMPT[:4] * 10, np.uint32)
    digest = next(iter(lender.block_of))
    request = LendBlocksRequest(
        worker_id="theirs", worker_epoch=EPOCH, layout=LAYOUT, hashes=10 * digest, token_ids=u32_to_bytes(tokens)
    )
    with pytest.raises(NotFoundError):
        await anext(lend(lender, request))  # type: ignore[arg-type]


async def test_a_huge_list_is_refused_before_it_is_read() -> None:
    request = LendBlocksRequest(worker_id="theirs", hashes=bytes(16 * (MAX_ASKED + 1)))
    with pytest.raises(InvalidRequestError, match=f"{MAX_ASKED + 1} hashes; at most {MAX_ASKED}"):
        await anext(lend(Lender(), request))  # type: ignore[arg-type]
