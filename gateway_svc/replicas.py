"""Which of several schedulers with one model gets a request: a pure function of what is known of each.

    cost = load per ready worker + ALPHA * prompt tokens that it would have to compute

The lowest cost wins. Costs that differ by less than a tie's width are equal for all we know (loads are a heartbeat
old), and among those the prompt's affinity decides: a rendezvous hash of its first block. So requests that begin alike
meet where their prefix is cached, when one replica dies only its own prompts move, and affinity can put at most a tie's
width of extra work on one replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

# A cached token saves its computation and the room of its block: the weight that placement on workers gives it too.
ALPHA = 3.0
# A request that runs or waits, beside its prompt: it takes a row of every step and blocks for its answer.
REQUEST_TOKENS = 32
TIE_TOKENS = 256.0


@dataclass(frozen=True, slots=True)
class Replica:
    """What is known of one scheduler that could take the request."""

    name: str  # stable over restarts: its address
    load_tokens: int  # tokens that wait there, those of our own requests since its last heartbeat included
    ready_workers: int
    cached_tokens: int = 0  # of this prompt, by the prefix index


def choose_replica(replicas: Sequence[Replica], num_prompt_tokens: int, affinity: bytes) -> int:
    """Index of the replica that should take a prompt; one without workers only if all are. Raises ValueError for none.

    `affinity` names what the prompt begins with.
    """
    if not replicas:
        raise ValueError("no replica to choose from")
    costs = [_cost(replica, num_prompt_tokens) for replica in replicas]
    has_workers = any(replica.ready_workers for replica in replicas)
    able = [i for i, replica in enumerate(replicas) if replica.ready_workers or not has_workers]
    limit = min(costs[i] for i in able) + TIE_TOKENS
    return max((i for i in able if costs[i] <= limit), key=lambda i: _rank(replicas[i].name, affinity))


def _cost(replica: Replica, num_prompt_tokens: int) -> float:
    uncached = max(0, num_prompt_tokens - replica.cached_tokens)
    return replica.load_tokens / max(1, replica.ready_workers) + ALPHA * uncached


def _rank(name: str, affinity: bytes) -> int:
    return xxh3_64_intdigest(affinity + b"|" + name.encode())
