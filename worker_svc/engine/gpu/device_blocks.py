"""The blocks of a pool on a device, for tiers and transfers. No step waits for their copies.

    read     committed blocks are gathered and copied to pinned memory, on a stream beside that of the steps
    write    payloads are copied to the device on that stream; between two steps, that of the steps fills the blocks

A committed block has been computed, so its reads wait for no step. A step that overwrites it makes it uncommitted
before its launch, so a reader that has copied the new bytes finds that, and drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from step_protocol.columns import I64, U32
from worker_svc.engine.decoder.pool.block_contents import BlockContents
from worker_svc.engine.decoder.pool.block_payload import Bytes, Filled, Movable, Reader
from worker_svc.engine.gpu.uploads import to_device, to_host

KIND = "device: layer, keys and values, token, head"  # the order of the numbers of a block
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # copied as the widest that fits


class DeviceBlocks:
    """Moves the blocks of `pool` [layers, 2, num_blocks, block_size, kv_heads, head_dim]. `settle` records the tokens
    of steps that have ended, in the model thread.
    """

    is_on_device = True
    others: Sequence[Movable] = ()

    def __init__(self, contents: BlockContents, pool: torch.Tensor, settle: Callable[[], None]) -> None:
        contents.count_writes()
        self._contents = contents
        self._settle = settle
        layers, pair, self.num_blocks, *shape = pool.shape
        as_bytes = pool.view(torch.uint8).view(layers * pair, self.num_blocks, -1)
        word = next(word for word in WORDS if as_bytes.shape[2] % word.itemsize == 0)
        self._pool = as_bytes.view(word)  # [parts, num_blocks, words]
        self._device = pool.device
        self._is_cuda = pool.device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(pool.device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._written: Any = None  # event after the last write
        self.block_size = contents.block_size
        self.payload_bytes = layers * pair * as_bytes.shape[2]
        self.layout = [(KIND, []), (str(pool.dtype), [layers, pair, *shape])]

    def digests_of(self, block_ids: U32) -> tuple[U32, list[bytes]]:
        return self._contents.digests_of(block_ids)

    def read(self, block: int, digest: bytes, into: Bytes | None = None) -> tuple[U32, Bytes] | None:
        with self.reading([(block, digest)]) as reader:
            return reader.read(block, digest, into)

    @contextmanager
    def reading(self, wanted: Sequence[tuple[int, bytes]]) -> Iterator[Reader]:
        asked = {block: digest for block, digest in wanted if block < self.num_blocks}
        versions = {block: self._contents.version(block, digest) for block, digest in asked.items()}
        found = {block: version for block, version in versions.items() if version is not None}
        yield CopiedBlocks(self._contents, found, self._gather(np.array(list(found), np.int64)))

    def _gather(self, blocks: I64) -> Bytes:
        """Blocks [parts, n, bytes] in pinned memory."""
        if not len(blocks):
            return np.empty((len(self._pool), 0, 0), np.uint8)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if self._written is not None:
                self._stream.wait_event(self._written)
            copied = to_host(self._pool.index_select(1, to_device(blocks, self._device)))
            self._wait()
        found: Bytes = copied.view(torch.uint8).numpy()
        return found

    def write(self, block: int, tokens: U32, payload: Bytes) -> None:
        self.writing([Filled(block, tokens, payload)])()

    def writing(self, filled: Sequence[Filled]) -> Callable[[], None]:
        parts, _, words = self._pool.shape
        host = torch.empty(parts, len(filled), words, dtype=self._pool.dtype, pin_memory=self._is_cuda)
        places = host.view(torch.uint8).numpy()
        for line, one in enumerate(filled):
            places[:, line] = one.payload.reshape(parts, -1)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            payloads = host.to(self._device, non_blocking=True)
            blocks = to_device(np.array([one.block for one in filled], np.int64), self._device)
            self._wait()

        def write() -> None:
            self._settle()
            for one in filled:
                self._contents.write_block(one.block, one.tokens)
            self._scatter(blocks, payloads)

        return write

    def _scatter(self, blocks: torch.Tensor, payloads: torch.Tensor) -> None:
        """Behind the launched steps, and before the next one."""
        with torch.inference_mode():
            self._pool.index_copy_(1, blocks, payloads)
        if self._is_cuda:
            of_steps = torch.cuda.current_stream(self._device)
            for tensor in (blocks, payloads):
                tensor.record_stream(of_steps)
            self._written = of_steps.record_event()

    def _wait(self) -> None:
        """Until the copies of this thread have ended. It sleeps, because steps come first."""
        if self._is_cuda:
            ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            ended.record(self._stream)
            ended.synchronize()


class CopiedBlocks:
    """Copies of blocks in host memory, valid as long as the blocks have these versions."""

    def __init__(self, contents: BlockContents, versions: Mapping[int, int], copies: Bytes) -> None:
        """`copies`: [parts, n, bytes], in the order of `versions`."""
        self._contents = contents
        self._versions = versions
        self._copies = dict(zip(versions, copies.swapaxes(0, 1), strict=True))

    def read(self, block: int, digest: bytes, into: Bytes | None = None) -> tuple[U32, Bytes] | None:
        copied = self._copies.get(block)
        if copied is None:
            return None
        tokens = self._contents.tokens_of(block)
        payload = np.empty(copied.size, np.uint8) if into is None else into
        payload.reshape(copied.shape)[:] = copied
        return (tokens, payload) if self._contents.version(block, digest) == self._versions[block] else None
