"""A server under test, and the run that sends conversations to it at their start times and records the answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire_client.aio import AsyncClient, AsyncGenerateStream
from quire_client.connection.channel import Tls, resolve_targets
from quire_client.errors import QuireError
from quire_client.requests.generate import GenerateOptions

from quire_bench.datasets import DatasetConversation, Prompt, Turn
from quire_bench.figures import Record


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


class BenchRun:
    """One measurement. `records` grows during the run, so an interrupted run keeps its results so far."""

    def __init__(
        self,
        backend: BenchBackend,
        conversations: Sequence[DatasetConversation],
        starts_s: Sequence[float],
        *,
        concurrency: int | None = None,
        vocab_size: int,
    ) -> None:
        self.records: list[Record] = []
        self.num_tokens = 0
        self.num_failed = 0
        self._backend = backend
        self._conversations = conversations
        self._starts_s = starts_s
        self._is_limited = concurrency is not None
        self._slots = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
        self._vocab_size = vocab_size
        self._started = 0.0
        self._num_sent = 0

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self._conversations)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    async def run(self) -> None:
        """Run until every conversation has ended. Cancel it to stop early."""
        self._started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for conversation, start_s in sorted(
                zip(self._conversations, self._starts_s, strict=True), key=lambda item: item[1]
            ):
                wait_s = start_s - self.elapsed_s
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(self._converse(conversation, start_s))

    async def _converse(self, conversation: DatasetConversation, start_s: float) -> None:
        async with self._slots:
            # The wait for a free slot is not a delay of the client.
            due_s = max(start_s, self.elapsed_s) if self._is_limited else start_s
            history: tuple[int, ...] = ()
            for turn in conversation.turns:
                if turn.think_s:
                    await asyncio.sleep(turn.think_s)
                    due_s += turn.think_s
                answer = await self._ask(turn, history, due_s)
                if answer is None:
                    return  # the next turn needs this answer
                if not isinstance(turn.prompt, str):
                    history += turn.prompt + answer
                due_s = self.elapsed_s

    async def _ask(self, turn: Turn, history: tuple[int, ...], due_s: float) -> tuple[int, ...] | None:
        """Send one turn. Returns the tokens of its answer, or None if it failed."""
        prompt: Prompt = turn.prompt if isinstance(turn.prompt, str) else history + turn.prompt
        number, self._num_sent = self._num_sent, self._num_sent + 1
        chunks = Chunks()
        sent_s = self.elapsed_s
        late_s = max(0.0, sent_s - due_s)
        try:
            answer = await self._backend.send(prompt, turn.max_tokens, number, chunks)
        except RequestFailed as error:
            self.num_failed += 1
            self.records.append(Record(sent_s, self.elapsed_s, late_s=late_s, error=str(error)))
            return None
        self.num_tokens += answer.num_output
        self.records.append(
            Record(
                sent_s=sent_s,
                end_s=self.elapsed_s,
                num_input=answer.num_input,
                num_output=answer.num_output,
                num_cached=answer.num_cached,
                chunk_times=[at - self._started for at in chunks.times],
                chunk_tokens=chunks.tokens,
                late_s=late_s,
                resumes=answer.resumes,
            )
        )
        if answer.token_ids is not None:
            return answer.token_ids
        return self._stand_in(answer.num_output, number)

    def _stand_in(self, count: int, number: int) -> tuple[int, ...]:
        """Random tokens that replace an answer without token ids in the prompt of the next turn."""
        return tuple(random.Random(number).choices(range(3, self._vocab_size), k=count))


def arrival_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """`count` times at `rate` per second on average, the first at 0. An infinite rate starts all at 0.

    The gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, below 1 is bursty, above 1 is
    more even.
    """
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
