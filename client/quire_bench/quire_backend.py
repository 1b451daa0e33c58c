"""Quire over gRPC, through the SDK."""

from __future__ import annotations

from quire_client.aio import AsyncClient, AsyncGenerateStream
from quire_client.connection.channel import resolve_targets
from quire_client.connection.tls import Tls
from quire_client.errors import QuireError
from quire_client.requests.generate import GenerateOptions

from quire_bench.backend import BackendError, BenchAnswer, Chunks, RequestFailed, SendOptions, ServerInfo
from quire_bench.datasets import Prompt

CONNECT_TIMEOUT_S = 5.0


class QuireBackend:
    """Owns one AsyncClient with one channel per gateway, like a program that uses the SDK."""

    def __init__(
        self,
        target: str | None,
        model: str,
        options: SendOptions,
        tls: Tls | None = None,
        api_key: str | None = None,
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
