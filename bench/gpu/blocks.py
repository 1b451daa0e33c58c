"""Blocks that leave the pool of a device and come back: results, and the speed of the moves."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bench.gpu.model import Rows, load, make_checkpoint, time_decode
from bench.gpu.report import Report
from worker_svc.engine.decoder.pool.block_contents import BlockContents
from worker_svc.engine.decoder.pool.block_payload import Filled
from worker_svc.engine.gpu.device_blocks import DeviceBlocks
from worker_svc.engine.gpu.runner import DeviceRunner
from worker_svc.kv_store.record import Origin, RecordFormat

DECODED = 6  # steps after a prompt
MOVED_BYTES = 64 << 20
REPEATS = 9


def blocks(report: Report) -> None:
    """Moves of blocks between the device and host memory, beside plain copies; then steps while blocks are read."""
    runner = load(make_checkpoint(report), report, determinism="exact", cuda_graphs="lazy")
    moved = runner.movable_blocks()
    if moved is None:
        raise RuntimeError("blocks of an engine with one device do not move: a bug in the engine")
    _check_moved_row(report, runner, moved)
    _time_plain_copies(report)
    for size in (8,) if report.is_smoke else (16, 64, 256):
        _time_moves(report, runner._pool.tensors[0], size)
    _time_steps(report, runner, moved)


def _copies(moved: DeviceBlocks, digests: list[bytes]) -> list[Filled]:
    """The first blocks, for as many blocks behind them."""
    found = []
    with moved.reading(list(enumerate(digests))) as reader:
        for block, digest in enumerate(digests):
            content = reader.read(block, digest)
            if content is None:
                raise RuntimeError(f"block {block} was not read")
            found.append(Filled(len(digests) + block, *content))
    return found


def _check_moved_row(report: Report, runner: DeviceRunner, moved: DeviceBlocks) -> None:
    """A row that starts from moved blocks gives the bits of the row that computed them."""
    count = 40 if report.is_smoke else 900
    prompt = np.random.default_rng(3).integers(3, runner.info.vocab_size, count).tolist()
    num_blocks = count // moved.block_size
    start = num_blocks * moved.block_size
    rows = Rows(runner, [prompt] * 2, room=DECODED + 2, computed=[0, start], fields=[{"logprobs": 1}] * 2)
    digests = [bytes([number]) * 16 for number in range(num_blocks)]
    found = []
    for row in range(2):
        chunks = [start, count - start, *[1] * DECODED] if row == 0 else [count - start, *[1] * DECODED]
        outputs = [rows.launch({row: chunk}).result() for chunk in chunks][-1 - DECODED :]
        found.append([(output.token_ids.tolist(), output.logprobs.logprobs.tolist()) for output in outputs])
        if row == 0:
            runner._commit_blocks(np.arange(num_blocks), digests)
            first = int(rows._firsts[1]) - num_blocks
            moved.writing([one._replace(block=first + one.block) for one in _copies(moved, digests)])()
    report.row("blocks", "row from moved blocks = computed, bits", ok=found[0] == found[1], note=f"{num_blocks} blocks")


def _time_plain_copies(report: Report) -> None:
    device = torch.empty(MOVED_BYTES, dtype=torch.uint8, device=report.device)
    host = torch.empty(MOVED_BYTES, dtype=torch.uint8, pin_memory=not report.is_smoke)
    for name, target, source in (("host", host, device), ("device", device, host)):
        ms = _median_ms(report, partial(target.copy_, source, non_blocking=True))
        report.row("blocks", f"plain copy to the {name}", ms=ms, num_bytes=MOVED_BYTES)


def _time_moves(report: Report, pool: torch.Tensor, size: int) -> None:
    """The pool as if its blocks had `size` tokens. The first blocks are copied to those behind them."""
    layers, pair, num_blocks, whole, *heads = pool.shape
    pool = pool.view(layers, pair, num_blocks * whole // size, size, *heads)
    contents = BlockContents(pool.shape[2], size)
    moved = DeviceBlocks(contents, pool, lambda: None)
    count = min(max(1, MOVED_BYTES // moved.payload_bytes), moved.num_blocks // 2)
    digests = [number.to_bytes(16, "little") for number in range(count)]
    contents.commit(np.arange(count), digests)
    wanted, records, filled = list(enumerate(digests)), RecordFormat(bytes(16), moved), _copies(moved, digests)
    places = np.empty((count, records.num_bytes), np.uint8)

    def pack() -> None:
        with records.reading(wanted) as reading:
            for (block, digest), place in zip(wanted, places, strict=True):
                reading.pack(digest, Origin(1, block), place)

    calls: list[tuple[str, Callable[[], object]]] = [
        ("to pinned memory", lambda: moved.reading(wanted).__enter__()),
        ("to records with checksums", pack),
        ("to the device", lambda: moved.writing(filled)()),
    ]
    num_bytes = count * moved.payload_bytes
    for name, call in calls:
        note = f"{count} of {moved.payload_bytes >> 10} KiB"
        report.row("blocks", f"{size} tokens, {name}", ms=_median_ms(report, call), num_bytes=num_bytes, note=note)
    same = torch.equal(pool[:, :, :count], pool[:, :, count : 2 * count])
    report.row("blocks", f"{size} tokens, copies = blocks, bits", ok=same and bool(pool[:, :, :count].any()))


def _median_ms(report: Report, call: Callable[[], object]) -> float:
    """By the host's clock, until the device is done. The first calls allocate."""
    times = []
    for _ in range(1 if report.is_smoke else 2 + REPEATS):
        report.synchronize()
        started = time.perf_counter()
        call()
        report.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[-REPEATS:])


def _time_steps(report: Report, runner: DeviceRunner, moved: DeviceBlocks) -> None:
    """Decode steps alone, and while a thread reads a block without a pause, as the writer of a tier that is behind."""
    last, digest, ends, num_read = moved.num_blocks - 1, bytes(16), threading.Event(), [0]
    runner._commit_blocks(np.array([last]), [digest])

    def read() -> None:
        while not ends.is_set():
            with moved.reading([(last, digest)]):
                num_read[0] += 1

    shape = (3, 30) if report.is_smoke else (64, 512)
    alone, thread = time_decode(runner, report, *shape), threading.Thread(target=read)
    thread.start()
    started = time.perf_counter()
    try:
        beside = time_decode(runner, report, *shape)
    finally:
        ends.set()
        thread.join()
    rate = num_read[0] * moved.payload_bytes / (time.perf_counter() - started) / 1e9
    report.row("blocks", f"decode B {shape[0]} ctx {shape[1]}", ms=alone)
    report.row("blocks", "the same while blocks are read", ms=beside, note=f"{rate:.1f} GB/s are read")
