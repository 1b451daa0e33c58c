"""The keys of the prefix index in Redis (commands of 6.2).

    <namespace>:generation        string  set by the first scheduler; if it is missing or changed, data was lost
    <namespace>:scheduler_epoch   string  counter of leases, 1 to MAX_SCHEDULER_EPOCH; any other value counts as 0
    <namespace>:worker:<id>       hash    epoch, address, owner, scheduler; expires when its scheduler stops renewing it
    <namespace>:revisions:<model> hash   by owner: revision and time (ms) until which it is served; never expires
    <namespace>:weights:<model>:<revision>  hash  version and record of the newest update of the weights; never expires
    <namespace>:prefix:<digest>   set     8 bytes of worker epoch + worker id; expires unless refreshed

An entry whose epoch differs from the epoch in the worker's record is ignored, so a restarted worker needs no clean-up.
"""

from __future__ import annotations

from prefix_index.index import Holder

EPOCH_BYTES = 8
MAX_SCHEDULER_EPOCH = 1 << 53  # Redis scripts count in float64


def generation_key(namespace: str) -> str:
    """The key of the generation. Another value means that the server lost all data written before."""
    return f"{namespace}:generation"


def epoch_key(namespace: str) -> str:
    """The key of the counter of leases."""
    return f"{namespace}:scheduler_epoch"


def worker_key(namespace: str, worker_id: str) -> str:
    """The key of a worker's record."""
    return f"{namespace}:worker:{worker_id}"


def revisions_key(namespace: str, model: str) -> str:
    """The key of the revisions that the schedulers of a model serve."""
    return f"{namespace}:revisions:{model}"


def weights_key(namespace: str, model: str, revision: str) -> str:
    """The key of the newest update of the weights of a revision."""
    return f"{namespace}:weights:{model}:{revision}"


def entry_key(namespace: str, digest: bytes) -> bytes:
    """The key of the set of a digest's holders."""
    return b"%s:prefix:%s" % (namespace.encode(), digest)


def member_of(holder: Holder) -> bytes:
    """Encodes a holder as a member of such a set."""
    return holder.worker_epoch.to_bytes(EPOCH_BYTES, "little") + holder.worker_id.encode()


def holder_of(member: bytes) -> Holder:
    """The reverse of `member_of`."""
    return Holder(member[EPOCH_BYTES:].decode(), int.from_bytes(member[:EPOCH_BYTES], "little"))


def make_owner(scheduler_id: str, scheduler_epoch: int) -> str:
    """The owner that a scheduler process writes into the records of its workers."""
    return f"{scheduler_id}:{scheduler_epoch:016x}"


def epoch_of_owner(owner: bytes | None) -> int:
    """The scheduler epoch of an owner; 0 if the value is not an owner."""
    try:
        return int((owner or b"").rpartition(b":")[2], 16)
    except ValueError:
        return 0
