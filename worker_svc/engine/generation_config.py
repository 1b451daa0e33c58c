"""What a checkpoint's generation_config.json says: when an answer ends, and how tokens are drawn by default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from worker_svc.engine.batch import SamplingParams

MAX_TOP_K = 2**32 - 1


def eos_token_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer, from config.json where generation_config.json says nothing. Raises ValueError."""
    ids = generation_config.get("eos_token_id", config.get("eos_token_id"))
    found = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in found):
        raise ValueError(f"eos_token_id must be a token id or a list of them, found {ids!r}")
    return tuple(found)


def default_sampling(generation_config: Mapping[str, Any]) -> SamplingParams:
    """For requests that do not say otherwise. A top_k of -1 and a top_p of 0 mean "off" there. Raises ValueError."""
    temperature = _number(generation_config, "temperature", 0, 2, 1.0)
    return SamplingParams(
        temperature=0.0 if generation_config.get("do_sample") is False else temperature,
        top_k=max(0, int(_number(generation_config, "top_k", -1, MAX_TOP_K, 0))),
        top_p=_number(generation_config, "top_p", 0, 1, 1.0) or 1.0,
        min_p=_number(generation_config, "min_p", 0, 1, 0.0),
        seed=0,
    )


def _number(given: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"generation_config.json: {name} is {value!r}; it must be a number")
    if not low <= value <= high:
        raise ValueError(f"generation_config.json: {name} is {value}; it must be from {low:g} to {high:g}")
    return float(value)
