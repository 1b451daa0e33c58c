"""The expected tokens of each sample, computed one by one with plain integers: no batch, no cache, no blocks."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.sequence import FinishReason, StopCondition
from tests.sim import symbolic_model


@dataclass(frozen=True, slots=True)
class Expected:
    """The whole answer of one sample."""

    tokens: list[int]
    reason: FinishReason
    stop_token_id: int | None


def expected_output(
    prompt: list[int],
    root_key: bytes,
    seed: int,
    sample_index: int,
    stop: StopCondition,
    eos_token_ids: frozenset[int],
    vocab_size: int,
) -> Expected:
    """Run the model alone until a stop condition holds. EOS is checked before stop ids, stop ids before the limit."""
    digest = symbolic_model.root(root_key)
    for position, token in enumerate(prompt):
        digest = (digest + symbolic_model.term(token, position)) & symbolic_model.MASK
    tokens: list[int] = []
    while len(tokens) < stop.max_tokens:
        token = symbolic_model.next_token(digest, seed, sample_index, len(tokens), vocab_size)
        digest = (digest + symbolic_model.term(token, len(prompt) + len(tokens))) & symbolic_model.MASK
        tokens.append(token)
        if token in eos_token_ids and not stop.ignore_eos:
            return Expected(tokens, FinishReason.EOS, None)
        if token in stop.stop_token_ids:
            return Expected(tokens, FinishReason.STOP, token)
    return Expected(tokens, FinishReason.LENGTH, None)
