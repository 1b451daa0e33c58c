"""Load for a scheduler without a gateway: one Attach stream with a fixed number of open requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from types import TracebackType

import numpy as np
from quire.internal.v1 import scheduler_pb2 as pb
from quire.internal.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.v1 import types_pb2 as types

from svc_common.serve import open_channel


class AttachLoad:
    """Keeps `num_open` requests open: each request that ends is replaced. Use as `async with`."""

    def __init__(
        self, address: str, *, num_open: int, prompt_lens: tuple[int, int], output_lens: tuple[int, int], seed: int = 0
    ) -> None:
        self.num_tokens = 0
        self.num_messages = 0
        self.num_finished = 0
        self._num_open = num_open
        self._prompt_lens = prompt_lens
        self._output_lens = output_lens
        self._rng = random.Random(seed)
        self._channel = open_channel(address)
        self._outbox: asyncio.Queue[pb.AttachRequest] = asyncio.Queue()
        self._welcome = pb.Welcome()
        self._changed = asyncio.Event()
        self._next_handle = 0
        self._reader: asyncio.Task[None] | None = None
        self._stopping = False

    async def __aenter__(self) -> AttachLoad:
        self._outbox.put_nowait(pb.AttachRequest(hello=pb.Hello(gateway_id="bench", protocol_version=1)))
        self._reader = asyncio.create_task(self._read(SchedulerServiceStub(self._channel).Attach(self._messages())))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def start(self, num_workers: int, timeout_s: float = 60.0) -> None:
        """Wait for the workers, then open the requests."""
        async with asyncio.timeout(timeout_s):
            while self._welcome.ready_workers < num_workers:
                await self._next_change()
        for _ in range(self._num_open):
            self._submit()

    async def measure(self, seconds: float) -> float:
        """Tokens per second over the next `seconds`."""
        tokens, started = self.num_tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        if self._reader is not None and self._reader.done():
            self._reader.result()
        return (self.num_tokens - tokens) / (time.perf_counter() - started)

    async def finish(self) -> None:
        """Stop opening requests and wait until the open ones have ended."""
        self._stopping = True
        while self.num_finished < self._next_handle:
            await self._next_change()

    async def _next_change(self) -> None:
        """Wait for a Welcome or a finished request. Raises the error that ended the stream."""
        assert self._reader is not None
        self._changed.clear()
        change = asyncio.ensure_future(self._changed.wait())
        await asyncio.wait([change, self._reader], return_when=asyncio.FIRST_COMPLETED)
        if self._reader.done():
            change.cancel()
            self._reader.result()
            raise RuntimeError("the scheduler ended the stream")

    async def _messages(self) -> AsyncIterator[pb.AttachRequest]:
        while True:
            yield await self._outbox.get()

    async def _read(self, call: AsyncIterator[pb.AttachResponse]) -> None:
        async for response in call:
            kind = response.WhichOneof("message")
            if kind == "deltas":
                self._take(response.deltas)
            elif kind == "welcome":
                self._welcome = response.welcome
                self._beat(response.welcome.heartbeat_interval_s)
                self._changed.set()
            elif kind == "heartbeat":
                self._outbox.put_nowait(pb.AttachRequest(heartbeat=pb.GatewayHeartbeat()))

    def _beat(self, interval_s: float) -> None:
        if interval_s:
            self._outbox.put_nowait(pb.AttachRequest(heartbeat=pb.GatewayHeartbeat()))

    def _take(self, deltas: pb.Deltas) -> None:
        self.num_messages += 1
        self.num_tokens += len(deltas.token_ids) // 4
        for finished in deltas.finished:
            if finished.reason != types.FINISH_REASON_LENGTH:
                raise RuntimeError(f"request {finished.handle} ended: {finished.reason} {finished.message}")
            self.num_finished += 1
            if not self._stopping:
                self._submit()
        if deltas.finished:
            self._changed.set()

    def _submit(self) -> None:
        self._next_handle += 1
        rng = np.random.default_rng(self._rng.getrandbits(32))
        prompt = rng.integers(3, 1000, self._rng.randint(*self._prompt_lens), dtype=np.uint32)
        submit = pb.Submit(
            handle=self._next_handle,
            request_id=f"bench-{self._next_handle}",
            prompt_token_ids=prompt.tobytes(),
            sampling=types.SamplingParams(temperature=0.0, seed=1, n=1),
            stop=types.StopParams(max_tokens=self._rng.randint(*self._output_lens), ignore_eos=True),
        )
        self._outbox.put_nowait(pb.AttachRequest(submit=submit))
