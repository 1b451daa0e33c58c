"""The output of a simulated worker in plain Python, as worker_svc/simulator/tokens.py specifies it."""

from __future__ import annotations

from collections.abc import Sequence

from worker_svc.simulator.tokens import GOLDEN, GREEDY_BELOW, MASK, MIX_1, MIX_2, SimVocabulary


def mix(value: int) -> int:
    """A bijection of 64 bits; `pool.mix` is the same in numpy."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def extend_digest(digest: int, position: int, token_id: int) -> int:
    """Digest of a context of `position` tokens after appending `token_id`."""
    return (digest + mix(position << 32 | token_id)) & MASK


def context_digest(token_ids: Sequence[int]) -> int:
    """Digest of a whole context."""
    digest = 0
    for position, token_id in enumerate(token_ids):
        digest = extend_digest(digest, position, token_id)
    return digest


def sim_token(digest: int, seed: int, sample_index: int, output_position: int, vocabulary: SimVocabulary) -> int:
    """The token that follows the context with this digest. seed is 64 bits; greedy: seed 0 and sample_index 0."""
    draw = mix(digest ^ mix(seed ^ mix(output_position << 32 | sample_index)))
    if vocabulary.eos_token_id is not None and mix(draw) < vocabulary.eos_below:
        return vocabulary.eos_token_id
    return vocabulary.printable_ids[draw % len(vocabulary.printable_ids)]


def sim_logprobs(digest: int, token_id: int, num_top: int, vocab_size: int) -> tuple[list[float], list[int], int]:
    """Log probabilities and ids of this token and of the `num_top` most likely ones after the context with this digest,
    and the rank of the token."""
    first = mix(digest) % vocab_size
    token_ids = [token_id, *((first + i) % vocab_size for i in range(num_top))]
    ranks = [(id_ - first) % vocab_size + 1 for id_ in token_ids]
    return [-rank / 8 for rank in ranks], token_ids, ranks[0]


def sim_output(
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    vocabulary: SimVocabulary,
    *,
    seed: int = 0,
    sample_index: int = 0,
    temperature: float = 1.0,
) -> list[int]:
    """The first `num_tokens` output tokens of a request; an end-of-sequence id does not end them."""
    if temperature < GREEDY_BELOW:
        seed = sample_index = 0
    digest, first = context_digest(prompt_token_ids), len(prompt_token_ids)
    output: list[int] = []
    for output_position in range(num_tokens):
        token_id = sim_token(digest, seed, sample_index, output_position, vocabulary)
        digest = extend_digest(digest, first + output_position, token_id)
        output.append(token_id)
    return output
