"""How the ranks of a worker find each other: a store on the loopback interface, then NCCL, or gloo without GPUs.

Ranks on other hosts reach the store through the links between the nodes.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.collectives.group import CPU, Group
from worker_svc.engine.gpu.collectives.shared_sum import share_sums
from worker_svc.engine.nodes import Inbox, RankOutbox

HOST = "127.0.0.1"
LOAD_LIMIT = timedelta(hours=1)  # ranks may finish reading weights at very different times


def make_store(size: int) -> Any:
    """The store of rank 0. Only processes of this host can connect to it: it does not check its clients."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        port = bound.getsockname()[1]
        # By itself the store would listen on all interfaces.
        return dist.TCPStore(  # type: ignore[attr-defined]
            HOST, port, size, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach()
        )


def open_store(port: int, size: int) -> Any:
    """The store of rank 0, for another rank. `port` is on this host, also if the store is on another."""
    return dist.TCPStore(HOST, port, size, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]


def join(
    config: EngineConfig, rank: int, store: Any, *, outboxes: Sequence[RankOutbox] = (), inbox: Inbox | None = None
) -> Group:
    """Joins the other ranks: over NCCL between GPUs, else over gloo."""
    size, device, local_rank = config.tensor_parallel_size, None, rank % config.ranks_per_node
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "nccl", store=store, rank=rank, world_size=size, timeout=LOAD_LIMIT,
        device_id=device,
    )  # fmt: skip
    group = Group(
        rank, size, local_rank=local_rank, device=device or CPU, is_exact=config.determinism == "exact",
        outboxes=outboxes, inbox=inbox,
    )  # fmt: skip
    if device is not None:
        share_sums(config, group, dist.distributed_c10d._get_default_group().group_name, device)
    return group


def leave() -> None:
    """Destroys the process group, unless it is NCCL's: destroying it would wait forever for graphs that hold its
    communicators, which end with the process."""
    if dist.get_backend() == "gloo":
        dist.destroy_process_group()
