"""Chooses the replica for a request: a pure function of the replicas' loads and cached prefixes.

    cost = load per ready worker + ALPHA * prompt tokens to compute

The replica with the lowest cost is chosen. Costs within TIE_TOKENS of the lowest count as equal, because loads are as
old as the last heartbeat. Among equal replicas, a rendezvous hash of the prompt's first block decides. So requests with
a common prefix go to the same replica, and the loss of a replica moves only that replica's prompts. Affinity never
chooses a replica that costs more than TIE_TOKENS above the lowest cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

# Weight of an uncached token: it needs computation and space in the pool. Placement on workers uses the same weight.
ALPHA = 3.0
# Load of a request in addition to its prompt: it takes a row in every step and blocks for its output.
REQUEST_TOKENS = 32
TIE_TOKENS = 256.0


@dataclass(frozen=True, slots=True)
class Replica:
    """One scheduler that could take the request."""

    name: str  # its address, which is the same after a restart
    load_tokens: int  # its waiting tokens, including requests that we have sent since its last heartbeat
    ready_workers: int
    cached_tokens: int = 0  # tokens of this prompt in its caches, according to the prefix index


def choose_replica(replicas: Sequence[Replica], num_prompt_tokens: int, affinity: bytes) -> int:
    """Index of the replica for a prompt. A replica without workers is chosen only if no replica has workers.

    `affinity` identifies the start of the prompt. Raises ValueError for an empty list.
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
