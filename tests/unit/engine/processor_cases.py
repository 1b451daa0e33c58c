"""Rows that need processing, for tests of processors: each field alone, then all of them together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from request_fields.fields import SamplingParams
from step_protocol.columns import F32
from step_protocol.messages import NO_RULES, TokenRules
from tests.unit.engine.driver import GREEDY, u32


@dataclass(frozen=True)
class Asked:
    """Fields of a RowOpen that ask for processing."""

    sampling: SamplingParams = GREEDY
    rules: TokenRules = NO_RULES
    banned: tuple[int, ...] = ()
    banned_before: int = 0


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def penalties(repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> SamplingParams:
    return replace(GREEDY, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)


RULES = TokenRules(
    allowed_ids=u32(*range(1, 60, 2), *range(0, 60, 3)),
    banned_ids=u32(7, 9),
    bad_words=(u32(5), u32(3, 11), u32(13, 15, 17), u32(3, 3, 3, 3, 21)),
    bias_ids=u32(33, 2, 7, 39),
    biases=f32(3.25, 50, 100, -0.3),
)  # fmt: skip
CASES = {
    "none": Asked(),
    "allowed_token_ids": Asked(rules=TokenRules(allowed_ids=RULES.allowed_ids)),
    "banned_token_ids": Asked(rules=TokenRules(banned_ids=RULES.banned_ids)),
    "bad_words": Asked(rules=TokenRules(bad_words=RULES.bad_words)),
    "min_tokens": Asked(banned=(3, 5, 8), banned_before=4),
    "logit_bias": Asked(rules=TokenRules(bias_ids=RULES.bias_ids, biases=RULES.biases)),
    "repetition_penalty": Asked(penalties(1.3)),
    "small repetition_penalty": Asked(penalties(0.7)),
    "frequency_penalty": Asked(penalties(frequency=0.4)),
    "negative frequency_penalty": Asked(penalties(frequency=-0.4)),
    "presence_penalty": Asked(penalties(presence=1.1)),
    "all": Asked(penalties(1.1, 0.3, -0.7), RULES, (0, 3), 5),
}
