"""The SDK stays cheap: Python calls of a request, counted without gRPC, never in seconds."""

import struct
import sys
from collections import Counter

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire_client import AsyncClient
from quire_client.assembly import load_digest

NUM_REQUESTS = 20
NUM_CHUNKS = 5
IDS = list(range(10, 10 + NUM_CHUNKS))


class FakeCall:
    """An open call with these messages."""

    def __init__(self, messages):
        self._messages = iter(messages)

    async def read(self):
        return next(self._messages, None)

    def cancel(self):
        return True


def answer():
    """One token per chunk; the last one and Finished are one message."""
    accepted = pb.Accepted(request_id="r1", seed=7, model="fake", prompt_tokens=3, revision="abc", n=1)
    messages = [pb.GenerateResponse(accepted=accepted)]
    for offset, token_id in enumerate(IDS):
        chunk = pb.Chunk(offset=offset, token_ids=[token_id], text="a", text_offset=offset)
        messages.append(pb.GenerateResponse(event_seq=1 + offset, chunk=chunk))
    finished = pb.Finished(
        reason=types_pb2.FINISH_REASON_LENGTH,
        usage=types_pb2.Usage(prompt_tokens=3, output_tokens=NUM_CHUNKS),
        output_digest=load_digest()(struct.pack(f"<{NUM_CHUNKS}I", *IDS)),
    )
    messages[-1].following.add(event_seq=1 + NUM_CHUNKS, finished=finished)
    return messages


async def test_calls_of_a_request(monkeypatch):
    client = AsyncClient("127.0.0.1:1")
    monkeypatch.setattr(client._calls.gateways, "open_stream", lambda *arguments: FakeCall(answer()))

    async def send():
        async with client.stream(token_ids=(1, 2, 3), max_tokens=NUM_CHUNKS, temperature=0, ignore_eos=True) as stream:
            deltas = [delta async for delta in stream]
            return deltas, await stream.result()

    deltas, result = await send()
    assert (len(deltas), result.token_ids) == (NUM_CHUNKS, tuple(IDS))
    calls = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update((event,)))
    try:
        for _ in range(NUM_REQUESTS):
            await send()
    finally:
        sys.setprofile(None)
    assert calls["call"] / NUM_REQUESTS <= 218, "Python calls"
    await client.close()
