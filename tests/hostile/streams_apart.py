"""Good streams in a process of their own, so that their speed is not that of the attacker's process.

The child prints a `Progress` for each line that it reads, and a JSON object at the end of its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from quire_client import AsyncClient

from tests.hostile.suite import Progress, good_streams
from tests.hostile.target import GOOD_KEY, Target


class StreamsApart:
    """Eight streams at a time in a child process."""

    def __init__(self, child: Process) -> None:
        self._child = child
        self._wrong: list[str] = []
        self.num_ended = 0

    async def progress(self) -> Progress:
        """The state of the streams, on the child's clock."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(b"\n")
        return Progress(*json.loads(await self._child.stdout.readline()))

    def wrong(self) -> list[str]:
        """The streams whose tokens differ from the reference, or that failed; known after the end."""
        return self._wrong

    async def end(self) -> None:
        """Wait until the running streams have ended."""
        out, _ = await self._child.communicate(b"")  # without an input, Python 3.11 leaves stdin open
        found = json.loads(out)
        self._wrong, self.num_ended = found["wrong"], found["ended"]


@contextlib.asynccontextmanager
async def streams_apart(target: Target) -> AsyncIterator[StreamsApart]:
    """Run good streams in a child process. When the block ends, wait for the running ones."""
    targets = ",".join(gateway.address for gateway in target.gateways)
    command = (sys.executable, "-m", __spec__.name, targets, str(target.model_dir))
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    streams = StreamsApart(child)
    try:
        yield streams
        await streams.end()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def run(targets: str, model_dir: Path) -> None:
    """The child: stream until the end of the input."""
    client = await AsyncClient.connect(targets, timeout_s=300.0, api_key=GOOD_KEY)
    async with client, good_streams(model_dir, client) as streams:
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await streams.progress()), flush=True)
    print(json.dumps({"wrong": streams.wrong(), "ended": streams.num_ended}), flush=True)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], Path(sys.argv[2])))
