#!/usr/bin/env python
"""A scheduler without workers: it sends one token per step to every open request, at a fixed step rate.

It puts load on a gateway without the CPU time of a real scheduler and workers.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from quire.internal.v1 import scheduler_pb2 as pb
from quire.internal.v1.scheduler_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server
from quire.v1 import types_pb2 as types
from quire_client.demo import demo_model_dir

from svc_common.serve import GrpcServer
from worker_svc.bundle import read_bundle

VOCAB_SIZE = 2048
MAX_MODEL_LEN = 1 << 20


@dataclass(slots=True)
class Open:
    """One open request."""

    num_output: int
    max_tokens: int


class PacingScheduler(SchedulerServiceServicer):
    """Serves Attach. At every step each open request gets one token."""

    def __init__(self, steps_per_s: float) -> None:
        self._interval_s = 1 / steps_per_s
        self._bundle = read_bundle(Path(demo_model_dir()))
        self._tokens = np.random.default_rng(0).integers(10, VOCAB_SIZE, 1 << 16, dtype=np.uint32)

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        requests: dict[int, Open] = {}
        replies: list[pb.AttachResponse] = []
        reader = asyncio.create_task(self._read(request_iterator, requests, replies))
        yield pb.AttachResponse(welcome=self._welcome())
        loop = asyncio.get_running_loop()
        due = beat_at = loop.time()
        try:
            while not reader.done():
                due = max(due + self._interval_s, loop.time() - 1.0)  # limits the backlog of a slow gateway
                await asyncio.sleep(max(0.0, due - loop.time()))
                while replies:
                    yield replies.pop(0)
                if requests:
                    yield pb.AttachResponse(deltas=self._step(requests))
                if loop.time() >= beat_at:
                    beat_at += 1.0
                    yield pb.AttachResponse(heartbeat=pb.SchedulerHeartbeat(ready_workers=1))
        finally:
            reader.cancel()

    async def GetBundle(self, request: pb.GetBundleRequest, context: Any) -> AsyncIterator[pb.GetBundleResponse]:
        yield pb.GetBundleResponse(data=self._bundle.data)

    async def _read(
        self,
        stream: AsyncIterator[pb.AttachRequest],
        requests: dict[int, Open],
        replies: list[pb.AttachResponse],
    ) -> None:
        async for request in stream:
            if request.HasField("submit"):
                handle = request.submit.handle
                requests[handle] = Open(0, request.submit.stop.max_tokens)
                replies.append(pb.AttachResponse(submit_reply=pb.SubmitReply(handle=handle)))
            elif request.HasField("cancel"):
                requests.pop(request.cancel.handle, None)

    def _step(self, requests: dict[int, Open]) -> pb.Deltas:
        offsets = np.fromiter((request.num_output for request in requests.values()), np.uint32, len(requests))
        handles = np.fromiter(requests, np.uint32, len(requests))
        deltas = pb.Deltas(
            handles=handles.tobytes(),
            offsets=offsets.tobytes(),
            token_ids=self._tokens[(handles * 31 + offsets) & 0xFFFF].tobytes(),
        )
        for handle, request in list(requests.items()):
            request.num_output += 1
            if request.num_output == request.max_tokens:
                deltas.finished.add(handle=handle, reason=types.FINISH_REASON_LENGTH)
                del requests[handle]
        return deltas

    def _welcome(self) -> pb.Welcome:
        info = types.ModelInfo(
            model="paced",
            revision="1",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            bundle_digest=self._bundle.digest,
            block_size=16,
            max_num_blocks=MAX_MODEL_LEN,
            max_num_seqs=4096,
            determinism=types.DETERMINISM_EXACT,
        )
        return pb.Welcome(scheduler_epoch=1, info=info, ready_workers=1, heartbeat_interval_s=1.0)


async def serve(args: argparse.Namespace) -> None:
    server = GrpcServer(listen=args.listen, service_names=[])
    add_SchedulerServiceServicer_to_server(PacingScheduler(args.steps_per_s), server.grpc)
    await server.start()
    server.set_serving(True)
    await server.run_until_stopped(lambda: asyncio.sleep(0), grace_s=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--steps-per-s", type=float, required=True, help="tokens per second of every request")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
