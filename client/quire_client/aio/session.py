"""Sessions: conversations whose state the server keeps."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, Self, TypeVar, Unpack, cast

from quire.v1 import session_pb2

from quire_client import convert
from quire_client.aio.stream import AsyncGenerateStream
from quire_client.aio.transport import Gateway
from quire_client.requests.chat import Messages
from quire_client.requests.generate import GenerateOptions
from quire_client.types import GenerateResult, SessionInfo

T = TypeVar("T")


class SessionCalls(Protocol):
    """The calls of a client that its sessions use."""

    def stream(
        self,
        prompt: str | Iterable[int] | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerateStream: ...

    def resume(self, request_id: str, *, after: int | Mapping[int, int] = 0) -> AsyncGenerateStream: ...

    async def unary(self, method: Callable[[Gateway], Callable[..., Awaitable[T]]], request: Any) -> T: ...


class AsyncSession:
    """A conversation, or a text, of which each turn sends only what is new (docs/sessions.md).

    session = client.session(temperature=0)
    print((await session.chat("What does os.path.join do?")).text)
    print((await session.chat("And on Windows?")).text)

    `id` names the state after the last turn: a value on the server, which later turns and forks do not change. Another
    client continues it with `client.session(id)`. The options of the session are those of each turn.
    """

    def __init__(self, client: SessionCalls, session_id: str, options: GenerateOptions) -> None:
        self._client = client
        self._id = session_id
        self._options = options
        self._conversation = f"session-{uuid.uuid4().hex}"
        self._last: AsyncGenerateStream | None = None  # the last turn

    @property
    def id(self) -> str:
        """The id of the state after the last turn that the server has accepted. Empty before the first one."""
        if self._last is not None and self._last.is_accepted:
            self._id = self._last.request_id
        return self._id

    async def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """Answer the next message, or messages: a str (one user message), or messages as in `client.chat`."""
        return await self.generate(messages=messages, **options)

    async def generate(
        self,
        prompt: str | Iterable[int] | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """Continue with text, token ids or messages, and wait for the whole result."""
        async with self.stream(prompt, token_ids=token_ids, messages=messages, **options) as stream:
            return await stream.result()

    def stream(
        self,
        prompt: str | Iterable[int] | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerateStream:
        """Continue, and receive the output as it is produced. The next turn may begin when the stream has ended."""
        given = {**self._options, "request_id": f"turn-{uuid.uuid4().hex}", **cast(dict[str, Any], options)}
        given |= {"resumable": True, "session_id": self.id, "conversation": self._conversation}
        self._last = self._client.stream(prompt, token_ids=token_ids, messages=messages, **cast(GenerateOptions, given))
        return self._last

    def resume(self, *, after: int | Mapping[int, int] = 0) -> AsyncGenerateStream:
        """Continue the output where it was rewound, checkpointed or cut off, after the tokens that you have."""
        return self._client.resume(self.id, after=after)

    async def info(self) -> SessionInfo:
        """The server's knowledge of the session. Raises RequestNotFound."""
        request = session_pb2.GetSessionRequest(session_id=self.id)
        response = await self._call(lambda gateway: gateway.sessions.GetSession, request)
        return convert.result(SessionInfo, response.session)

    async def fork(self, n: int = 1) -> tuple[Self, ...]:
        """Sessions that continue from here, independent of each other and of this one."""
        response = await self._call(
            lambda gateway: gateway.sessions.Fork, session_pb2.ForkRequest(session_id=self.id, n=n)
        )
        return tuple(self._of(session.session_id) for session in response.sessions)

    async def rewind(self, num_tokens: int) -> Self:
        """A session with the first tokens of the last output; `resume` computes the others again, equal."""
        request = session_pb2.RewindRequest(session_id=self.id, num_tokens=num_tokens)
        response = await self._call(lambda gateway: gateway.sessions.Rewind, request)
        return self._of(response.session.session_id)

    async def checkpoint(self) -> Self:
        """The session as it is now, also while an answer is computed."""
        request = session_pb2.CheckpointRequest(session_id=self.id)
        response = await self._call(lambda gateway: gateway.sessions.Checkpoint, request)
        return self._of(response.session.session_id)

    async def pin(self, ttl_s: float) -> None:
        """Keep this state for some seconds, also if it is not used. 0 ends the pin."""
        request = session_pb2.PinRequest(session_id=self.id, ttl_s=ttl_s)
        await self._call(lambda gateway: gateway.sessions.Pin, request)

    async def delete(self) -> None:
        """Delete this state on the server."""
        request = session_pb2.DeleteSessionRequest(session_id=self.id)
        await self._call(lambda gateway: gateway.sessions.DeleteSession, request)

    def _of(self, session_id: str) -> Self:
        return type(self)(self._client, session_id, self._options)

    async def _call(self, method: Callable[[Gateway], Callable[..., Awaitable[T]]], request: Any) -> T:
        return await self._client.unary(method, request)
