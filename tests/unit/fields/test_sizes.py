"""Prompts and outputs at the limits of model and pool."""

from __future__ import annotations

import pytest

from request_fields.fields import FieldError
from request_fields.sizes import SizeLimits

BY_MODEL, BY_POOL = SizeLimits(256, 1000), SizeLimits(256, 64)


@pytest.mark.parametrize(
    ("limits", "num_prompt", "max_tokens", "resolved"),
    [
        (BY_MODEL, 3, None, 253),
        (BY_MODEL, 3, 253, 253),
        (BY_MODEL, 256, 0, 0),
        (BY_POOL, 3, None, 62),
        (BY_POOL, 3, 62, 62),
        (BY_POOL, 64, 0, 0),
        (BY_POOL, 64, 1, 1),
        (SizeLimits(64, 64), 3, None, 61),
        (SizeLimits.of_pool(256, 4, 16, 49), 3, None, 253),  # the window fits, so the pool is no limit
        (SizeLimits.of_pool(256, 4, 16, 50), 3, None, 62),
    ],
)
def test_what_fits(limits: SizeLimits, num_prompt: int, max_tokens: int | None, resolved: int) -> None:
    assert limits.resolve(num_prompt, max_tokens) == resolved
    assert limits.fits(num_prompt, resolved)


@pytest.mark.parametrize(
    ("limits", "num_prompt", "max_tokens", "field", "words"),
    [
        (BY_MODEL, 257, None, "prompt", "257 tokens; max_model_len is 256"),
        (BY_MODEL, 257, 0, "prompt", "257 tokens; max_model_len is 256"),
        (BY_MODEL, 256, None, "prompt", "shorten the prompt"),
        (BY_MODEL, 3, 254, "stop.max_tokens", "is 254; .* is 257, and max_model_len is 256: ask for at most 253"),
        (BY_MODEL, 256, 1, "stop.max_tokens", "ask for at most 0"),
        (BY_POOL, 65, None, "prompt", "KV pool .* is 65 tokens"),
        (BY_POOL, 65, 0, "prompt", "KV pool .* is 65 tokens"),
        (BY_POOL, 64, 2, "stop.max_tokens", "ask for at most 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_limit(
    limits: SizeLimits, num_prompt: int, max_tokens: int | None, field: str, words: str
) -> None:
    with pytest.raises(FieldError, match=words) as caught:
        limits.resolve(num_prompt, max_tokens)
    assert caught.value.field == field
