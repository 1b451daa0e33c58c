"""The asyncio client. `client.py` is its twin; what they share lives in modules without I/O."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import grpc
import grpc.aio
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceServiceStub

from quire_client import convert, requests
from quire_client.assembly import StreamAssembler
from quire_client.channel import (
    HEALTH_METHOD,
    call_metadata,
    channel_options,
    health_request,
    health_state,
    resolve_target,
)
from quire_client.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    ModelNotFound,
    QuireError,
    Unimplemented,
    cannot_connect,
    error_from_rpc,
)
from quire_client.requests import ChatOptions, GenerateOptions, Messages
from quire_client.retry import CONNECT_RETRY, Deadline, RetryPolicy
from quire_client.types import AbortResult, Delta, GenerateResult, ModelInfo, Sample, Status, TokenizeResult

if TYPE_CHECKING:
    from quire.v1.inference_pb2_grpc import InferenceServiceAsyncStub

    Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]

T = TypeVar("T")

NOT_OPEN = "the stream is not open: use it as `async with client.stream(...) as stream:`"


class AsyncClient:
    """Speaks with a Quire gateway from asyncio. Belongs to one event loop; close it, or use it as a context manager.

    async with await AsyncClient.connect("localhost:50051") as client:
        print((await client.chat("What does os.path.join do?")).text)

    `channel` is the transport: any `grpc.aio.Channel`, e.g. yours with interceptors. `quire_client.testing` has a
    gateway without a model for your tests.
    `timeout_s` limits a whole generation, `unary_timeout_s` every other call.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        api_key: str | None = None,
        timeout_s: float | None = 600.0,
        unary_timeout_s: float | None = 30.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.raw: InferenceServiceAsyncStub = InferenceServiceStub(
            channel
        )  # the generated stub, for what the SDK does not wrap
        self._channel = channel
        self._metadata = call_metadata(api_key)
        self._timeout_s = timeout_s
        self._unary_timeout_s = unary_timeout_s
        self._retry = retry or RetryPolicy()
        self._rng = random.Random()
        self._health: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_METHOD)

    @classmethod
    async def connect(
        cls,
        target: str | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        connect_timeout_s: float = 5.0,
        api_key: str | None = None,
        timeout_s: float | None = 600.0,
        unary_timeout_s: float | None = 30.0,
        retry: RetryPolicy | None = None,
    ) -> Self:
        """Open a channel to `target` (default: $QUIRE_TARGET, else localhost:50051) and wait until it answers.

        Plaintext unless `credentials` are given. Raises ConnectionFailed when nothing answers in `connect_timeout_s`.
        """
        target = resolve_target(target)
        options = channel_options(target)
        channel = (
            grpc.aio.secure_channel(target, credentials, options)
            if credentials
            else grpc.aio.insecure_channel(target, options)
        )
        client = cls(channel, api_key=api_key, timeout_s=timeout_s, unary_timeout_s=unary_timeout_s, retry=retry)
        try:
            await client._wait_until_reachable(connect_timeout_s)
        except (ConnectionFailed, DeadlineExceeded) as error:
            await client.close()
            raise cannot_connect(target, error) from None
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """Close the channel; open calls end with Cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """Generate and wait for the end. Exactly one of `prompt`, `token_ids`, `messages`; see GenerateOptions."""
        async with self.stream(prompt, token_ids=token_ids, messages=messages, **options) as stream:
            return await stream.result()

    def stream(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerateStream:
        """Generate and get the output as it comes.

        async with client.stream("Once") as stream:
            async for delta in stream:
                print(delta.text, end="")
        """
        timeout_s = options.pop("timeout_s", self._timeout_s)
        request = requests.generate_request(prompt, token_ids, messages, options)
        return AsyncGenerateStream(self, request, timeout_s)

    async def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """Answer a conversation: a str (one user message), or messages as dicts, (role, content) pairs or Message."""
        return await self.generate(messages=messages, **options)

    def stream_chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> AsyncGenerateStream:
        """Answer a conversation and get the output as it comes."""
        return self.stream(messages=messages, **options)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
        **chat_options: Unpack[ChatOptions],
    ) -> TokenizeResult:
        """Token ids of a text or of a rendered conversation."""
        request = requests.tokenize_request(prompt, messages, model, add_special_tokens, chat_options)
        return convert.tokenize_result(await self._unary(self.raw.Tokenize, request, timeout_s))

    async def detokenize(
        self,
        ids: Iterable[int],
        *,
        model: str = "",
        skip_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """Text of token ids; incomplete characters become U+FFFD."""
        request = requests.detokenize_request(ids, model, skip_special_tokens)
        return (await self._unary(self.raw.Detokenize, request, timeout_s)).text

    async def models(self, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
        """Models that can be asked for, in order of their names."""
        return convert.models(await self._unary(self.raw.ListModels, pb.ListModelsRequest(), timeout_s))

    async def model(self, name: str = "", *, timeout_s: float | None = None) -> ModelInfo:
        """One model; without a name the only one. Raises ModelNotFound."""
        return convert.model_info(
            (await self._unary(self.raw.GetModel, pb.GetModelRequest(model=name), timeout_s)).model
        )

    async def status(self, *, timeout_s: float | None = None) -> Status:
        """Schedulers, workers, rows, blocks, queues and cache hits behind this gateway."""
        return convert.status(await self._unary(self.raw.GetStatus, pb.GetStatusRequest(), timeout_s))

    async def abort(self, *request_ids: str, timeout_s: float | None = None) -> AbortResult:
        """End requests by id; their streams finish with ABORTED."""
        request = pb.AbortRequest(request_ids=request_ids)
        return convert.abort_result(await self._unary(self.raw.Abort, request, timeout_s))

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether the gateway takes requests now. Raises ConnectionFailed when nobody answers."""
        try:
            return health_state(await self._unary(self._health, health_request(service), timeout_s)) == "serving"
        except ModelNotFound:
            return False  # NOT_FOUND: a health name that this server does not have

    async def _unary(self, call: Callable[..., Awaitable[T]], request: Any, timeout_s: float | None) -> T:
        deadline = Deadline(self._unary_timeout_s if timeout_s is None else timeout_s)
        return await self._retrying(
            lambda: call(request, timeout=deadline.remaining_s(), metadata=self._metadata), self._retry, deadline
        )

    async def _wait_until_reachable(self, connect_timeout_s: float) -> None:
        deadline = Deadline(connect_timeout_s)

        async def probe() -> None:
            try:
                with _typed_errors():
                    await self._health(health_request(""), timeout=deadline.remaining_s(), metadata=self._metadata)
            except Unimplemented:
                pass  # a server without health checks is reachable all the same

        await self._retrying(probe, CONNECT_RETRY, deadline)

    async def _retrying(self, attempt: Callable[[], Awaitable[T]], policy: RetryPolicy, deadline: Deadline) -> T:
        num_attempts = 0
        while True:
            try:
                with _typed_errors():
                    return await attempt()
            except QuireError as quire_error:
                error = quire_error
            num_attempts += 1
            delay_s = policy.delay_s(error, num_attempts, deadline.remaining_s(), self._rng)
            if delay_s is None:
                raise error
            await asyncio.sleep(delay_s)


