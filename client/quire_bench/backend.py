"""The interface between the driver and a server under test."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from quire_client.aio import AsyncClient, AsyncGenerateStream
from quire_client.connection.channel import resolve_targets
from quire_client.connection.tls import Tls
from quire_client.errors import QuireError
from quire_client.requests.generate import GenerateOptions

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


CONNECT_TIMEOUT_S = 5.0


class QuireBackend:
    """Owns one AsyncClient with one channel per gateway, like a program that uses the SDK."""

    def __init__(
        self, target: str | None, model: str, options: SendOptions, tls: Tls | None = None, api_key: str | None = None
    ) -> None:
        self._api_key = api_key
        self._target = target
        self._tls = tls
        self._model = model
        self._options = options
        self._client: AsyncClient | None = None

    async def connect(self) -> ServerInfo:
        try:
            self._client = await AsyncClient.connect(
                self._target,
                tls=self._tls,
                api_key=self._api_key,
                connect_timeout_s=CONNECT_TIMEOUT_S,
                timeout_s=self._options.timeout_s,
            )
            info = await self._client.model(self._model)
        except QuireError as error:
            raise BackendError(error.message) from None
        return ServerInfo(
            "quire", ",".join(resolve_targets(self._target)), info.name, info.vocab_size, info.max_model_len
        )

    async def send(self, prompt: Prompt, max_tokens: int, number: int, chunks: Chunks) -> BenchAnswer:
        if self._client is None:
            raise RuntimeError("call connect() first")
        arrived = chunks.arrived
        try:
            async with self._stream(self._client, prompt, max_tokens, number) as stream:
                async for delta in stream:
                    arrived(len(delta.token_ids))
                result = await stream.result()
        except QuireError as error:
            raise RequestFailed(f"{type(error).__name__}: {error.message}") from None
        usage = result.usage
        return BenchAnswer(
            usage.prompt_tokens, usage.output_tokens, usage.cached_tokens, result.token_ids, resumes=result.resumes
        )

    def _stream(self, client: AsyncClient, prompt: Prompt, max_tokens: int, number: int) -> AsyncGenerateStream:
        given = self._options
        options = GenerateOptions(
            model=self._model,
            max_tokens=max_tokens,
            temperature=given.temperature,
            ignore_eos=given.ignore_eos,
            send_text=given.text,
        )
        if given.temperature > 0:
            options["seed"] = given.seed + number
        if given.cache_salt:
            options["cache_salt"] = given.cache_salt
        if not isinstance(prompt, str):
            return client.stream(token_ids=prompt, **options)
        if given.chat:
            return client.stream_chat(prompt, **options)
        return client.stream(prompt, **options)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
