"""Tests of banned token ids with the same steps for the CPU and the GPU engine."""

from __future__ import annotations

from tests.unit.engine.driver import GREEDY, Driver, seeded

PROMPT = [3, 9, 4, 9, 5]
SAMPLINGS = {"greedy": GREEDY, "seeded": seeded(5), "top_k": seeded(6, top_k=4), "top_p": seeded(7, 0.3, top_p=0.5)}
NUM_BANNED_POSITIONS = 3


def tokens_of(driver: Driver, **fields: object) -> list[int]:
    """Six output tokens of a row that is opened, computed and closed."""
    row = driver.open(0, PROMPT, **fields)  # type: ignore[arg-type]
    output = list(fields.get("output", ()))  # type: ignore[call-overload]
    driver.step({0: len(PROMPT) + len(output)})
    driver.decode([0], 5 - len(output))
    driver.close(0)
    assert driver.errors == []
    return row.output


def check_banned_ids(driver: Driver, sampling: object) -> None:
    """Banned ids are sampled only from their position on, and a recomputed row gets the same tokens."""
    free = tokens_of(driver, sampling=sampling)
    banned = {"sampling": sampling, "banned": tuple(set(free)), "banned_before": NUM_BANNED_POSITIONS}
    tokens = tokens_of(driver, **banned)
    assert not set(tokens[:NUM_BANNED_POSITIONS]) & set(free)
    assert tokens_of(driver, **banned) == tokens
    assert tokens_of(driver, **banned, output=tokens[:2]) == tokens
    assert tokens_of(driver, **banned, output=tokens[:4]) == tokens
    first_only = banned | {"banned": (free[0],), "banned_before": 1}
    assert tokens_of(driver, **first_only)[0] != free[0]
    assert tokens_of(driver, **first_only | {"banned_before": 0}) == free