@contextlib.contextmanager
def _typed_errors(request_id: str = "") -> Iterator[None]:
    """Turn what a grpc.aio call raises into QuireErrors."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error, request_id) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # grpc.aio raises CancelledError for a cancelled call as well; then this task is to go on.
        raise Cancelled("the call was cancelled", request_id=request_id) from None


class AsyncGenerateStream:
    """The output of one request as it comes: a context manager (leaving it cancels the request) and an iterator.

    Entering it waits until the server has accepted the request: from then on `request_id`, `seed`, `model` and
    `num_prompt_tokens` are known, and nothing is tried again.
    """

    def __init__(self, client: AsyncClient, request: pb.GenerateRequest, timeout_s: float | None) -> None:
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._assembler = StreamAssembler(request)
        self._call: Call | None = None
        self._result: GenerateResult | None = None

    async def __aenter__(self) -> Self:
        deadline = Deadline(self._timeout_s)
        await self._client._retrying(lambda: self._open(deadline), self._client._retry, deadline)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while self._result is None:
            delta = await self._advance()
            if delta is not None:
                return delta
        raise StopAsyncIteration

    @property
    def request_id(self) -> str:
        return self._accepted.request_id

    @property
    def seed(self) -> int:
        """The seed in force; the server draws one when the request has none."""
        return self._accepted.seed

    @property
    def model(self) -> str:
        return self._accepted.model

    @property
    def num_prompt_tokens(self) -> int:
        return self._accepted.prompt_tokens

    @property
    def finished_samples(self) -> tuple[Sample, ...]:
        """Samples that are complete already."""
        return self._assembler.finished_samples

    async def result(self) -> GenerateResult:
        """The whole request; reads what is left of the stream first."""
        while self._result is None:
            await self._advance()
        return self._result

    def cancel(self) -> None:
        """End the request on the server and free its blocks. No harm after the end."""
        if self._call is not None:
            self._call.cancel()

    @property
    def _accepted(self) -> pb.Accepted:
        if self._assembler.accepted is None:
            raise RuntimeError(NOT_OPEN)
        return self._assembler.accepted

    async def _open(self, deadline: Deadline) -> None:
        client = self._client
        self._call = client.raw.Generate(self._request, timeout=deadline.remaining_s(), metadata=client._metadata)
        try:
            first = await self._read(self._call)
        except BaseException:
            self._call.cancel()
            raise
        self._take(first)

    async def _advance(self) -> Delta | None:
        if self._call is None:
            raise RuntimeError(NOT_OPEN)
        with _typed_errors(self._assembler.request_id):
            event = await self._read(self._call)
        return self._take(event)

    async def _read(self, call: Call) -> pb.GenerateResponse | None:
        event = await call.read()
        return event if isinstance(event, pb.GenerateResponse) else None

    def _take(self, event: pb.GenerateResponse | None) -> Delta | None:
        try:
            if event is not None:
                return self._assembler.feed(event)
            self._result = self._assembler.result()
            return None
        except QuireError:
            self.cancel()
            raise
