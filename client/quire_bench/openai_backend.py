"""Any OpenAI-compatible HTTP server: completions with token ids if the server accepts them, else with text; or chat.

Needs aiohttp: `pip install 'quire-client[bench]'`. The number of tokens in a chunk is the number of its token ids
(`return_token_ids` of vLLM), else the increase of the usage in the chunk, else an equal share of the final usage.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire_bench.backend import BackendError, BenchAnswer, Chunks, RequestFailed, SendOptions, ServerInfo
from quire_bench.datasets import Prompt
from quire_bench.figures import spread

if TYPE_CHECKING:
    import aiohttp

PROBE_TOKEN_IDS = (3, 4, 5)
REFUSED = (400, 415, 422)
MAX_ERROR_CHARS = 200
SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "ya", "zu")


@dataclass(slots=True)
class _Progress:
    """The state of one answer after the events received so far."""

    chunks: Chunks
    are_exact: bool = True
    num_seen: int = 0
    token_ids: list[int] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Count the tokens of an event. Raises RequestFailed for an error event."""
        if event.get("error"):
            raise RequestFailed(_message(event))
        usage = event.get("usage") or {}
        if usage:
            self.usage = usage
        for choice in event.get("choices", ()):
            self._count(choice, usage)

    def _count(self, choice: Mapping[str, Any], usage: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or choice
        ids = choice.get("token_ids")
        if ids:
            count = len(ids)
            self.token_ids += ids
        elif usage.get("completion_tokens"):
            count = usage["completion_tokens"] - self.num_seen
        elif delta.get("text") or delta.get("content") or delta.get("reasoning_content"):
            count = 1
            self.are_exact = False
        else:
            return
        self.num_seen += count
        self.chunks.arrived(count)

    def answer(self, prompt_len: int) -> BenchAnswer:
        """The complete answer. If chunks had no token counts, the final usage is divided evenly over them."""
        num_output = self.usage.get("completion_tokens", self.num_seen)
        if not self.are_exact and self.chunks.times:
            self.chunks.tokens = spread(len(self.chunks.times), num_output)
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        has_ids = len(self.token_ids) == num_output and num_output > 0
        return BenchAnswer(
            self.usage.get("prompt_tokens", prompt_len), num_output, cached, tuple(self.token_ids) if has_ids else None
        )


class OpenAIBackend:
    """Owns one HTTP session. `extra_body` is added to every request unchanged."""

    def __init__(
        self, base_url: str, model: str, options: SendOptions, extra_body: Mapping[str, Any], api_key: str | None = None
    ) -> None:
        self._api_key = api_key
        self._base_url = api_root(base_url)
        self._model = model
        self._options = options
        self._extra_body = extra_body
        self._takes_token_ids = not options.chat
        self._session: aiohttp.ClientSession | None = None

    async def connect(self) -> ServerInfo:
        aiohttp = _import_aiohttp()
        key = self._api_key or os.environ.get("OPENAI_API_KEY")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._options.timeout_s),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            read_bufsize=1 << 20,
        )
        entry = await self._find_model()
        self._model = entry["id"]
        if self._takes_token_ids:
            self._takes_token_ids = await self._probe_token_ids()
        return ServerInfo("openai", self._base_url, self._model, None, entry.get("max_model_len"))

    async def send(self, prompt: Prompt, max_tokens: int, number: int, chunks: Chunks) -> BenchAnswer:
        progress = _Progress(chunks)
        aiohttp = _import_aiohttp()
        try:
            async with self._http.post(self._url, json=self._body(prompt, max_tokens, number)) as response:
                if response.status != 200:
                    raise RequestFailed(f"HTTP {response.status}: {_message(await response.text())}")
                async for event in _events(response.content):
                    progress.take(event)
        except TimeoutError:
            raise RequestFailed(f"no answer within {self._options.timeout_s:g} s (--timeout-s)") from None
        except aiohttp.ClientError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from None
        if not progress.num_seen:
            raise RequestFailed("the server streamed no token")
        return progress.answer(0 if isinstance(prompt, str) else len(prompt))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("call connect() first")
        return self._session

    @property
    def _url(self) -> str:
        return f"{self._base_url}/chat/completions" if self._options.chat else f"{self._base_url}/completions"

    def _body(self, prompt: Prompt, max_tokens: int, number: int) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.temperature > 0:
            body["seed"] = options.seed + number
        if options.cache_salt:
            body["cache_salt"] = options.cache_salt
        if options.chat:
            body["messages"] = [{"role": "user", "content": as_text(prompt)}]
        else:
            body["prompt"] = list(prompt) if self._takes_token_ids and not isinstance(prompt, str) else as_text(prompt)
        return body | dict(self._extra_body)

    async def _find_model(self) -> Mapping[str, Any]:
        """The model's entry in the server's list: the requested model, else the first."""
        aiohttp = _import_aiohttp()
        url = f"{self._base_url}/models"
        try:
            async with self._http.get(url) as response:
                if response.status != 200:
                    raise BackendError(f"{url}: HTTP {response.status}: {_message(await response.text())}")
                entries = (await response.json(content_type=None))["data"]
        except (TimeoutError, aiohttp.ClientError) as error:
            raise BackendError(f"no answer from {url}: {error or 'timeout'}; check --base-url") from None
        except (ValueError, KeyError, TypeError):
            raise BackendError(f"{url} is not a list of models; check --base-url") from None
        for entry in entries:
            if self._model in ("", entry["id"]):
                return dict(entry)
        names = ", ".join(entry["id"] for entry in entries) or "none"
        raise BackendError(f"{url} does not list model {self._model!r}; it has: {names}")

    async def _probe_token_ids(self) -> bool:
        """Whether completions accept token ids as a prompt."""
        aiohttp = _import_aiohttp()
        body = self._body(PROBE_TOKEN_IDS, 1, 0)
        try:
            async with self._http.post(self._url, json=body) as response:
                await response.read()
                return response.status not in REFUSED
        except (TimeoutError, aiohttp.ClientError) as error:
            raise BackendError(f"{self._url}: {error or 'timeout'}") from None


def api_root(base_url: str) -> str:
    """The root of the API for `http://host:8000`, with or without /v1. Raises BackendError."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BackendError(f"--base-url {base_url!r} is not an HTTP URL; use a URL like http://localhost:8000")
    root = base_url.rstrip("/")
    return root if parts.path.strip("/") else f"{root}/v1"


def as_text(prompt: Prompt) -> str:
    """A prompt for a server that accepts text only: each token id is replaced by its own made-up word."""
    if isinstance(prompt, str):
        return prompt
    return " ".join(_word(token) for token in prompt)


def _word(token: int) -> str:
    word = SYLLABLES[token % 16]
    while token >= 16:
        token //= 16
        word += SYLLABLES[token % 16]
    return word


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a server-sent event stream. Reads to the end, so that the connection can be reused."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
                yield _object(payload)


def _object(payload: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError:
        raise RequestFailed(f"an event is not valid JSON: {payload[:MAX_ERROR_CHARS]!r}") from None
    if not isinstance(event, dict):
        raise RequestFailed(f"an event is not a JSON object: {payload[:MAX_ERROR_CHARS]!r}")
    return event


def _message(body: str | Mapping[str, Any]) -> str:
    """The message of an OpenAI error, else the whole body."""
    try:
        found = json.loads(body) if isinstance(body, str) else body
        error = found.get("error", found)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = body
    return str(text)[:MAX_ERROR_CHARS]


def _import_aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError:
        raise BackendError(
            "--backend openai needs aiohttp, which is not installed; run `pip install 'quire-client[bench]'`"
        ) from None
    return aiohttp
