"""What the driver needs of a server, and what it tells about one answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from quire_client.bench.datasets import Prompt


class BackendError(Exception):
    """The server cannot be measured; the message says why and what to do."""


class RequestFailed(Exception):
    """One request failed; the message goes into the report."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is measured. None: the server does not say."""

    kind: str
    address: str
    model: str
    vocab_size: int | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How every request is sent."""

    temperature: float
    seed: int
    ignore_eos: bool
    chat: bool  # texts are user messages of a chat
    timeout_s: float
    text: bool  # ask for text (OpenAI-compatible servers always send it)
    cache_salt: str = ""


@dataclass(slots=True)
class Chunks:
    """When tokens arrived, and how many at a time. Filled while an answer streams; kept small, as it is on every
    token's path."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def arrived(self, num_tokens: int) -> None:
        if num_tokens:
            self.times.append(time.perf_counter())
            self.tokens.append(num_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a request. `token_ids` is None where the server sends text only."""

    num_input: int
    num_output: int
    num_cached: int
    token_ids: tuple[int, ...] | None
    resumes: int = 0


class Backend(Protocol):
    """A server under measurement."""

    async def connect(self) -> ServerInfo:
        """Raises BackendError when it cannot be measured."""

    async def send(self, prompt: Prompt, max_tokens: int, number: int, chunks: Chunks) -> Answer:
        """One request, streamed. Raises RequestFailed."""

    async def close(self) -> None: ...
