"""The end-of-sequence ids of a checkpoint. `request_fields.checks.default_sampling` reads its sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def eos_token_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a sequence, from generation_config.json or else config.json. Raises ValueError."""
    ids = generation_config.get("eos_token_id", config.get("eos_token_id"))
    found = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in found):
        raise ValueError(f"eos_token_id must be a token id or a list of them, found {ids!r}")
    return tuple(found)
