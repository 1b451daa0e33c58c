"""Times of sums over the ranks of one host, by size and method, for the limits in shared_sum.py.

    python -m bench.gpu.sums --ranks 4

Each sum is recorded several times in a CUDA graph, as in a decode step. Without GPUs only gloo's sums run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from worker_svc.engine.gpu.collectives.group import CPU
from worker_svc.engine.gpu.collectives.rendezvous import make_store, open_store
from worker_svc.engine.gpu.collectives.shared_sum import TWO_SHOT_BYTES, Method, SharedMemorySum

LIBRARY = "library"
COLUMNS = (LIBRARY, *(method.value for method in Method))
SIZES = [4096 << step for step in range(13)]  # bytes, to 16 MiB
PER_GRAPH = 20
ROUNDS = 20

Times = Mapping[str, float]  # microseconds, by column


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(torch.cuda.device_count(), 2), help="processes, one per GPU")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES", help="multiples of 16")
    args = parser.parse_args(argv)
    store = make_store(args.ranks)
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_other_rank, args=(rank, args.ranks, store.port, args.sizes), daemon=True)
        for rank in range(1, args.ranks)
    ]
    for process in others:
        process.start()
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    print(f"{args.ranks} ranks, {device}, torch {torch.__version__}, bfloat16, microseconds per sum\n", flush=True)
    rows = _measure(0, args.ranks, store, args.sizes)
    print(f"\n{limits(rows)}")
    for process in others:
        process.join(30)


def _other_rank(rank: int, num_ranks: int, port: int, sizes: Sequence[int]) -> None:
    _measure(rank, num_ranks, open_store(port, num_ranks), sizes)


def _measure(rank: int, num_ranks: int, store: Any, sizes: Sequence[int]) -> dict[int, Times]:
    """Times by size. Rank 0 prints them."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if has_gpu else CPU
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo", store=store, rank=rank, world_size=num_ranks)
    shared = _shared_sum(num_ranks, device) if has_gpu else None
    rows: dict[int, Times] = {}
    if rank == 0:
        print(f"| bytes | {' | '.join(COLUMNS)} |\n| --- |{' --- |' * len(COLUMNS)}")
    for size in sizes:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        rows[size] = {name: _time(step, device) for name, step in _steps(shared, x).items()}
        if rank == 0:
            print(table_row(size, rows[size]), flush=True)
    dist.barrier()
    return rows


def _shared_sum(num_ranks: int, device: torch.device) -> SharedMemorySum:
    from torch.distributed import _symmetric_memory

    name = dist.distributed_c10d._get_default_group().group_name
    return SharedMemorySum(_symmetric_memory, torch.ops.symm_mem, name, num_ranks, device)


def _steps(shared: SharedMemorySum | None, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The sums that can be measured for a tensor of this size, by column."""
    steps: dict[str, Callable[[], object]] = {LIBRARY: lambda: dist.all_reduce(x)}
    if shared is None or x.nbytes > TWO_SHOT_BYTES:
        return steps
    for method in Method:
        if method is not Method.MULTIMEM or shared.has_multimem:
            steps[method.value] = lambda method=method: shared.add_by(method, x)  # type: ignore[misc]
    return steps


def _time(step: Callable[[], object], device: torch.device) -> float:
    """Microseconds of one sum: the median of the rounds."""
    for _ in range(3):
        step()
    run = _recorded(step, device) if device.type == "cuda" else lambda: [step() for _ in range(PER_GRAPH)]
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - started) / PER_GRAPH)
    return 1e6 * statistics.median(times)


def _recorded(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(PER_GRAPH):
            step()
    return graph.replay


def table_row(size: int, times: Times) -> str:
    """A row of the table; - for methods that were not measured."""
    return f"| {size} | {' | '.join(f'{times[name]:.1f}' if name in times else '-' for name in COLUMNS)} |"


def limits(rows: Mapping[int, Times]) -> str:
    """The largest measured size up to which each method is the fastest, or at least as fast as the library."""
    found = []
    for method in Method:
        sizes = [size for size, times in rows.items() if times.get(method.value, float("inf")) <= times[LIBRARY]]
        best = [size for size in sizes if rows[size][method.value] == min(rows[size].values())]
        if sizes:
            found.append(f"{method.value}: as fast as the library to {max(sizes)} bytes, fastest to {max(best or [0])}")
    return "\n".join(found) or "the library is the fastest at all sizes"


if __name__ == "__main__":
    main()
