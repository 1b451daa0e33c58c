"""An agent that is killed at any time: runs with one tool call each, until all have their result. See
test_exactly_once.py, which starts it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from quire_client import AsyncClient, QuireError, ToolCall
from quire_client.executor import CallUnfinished, Executor, FileJournal

from tests.processes.test_chat_tools import QUESTION, WEATHER

PARALLEL = 24
RETRY_S = 0.05


def append(path: Path, line: str) -> None:
    """One line, whole or not at all: a kill does not cut a write of this size."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def line_of(call: ToolCall) -> str:
    return f"{call.id} {json.dumps(call.arguments)}"


class Agent:
    """`executed` is the world that the tool changes: a line per execution. `done`: a line per run with its result."""

    def __init__(self, folder: Path, client: AsyncClient) -> None:
        self._executed, self._done = folder / "executed", folder / "done"
        self._executor = Executor(FileJournal(folder / "calls.jsonl"))
        self._client = client

    async def run(self, name: str) -> None:
        call = await self._call(name)
        try:
            result = await self._executor.run_async(call, self._tool)
        except CallUnfinished:  # killed between claim and result: the tool knows whether it ran
            result = line_of(call)
            if result not in lines_of(self._executed):
                result = await self._tool(call)
        append(self._done, f"{name} {result}")

    async def _call(self, name: str) -> ToolCall:
        options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0}
        while True:
            try:
                return (await self._client.chat(QUESTION, request_id=name, max_tokens=300, **options)).tool_calls[0]  # type: ignore[arg-type]
            except QuireError:  # such as ALREADY_EXISTS: the request of the killed process is still open
                await asyncio.sleep(RETRY_S)

    async def _tool(self, call: ToolCall) -> str:
        append(self._executed, line_of(call))
        return line_of(call)


async def main(folder: Path, num_runs: int, targets: list[str]) -> None:
    done = {line.split()[0] for line in lines_of(folder / "done")}
    names = iter([name for i in range(num_runs) if (name := f"run-{i}") not in done])
    async with AsyncClient(targets, stall_timeout_s=0.5) as client:
        agent = Agent(folder, client)

        async def worker() -> None:
            for name in names:
                await agent.run(name)

        await asyncio.gather(*(worker() for _ in range(PARALLEL)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
