"""The interface between the driver and a server under test."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from quire_bench.datasets import Prompt


class BackendError(Exception):
    """The server cannot be measured. The message has the cause and the remedy."""


class RequestFailed(Exception):
    """One request failed; the message goes into the report."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server under test. None: not reported by the server."""

    kind: str
    address: str
    model: str
    vocab_size: int | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class SendOptions:
    """Options of every request."""

    temperature: float
    seed: int
    ignore_eos: bool
    chat: bool  # texts are user messages of a chat
    timeout_s: float
    text: bool  # request text (OpenAI-compatible servers always send it)
    cache_salt: str = ""


@dataclass(slots=True)
class Chunks:
    """Arrival time and number of tokens of each chunk of an answer. `arrived` runs for every chunk, so it is short."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def arrived(self, num_tokens: int) -> None:
        if num_tokens:
            self.times.append(time.perf_counter())
            self.tokens.append(num_tokens)


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    """The end of a request. `token_ids` is None if the server sends text only."""

    num_input: int
    num_output: int
    num_cached: int
    token_ids: tuple[int, ...] | None
    resumes: int = 0


class BenchBackend(Protocol):
    """A server under test."""

    async def connect(self) -> ServerInfo:
        """Raises BackendError if the server cannot be measured."""

    async def send(self, prompt: Prompt, max_tokens: int, number: int, chunks: Chunks) -> BenchAnswer:
        """Send one request and read its stream. Raises RequestFailed."""

    async def close(self) -> None: ...
