"""The synchronous client. `aio.py` is its twin; what they share lives in modules without I/O."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack, cast

import grpc
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import AdminServiceStub, InferenceServiceStub

from quire_client import convert, requests
from quire_client.assembly import StreamAssembler
from quire_client.channel import (
    HEALTH_METHOD,
    call_metadata,
    channel_options,
    health_request,
    health_state,
    resolve_targets,
)
from quire_client.errors import (
    AlreadyExists,
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    ModelNotFound,
    QuireError,
    StreamEndedEarly,
    cannot_connect,
    client_closed,
    error_from_rpc,
    gateway_hangs,
    unanswered,
)
from quire_client.requests import ChatOptions, GenerateOptions, Messages
from quire_client.resume import ResumePolicy, Resumption, gave_up, policy_of_call
from quire_client.retry import (
    CONNECT_RETRY,
    PROBE_TIMEOUT_S,
    REDIAL_S,
    RETRY_TAKEN_S,
    Deadline,
    RetryPolicy,
    abort_timeout_s,
    probe_timeout_s,
)
from quire_client.targets import TargetRing
from quire_client.tls import Tls, channel_security
from quire_client.types import AbortResult, Delta, GenerateResult, ModelInfo, Sample, Status, TokenizeResult
from quire_client.watch import StallWatch

T = TypeVar("T")


class Call(Protocol):
    """What the SDK needs of an open grpc call."""

    def __next__(self) -> pb.GenerateResponse: ...
    def cancel(self) -> bool: ...


NOT_OPEN = "the stream is not open: use it as `with client.stream(...) as stream:`"


@dataclass(frozen=True, slots=True)
class _Gateway:
    """One gateway: its channel and what is called on it."""

    channel: grpc.Channel
    stub: InferenceServiceStub
    admin: AdminServiceStub
    health: grpc.UnaryUnaryMultiCallable[bytes, bytes]

    @classmethod
    def on(cls, channel: grpc.Channel) -> Self:
        return cls(
            channel, InferenceServiceStub(channel), AdminServiceStub(channel), channel.unary_unary(HEALTH_METHOD)
        )


class Client:
    """Speaks with Quire gateways. Safe to share between threads; close it, or use it as a context manager.

    with Client.connect("localhost:50051") as client:
        print(client.chat("What does os.path.join do?").text)

    `channel` is the transport: any `grpc.Channel`, e.g. yours with interceptors, or several, one per gateway.
    `quire_client.testing` has a gateway without a model for your tests.
    `timeout_s` limits a whole generation, `unary_timeout_s` every other call.

    A stream that breaks is resumed, on another gateway where there are several: nothing is lost, repeated or changed,
    and all one sees is a pause. `resume=False` switches that off; `resume_timeout_s` is how long it is tried after a
    break. A gateway that says nothing for `stall_timeout_s` is asked whether it lives, and left for another one when it
    does not; None leaves that to the connection's keepalive.
    """

    def __init__(
        self,
        channel: grpc.Channel | Sequence[grpc.Channel],
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
        self._gateways = [_Gateway.on(channel) for channel in channels]
        self._ring = TargetRing(len(channels))
        self.raw = self._gateways[0].stub  # the generated stub of the first gateway, for what the SDK does not wrap
        self._metadata = call_metadata(api_key)
        self._timeout_s = timeout_s
        self._unary_timeout_s = unary_timeout_s
        self._retry = retry or RetryPolicy()
        self._resume = ResumePolicy(resume, resume_timeout_s, stall_timeout_s)
        self._rng = random.Random()
        self._watch = StallWatch(self._ring, self._probe)
        self._is_closed = threading.Event()
        self._redials: dict[int, grpc.Future[bytes]] = {}

    @classmethod
    def connect(
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

        `target`: "host:port", several as "a:1,b:2" or a list; default $QUIRE_TARGET, else localhost:50051.
        `tls`: a Tls, True for its defaults, False for plaintext; default $QUIRE_TLS and its companions, else plaintext.
        `credentials`: gRPC's own, in place of `tls`. Raises ConnectionFailed when nobody answers in
        `connect_timeout_s`.
        """
        targets = resolve_targets(target)
        credentials, options = channel_security(tls, credentials)
        client = cls(
            [_open_channel(target, credentials, options) for target in targets],
            api_key=api_key,
            timeout_s=timeout_s,
            unary_timeout_s=unary_timeout_s,
            retry=retry,
            resume=resume,
            resume_timeout_s=resume_timeout_s,
            stall_timeout_s=stall_timeout_s,
        )
        try:
            client._wait_until_reachable(connect_timeout_s)
        except (ConnectionFailed, DeadlineExceeded) as error:
            client.close()
            raise cannot_connect(targets, error) from None
        except BaseException:
            client.close()
            raise
        return client

    def close(self) -> None:
        """Close the channels; open calls end with Cancelled, and so does every later one."""
        self._is_closed.set()
        self._watch.close()
        for gateway in self._gateways:
            gateway.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """Generate and wait for the end. Exactly one of `prompt`, `token_ids`, `messages`; see GenerateOptions."""
        with self.stream(prompt, token_ids=token_ids, messages=messages, **options) as stream:
            return stream.result()

    def stream(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateStream:
        """Generate and get the output as it comes.

        with client.stream("Once") as stream:
            for delta in stream:
                print(delta.text, end="")
        """
        given = cast(dict[str, Any], options)
        timeout_s = given.pop("timeout_s", self._timeout_s)
        policy = policy_of_call(self._resume, given)
        request = requests.generate_request(prompt, token_ids, messages, given)
        return GenerateStream(self, request, timeout_s, policy)

    def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """Answer a conversation: a str (one user message), or messages as dicts, (role, content) pairs or Message."""
        return self.generate(messages=messages, **options)

    def stream_chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> GenerateStream:
        """Answer a conversation and get the output as it comes."""
        return self.stream(messages=messages, **options)

    def tokenize(
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
        return convert.tokenize_result(self._unary(lambda gateway: gateway.stub.Tokenize, request, timeout_s))

    def detokenize(
        self,
        ids: Iterable[int],
        *,
        model: str = "",
        skip_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """Text of token ids; incomplete characters become U+FFFD."""
        request = requests.detokenize_request(ids, model, skip_special_tokens)
        return self._unary(lambda gateway: gateway.stub.Detokenize, request, timeout_s).text

    def models(self, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
        """Models that can be asked for, in order of their names."""
        return convert.models(self._unary(lambda gateway: gateway.stub.ListModels, pb.ListModelsRequest(), timeout_s))

    def model(self, name: str = "", *, timeout_s: float | None = None) -> ModelInfo:
        """One model; without a name the only one. Raises ModelNotFound."""
        return convert.model_info(
            self._unary(lambda gateway: gateway.stub.GetModel, pb.GetModelRequest(model=name), timeout_s).model
        )

    def status(self, *, timeout_s: float | None = None) -> Status:
        """Schedulers, workers, rows, blocks, queues and cache hits behind this gateway."""
        return convert.status(self._unary(lambda gateway: gateway.stub.GetStatus, pb.GetStatusRequest(), timeout_s))

    def drain_worker(self, worker_id: str, *, model: str = "", timeout_s: float | None = None) -> int:
        """Let a worker go: its sequences move to other workers, then it exits. Returns how many it ran.

        `timeout_s` is the time it may take; default: the worker's own.
        """
        request = pb.DrainWorkerRequest(worker_id=worker_id, model=model, timeout_s=timeout_s or 0.0)
        return self._unary(lambda gateway: gateway.admin.DrainWorker, request, None).num_moved

    def abort(self, *request_ids: str, timeout_s: float | None = None) -> AbortResult:
        """End requests by id; their streams finish with ABORTED. Every gateway is asked: each knows its own streams."""
        request = pb.AbortRequest(request_ids=request_ids)
        if len(self._gateways) == 1:
            return convert.abort_result([self._unary(lambda gateway: gateway.stub.Abort, request, timeout_s)], request)
        timeout_s = abort_timeout_s(self._unary_timeout_s if timeout_s is None else timeout_s)
        try:
            calls = [g.stub.Abort.future(request, timeout=timeout_s, metadata=self._metadata) for g in self._gateways]
        except ValueError:  # a closed channel
            raise client_closed() from None
        responses, errors = [], []
        for call in calls:
            try:
                responses.append(call.result())
            except grpc.RpcError as error:
                errors.append(error_from_rpc(error))
        if not responses:
            raise errors[0]
        return convert.abort_result(responses, request)

    def health(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether a gateway takes requests now. Raises ConnectionFailed when nobody answers."""
        try:
            response = self._unary(lambda gateway: gateway.health, health_request(service), timeout_s)
            return health_state(response) == "serving"
        except ModelNotFound:
            return False  # NOT_FOUND: a health name that this server does not have

    def _unary(self, method: Callable[[_Gateway], Callable[..., T]], request: Any, timeout_s: float | None) -> T:
        deadline = Deadline(self._unary_timeout_s if timeout_s is None else timeout_s)

        def attempt(target: int) -> T:
            call = method(self._gateways[target])
            try:
                return call(request, timeout=deadline.remaining_s(), metadata=self._metadata)
            except ValueError:  # a closed channel
                raise client_closed() from None

        return self._retrying(attempt, deadline)

    def _wait_until_reachable(self, connect_timeout_s: float) -> None:
        deadline = Deadline(connect_timeout_s)
        num_attempts = 0
        while True:
            answered, error = self._ask_health(
                range(len(self._gateways)), probe_timeout_s(deadline), is_first_enough=True
            )
            if answered or error is None:
                return
            num_attempts += 1
            delay_s = CONNECT_RETRY.delay_s(error, num_attempts, deadline.remaining_s(), self._rng)
            if delay_s is None:
                raise error
            for target in range(len(self._gateways)):
                self._redial(target)
            time.sleep(delay_s)

    def _probe(self, targets: Collection[int]) -> set[int]:
        """Which of these gateways live. Never raises."""
        return self._ask_health(targets, PROBE_TIMEOUT_S)[0]

    def _ask_health(
        self, targets: Collection[int], timeout_s: float | None, *, is_first_enough: bool = False
    ) -> tuple[set[int], QuireError | None]:
        """Who answers, all asked at once; and an error of one that did not. Any answer of a server will do."""
        answered: set[int] = set()
        errors: list[QuireError] = []
        num_open = len(targets)
        changed = threading.Condition()

        def note(target: int, call: grpc.Future[bytes]) -> None:
            nonlocal num_open
            error = _health_error(call)
            with changed:
                num_open -= 1
                if error is None:
                    answered.add(target)
                else:
                    errors.append(error)
                changed.notify()

        try:
            calls = [self._ask_one(target, timeout_s, note) for target in targets]
        except ValueError:  # a closed channel
            return set(), client_closed()
        with changed:
            changed.wait_for(lambda: num_open == 0 or (is_first_enough and len(answered) > 0))
            found = set(answered), errors[0] if errors else None
        for call in calls:
            call.cancel()
        return found

    def _ask_one(self, target: int, timeout_s: float | None, note: Callable[[int, Any], None]) -> grpc.Future[bytes]:
        call = self._gateways[target].health.future(health_request(""), timeout=timeout_s, metadata=self._metadata)
        call.add_done_callback(lambda done: note(target, done))
        return call

    def _leave(self, target: int) -> None:
        """Avoid a gateway that has failed, until it is back."""
        self._ring.failed(target, time.monotonic())
        self._redial(target)

    def _redial(self, target: int) -> None:
        """Notice at once when a gateway is there (again).

        The synchronous gRPC stack dials a lost server only while some call is open. Between two tries there is none,
        and a server that is back would stay unseen for ten seconds: so a health check waits for it.
        """
        waiting = self._redials.get(target)
        if self._is_closed.is_set() or (waiting is not None and not waiting.done()):
            return
        ask = self._gateways[target].health.future
        try:
            call = ask(health_request(""), timeout=REDIAL_S, metadata=self._metadata, wait_for_ready=True)
        except ValueError:  # closed meanwhile
            return
        self._redials[target] = call
        call.add_done_callback(lambda done: self._note_return(target, done))

    def _note_return(self, target: int, call: grpc.Future[bytes]) -> None:
        if not call.cancelled() and call.exception() is None and health_state(call.result()) == "serving":
            self._ring.works(target, time.monotonic())

    def _retrying(
        self,
        attempt: Callable[[int], T],
        deadline: Deadline,
        sleep: Callable[[float], object] = time.sleep,
    ) -> T:
        """Try on one gateway after the other: at once while some has not just failed, else as the policy says."""
        num_attempts = num_moves = 0
        while True:
            target = self._ring.next(time.monotonic())
            try:
                result = attempt(target)
                self._ring.works(target, time.monotonic())
                return result
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error)
            except QuireError as quire_error:
                error = quire_error
            now = time.monotonic()
            if isinstance(error, ConnectionFailed):
                self._leave(target)
                num_moves += 1
                if num_moves % len(self._ring) and self._ring.has_working(now):
                    continue
            num_attempts += 1
            delay_s = self._retry.delay_s(error, num_attempts, deadline.remaining_s(), self._rng)
            if delay_s is None:
                raise error
            sleep(delay_s)


def _open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, more: list[tuple[str, Any]]
) -> grpc.Channel:
    options = [*channel_options(target), *more]
    if credentials is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, credentials, options)


def _health_error(call: grpc.Future[bytes]) -> QuireError | None:
    """Why nobody answered a health check; None when somebody did, whatever the answer."""
    if call.cancelled():
        return Cancelled("the health check was cancelled")
    error = call.exception()
    if not isinstance(error, grpc.RpcError):
        return None
    return unanswered(error_from_rpc(error))


class GenerateStream:
    """The output of one request as it comes: a context manager (leaving it cancels the request) and an iterator.

    Entering it waits until the server has accepted the request: from then on `request_id`, `seed`, `model` and
    `num_prompt_tokens` are known. `resumes` counts how often the stream broke and went on.
    """

    def __init__(self, client: Client, request: pb.GenerateRequest, timeout_s: float | None, policy: ResumePolicy):
        self._client = client
        self._timeout_s = timeout_s
        self._deadline = Deadline(None)
        self._policy = policy
        self._assembler = StreamAssembler(request, can_resume=policy.is_on)
        self._resumption = Resumption(policy, client._rng)
        self._call: Call | None = None
        self._result: GenerateResult | None = None
        self._is_cancelled = threading.Event()
        self._was_sent = False
        self._is_lost = False
        self.target = 0  # the gateway in use, by its place in the list of targets
        self.waiting_since: float | None = None
        self.stall_timeout_s = policy.stall_timeout_s

    def __enter__(self) -> Self:
        self._deadline = Deadline(self._timeout_s)
        self._client._watch.add(self)
        try:
            self._client._retrying(self._open, self._deadline, self._is_cancelled.wait)
        except BaseException:
            self._client._watch.discard(self)
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client._watch.discard(self)
        self.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while self._result is None:
            delta = self._advance()
            if delta is not None:
                return delta
        raise StopIteration

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
    def resumes(self) -> int:
        """How often the stream broke and went on."""
        return self._assembler.num_resumes

    @property
    def finished_samples(self) -> tuple[Sample, ...]:
        """Samples that are complete already."""
        return self._assembler.finished_samples

    def result(self) -> GenerateResult:
        """The whole request; reads what is left of the stream first."""
        while self._result is None:
            self._advance()
        return self._result

    def cancel(self) -> None:
        """End the request on the server and free its blocks. From any thread; no harm after the end."""
        self._is_cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def lose(self) -> None:
        """Give up the present gateway, which hangs. Called by the client's watch."""
        self._is_lost = True
        if self._call is not None:
            self._call.cancel()

    @property
    def _accepted(self) -> pb.Accepted:
        if self._assembler.accepted is None:
            raise RuntimeError(NOT_OPEN)
        return self._assembler.accepted

    def _open(self, target: int) -> None:
        """Send the request, or what is left of it, and wait until it is accepted."""
        self._check_wanted()
        is_repeated, self._was_sent = self._was_sent, True
        request = self._assembler.next_request(is_repeated=is_repeated)
        self.target, self._is_lost = target, False
        client = self._client
        try:
            generate = client._gateways[target].stub.Generate
            self._call = generate(request, timeout=self._deadline.remaining_s(), metadata=client._metadata)
        except ValueError:  # a closed channel
            raise client_closed() from None
        if self._is_cancelled.is_set():
            self._call.cancel()
        try:
            self._feed(self._next_event(self._call))
        except AlreadyExists as error:
            error.retry_after_s = RETRY_TAKEN_S if is_repeated else None
            raise
        except BaseException:
            self._call.cancel()
            raise

    def _advance(self) -> Delta | None:
        if self._call is None:
            raise RuntimeError(NOT_OPEN)
        try:
            event = self._next_event(self._call)
        except QuireError as error:
            if not self._assembler.is_complete:
                self._go_on_after(error)
                return None
            event = None  # it broke after its last word
        if event is not None:
            return self._feed(event)
        self._result = self._assembler.result()
        return None

    def _go_on_after(self, error: QuireError) -> None:
        """Resume on the next gateway, and the next, until one accepts. Raises what cannot be resumed."""
        ring, resumption = self._client._ring, self._resumption
        resumption.broke(time.monotonic(), made_progress=self._assembler.made_progress)
        while True:
            now = time.monotonic()
            if isinstance(error, ConnectionFailed | StreamEndedEarly):
                self._client._leave(self.target)
            remaining_s = self._deadline.remaining_s()
            delay_s = resumption.delay_s(error, now, remaining_s, has_working=ring.has_working(now))
            if delay_s is None:
                raise gave_up(error, self._policy)
            self._is_cancelled.wait(delay_s)
            try:
                self._open(ring.next(time.monotonic()))
                break
            except QuireError as next_error:
                error = next_error
        resumption.accepted(time.monotonic())
        ring.works(self.target, time.monotonic())

    def _next_event(self, call: Call) -> pb.GenerateResponse | None:
        """The next event; None at the end of a complete stream. Raises StreamEndedEarly at any other end."""
        self.waiting_since = time.monotonic()
        try:
            event = next(call, None)
        except grpc.RpcError as error:
            if self._is_lost and not self._is_cancelled.is_set():
                raise gateway_hangs(self.stall_timeout_s, self._assembler.request_id) from None
            raise error_from_rpc(error, self._assembler.request_id) from None
        finally:
            self.waiting_since = None
        if event is None and not self._assembler.is_complete:
            raise self._assembler.ended_early()
        return event

    def _feed(self, event: pb.GenerateResponse | None) -> Delta | None:
        try:
            return None if event is None else self._assembler.feed(event)
        except QuireError:
            self.cancel()
            raise

    def _check_wanted(self) -> None:
        if self._client._is_closed.is_set():
            raise client_closed()
        if self._is_cancelled.is_set():
            raise Cancelled("the stream was cancelled", request_id=self._assembler.request_id)
