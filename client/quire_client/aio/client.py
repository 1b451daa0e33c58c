"""The asyncio client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio
from quire.v1 import inference_pb2 as pb

from quire_client import convert, requests
from quire_client.aio.calls import AsyncCalls
from quire_client.aio.stream import AsyncGenerateStream
from quire_client.aio.transport import Gateway, in_thread, open_channel
from quire_client.channel import call_metadata, health_request, health_state, resolve_targets
from quire_client.chat_requests import ChatOptions, Messages
from quire_client.diagnosis import cannot_connect
from quire_client.errors import ConnectionFailed, DeadlineExceeded, ModelNotFound
from quire_client.requests import GenerateOptions
from quire_client.resume import ResumePolicy, policy_of_call
from quire_client.retry import RetryPolicy, abort_timeout_s
from quire_client.tls import Tls, channel_security
from quire_client.types import AbortResult, GenerateResult, ModelInfo, Status, TokenizeResult

T = TypeVar("T")


class AsyncClient:
    """A client of Quire gateways for asyncio. It belongs to one event loop; close it or use it as a context manager.

    async with await AsyncClient.connect("localhost:50051") as client:
        result = await client.chat("What does os.path.join do?")
        print(result.text)

    `channel`: any `grpc.aio.Channel`, e.g. with interceptors, or a list of channels, one per gateway.
    `quire_client.testing` has a gateway without a model for your tests.
    `timeout_s` limits a whole generation, `unary_timeout_s` every other call.

    A stream that breaks is resumed, on another gateway if there are several: no output is lost, repeated or changed,
    and the caller sees only a pause. `resume=False` disables this; `resume_timeout_s` limits the attempts after a
    break. A gateway that sends nothing for `stall_timeout_s` gets a health check; if it does not answer, the stream
    moves to another gateway. None disables the check: then only the connection's keepalive detects a dead gateway.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel | Sequence[grpc.aio.Channel],
        *,
        api_key: str | None = None,
        timeout_s: float | None = 600.0,
        unary_timeout_s: float | None = 30.0,
        retry: RetryPolicy | None = None,
        resume: bool = True,
        resume_timeout_s: float = 60.0,
        stall_timeout_s: float | None = 3.0,
    ) -> None:
        channels = list(channel) if isinstance(channel, Sequence) else [channel]
        self._calls = AsyncCalls(channels, call_metadata(api_key), retry or RetryPolicy())
        self.raw = self._calls.gateways.raw  # the generated stub of the first gateway, for calls the SDK does not wrap
        self._timeout_s = timeout_s
        self._unary_timeout_s = unary_timeout_s
        self._resume = ResumePolicy(resume, resume_timeout_s, stall_timeout_s)

    @classmethod
    async def connect(
        cls,
        target: str | Sequence[str] | None = None,
        *,
        tls: Tls | bool | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        connect_timeout_s: float = 5.0,
        api_key: str | None = None,
        timeout_s: float | None = 600.0,
        unary_timeout_s: float | None = 30.0,
        retry: RetryPolicy | None = None,
        resume: bool = True,
        resume_timeout_s: float = 60.0,
        stall_timeout_s: float | None = 3.0,
    ) -> Self:
        """Open channels to the gateways and wait until one of them answers.

        `target`: "host:port"; for several gateways "a:1,b:2" or a list. Default: $QUIRE_TARGET, else localhost:50051.
        `tls`: a Tls, True for its defaults, False for plaintext; default: the QUIRE_TLS* variables, else plaintext.
        `credentials`: gRPC channel credentials, used instead of `tls`. Raises ConnectionFailed when no gateway answers
        within `connect_timeout_s`.
        """
        targets = resolve_targets(target)
        credentials, options = channel_security(tls, credentials)
        client = cls(
            [open_channel(target, credentials, options) for target in targets],
            api_key=api_key,
            timeout_s=timeout_s,
            unary_timeout_s=unary_timeout_s,
            retry=retry,
            resume=resume,
            resume_timeout_s=resume_timeout_s,
            stall_timeout_s=stall_timeout_s,
        )
        try:
            await client._calls.wait_until_reachable(connect_timeout_s)
        except (ConnectionFailed, DeadlineExceeded) as error:
            await client.close()
            explain = partial(cannot_connect, targets, error, is_tls=credentials is not None)
            raise await in_thread(explain) from None
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """Close the channels. Open calls and later calls raise Cancelled."""
        await self._calls.close()

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
        """Generate and wait for the whole result. Give exactly one of `prompt`, `token_ids` and `messages`."""
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
        """Generate and receive the output as it is produced.

        async with client.stream("Once") as stream:
            async for delta in stream:
                print(delta.text, end="")
        """
        given = cast(dict[str, Any], options)
        timeout_s = given.pop("timeout_s", self._timeout_s)
        policy = policy_of_call(self._resume, given)
        request = requests.generate_request(prompt, token_ids, messages, given)
        return AsyncGenerateStream(self._calls, request, timeout_s, policy)

    def resume(
        self,
        request_id: str,
        *,
        after: int | Mapping[int, int] = 0,
        timeout_s: float | None = None,
        resume_timeout_s: float | None = None,
    ) -> AsyncGenerateStream:
        """Continue a request that was sent with `resumable=True`, by its id alone; on any gateway.

        `after`: number of output tokens that you have; for several samples, a mapping from sample index to number. The
        stream and its result have the output after that. A stream of the request that is still open ends with ABORTED.
        Raises RequestNotFound if there is no record of the request.
        """
        given: dict[str, Any] = {} if resume_timeout_s is None else {"resume_timeout_s": resume_timeout_s}
        request = requests.resume_request(request_id, after)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return AsyncGenerateStream(self._calls, request, timeout_s, policy_of_call(self._resume, given))

    async def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """Answer a conversation: a str (one user message), or messages as dicts, (role, content) pairs or Message."""
        return await self.generate(messages=messages, **options)

    def stream_chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> AsyncGenerateStream:
        """Answer a conversation and receive the output as it is produced."""
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
        response = await self._unary(lambda gateway: gateway.stub.Tokenize, request, timeout_s)
        return convert.tokenize_result(response)

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
        response = await self._unary(lambda gateway: gateway.stub.Detokenize, request, timeout_s)
        return response.text

    async def models(self, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
        """The served models, sorted by name."""
        response = await self._unary(lambda gateway: gateway.stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return convert.models(response)

    async def model(self, name: str = "", *, timeout_s: float | None = None) -> ModelInfo:
        """One model; without a name, the only served model. Raises ModelNotFound."""
        request = pb.GetModelRequest(model=name)
        response = await self._unary(lambda gateway: gateway.stub.GetModel, request, timeout_s)
        return convert.model_info(response.model)

    async def status(self, *, timeout_s: float | None = None) -> Status:
        """Schedulers, workers, rows, blocks, queues and cache hits behind this gateway."""
        response = await self._unary(lambda gateway: gateway.stub.GetStatus, pb.GetStatusRequest(), timeout_s)
        return convert.status(response)

    async def drain_worker(self, worker_id: str, *, model: str = "", timeout_s: float | None = None) -> int:
        """Drain a worker: its sequences move to other workers, then it exits. Returns the number of moved sequences.

        `timeout_s` limits the drain; default: the worker's --drain-timeout-s.
        """
        request = pb.DrainWorkerRequest(worker_id=worker_id, model=model, timeout_s=timeout_s or 0.0)
        response = await self._unary(lambda gateway: gateway.admin.DrainWorker, request, None)
        return response.num_moved

    async def abort(self, *request_ids: str, timeout_s: float | None = None) -> AbortResult:
        """Abort requests by id; their streams finish with ABORTED. Calls every gateway: each knows its own streams."""
        request = pb.AbortRequest(request_ids=request_ids)
        if len(self._calls.gateways) == 1:
            response = await self._unary(lambda gateway: gateway.stub.Abort, request, timeout_s)
            return convert.abort_result([response], request)
        timeout_s = abort_timeout_s(self._unary_timeout_s if timeout_s is None else timeout_s)
        responses, errors = await self._calls.gateways.abort_on_all(request, timeout_s)
        if not responses:
            raise errors[0]
        return convert.abort_result(responses, request)

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether a gateway accepts requests now. Raises ConnectionFailed when none answers."""
        try:
            response = await self._unary(lambda gateway: gateway.health, health_request(service), timeout_s)
            return health_state(response) == "serving"
        except ModelNotFound:
            return False  # the server has no health entry of this name

    async def _unary(
        self, method: Callable[[Gateway], Callable[..., Awaitable[T]]], request: Any, timeout_s: float | None
    ) -> T:
        return await self._calls.unary(method, request, self._unary_timeout_s if timeout_s is None else timeout_s)
