"""The expected tokens of each sample, computed one by one with plain integers: no batch, no cache, no blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from request_fields.fields import RepetitionDetection
from request_fields.parameters import BeamParams
from scheduler_svc.core.features.beam_search import BeamSearch, Candidates
from scheduler_svc.core.sequence import FinishReason, StopCondition
from tests.sim import symbolic_model


@dataclass(slots=True)
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
    digest = prefix_digest(prompt, root_key)
    tokens: list[int] = []
    while len(tokens) < stop.max_tokens:
        token = symbolic_model.next_token(digest, seed, sample_index, len(tokens), vocab_size)
        digest = (digest + symbolic_model.term(token, len(prompt) + len(tokens))) & symbolic_model.MASK
        tokens.append(token)
        if token in eos_token_ids and not stop.ignore_eos:
            return Expected(tokens, FinishReason.EOS, None)
        if token in stop.stop_token_ids:
            return Expected(tokens, FinishReason.STOP, token)
        if len(tokens) < stop.max_tokens and _repeats(tokens, stop.repetition_detection):
            return Expected(tokens, FinishReason.REPETITION, None)
    return Expected(tokens, FinishReason.LENGTH, None)


def _repeats(tokens: list[int], detection: RepetitionDetection | None) -> bool:
    if detection is None:
        return False
    sizes, count = range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1), detection.min_count
    return any(size * count <= len(tokens) and tokens[-size * count :] == tokens[-size:] * count for size in sizes)


def prefix_digest(token_ids: list[int], root_key: bytes) -> int:
    """Digest of a prefix."""
    digest = symbolic_model.root(root_key)
    for position, token in enumerate(token_ids):
        digest = (digest + symbolic_model.term(token, position)) & symbolic_model.MASK
    return digest


def expected_beams(
    prompt: list[int],
    root_key: bytes,
    params: BeamParams,
    stop: StopCondition,
    eos_token_ids: frozenset[int],
    vocab_size: int,
) -> list[Expected]:
    """Search alone, with whole prefixes instead of rows and blocks. Samples beyond the possible outputs are errors."""
    search = BeamSearch(params, stop, eos_token_ids)
    outputs: list[list[int]] = [[] for _ in range(params.width)]
    while True:
        for beam, output in enumerate(outputs):
            digest = prefix_digest(prompt + output, root_key)
            count = search.num_candidates
            search.put(beam, Candidates(*symbolic_model.best_candidates(digest, vocab_size, count)))
        columns = [np.array(output, dtype=np.uint32) for output in outputs]
        moves = search.advance(len(outputs[0]) + 1, columns.__getitem__)
        if moves is None:
            break
        outputs = [[*outputs[move.parent], move.token_id] for move in moves]
    found = [Expected(best.token_ids.tolist(), FinishReason(best.end.value), None) for best in search.hypotheses]
    for expected in found:
        if expected.reason is FinishReason.STOP:
            expected.stop_token_id = expected.tokens[-1]
    missing = [Expected([], FinishReason.ERROR, None)] * params.num_returned
    return (found + missing)[: params.num_returned]
