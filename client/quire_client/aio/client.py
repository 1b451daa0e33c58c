"""The asyncio client."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio
from quire.v1 import inference_pb2 as pb
from quire.v1 import rollouts_pb2, session_pb2

from quire_client import convert
from quire_client.aio.session import AsyncSession
from quire_client.aio.stream import AsyncCalls, AsyncGenerateStream
from quire_client.aio.transport import Gateway, channel_openers
from quire_client.aio.turn_log import AsyncTurnLog
from quire_client.connection.channel import Metadata, Tls, call_metadata, extra_metadata, health_request, health_state
from quire_client.errors import ModelNotFound, QuireError
from quire_client.inputs import Question
from quire_client.replay import Entry
from quire_client.requests import generate as requests
from quire_client.requests.chat import ChatOptions, Messages
from quire_client.requests.generate import EmbedInput, EmbedOptions, GenerateOptions, ScoreOptions
from quire_client.retry import ResumePolicy, RetryPolicy, abort_timeout_s, policy_of_call
from quire_client.structured import schema_of, with_parsed
from quire_client.types import (
    AbortResult,
    AdapterStatus,
    DecideResult,
    EmbedResult,
    GenerateResult,
    ModelInfo,
    PausedSample,
    Route,
    ScoreResult,
    SessionInfo,
    Status,
    TensorChecksum,
    TokenizeResult,
    WeightsStatus,
    WeightVersion,
)

if TYPE_CHECKING:
    from quire.v1.inference_pb2_grpc import InferenceServiceAsyncStub

T = TypeVar("T")
PIECE_BYTES = 1 << 19  # part of a file of tensors, in one message
UPDATE_TIMEOUT_S = 3600.0  # deadline of calls that load weights, or wait for requests to end
INSPECT_TIMEOUT_S = 60.0  # besides the duration of a profile


def _put_tensors(gateway: Gateway) -> Callable[..., Any]:
    """The call whose request is a list of messages: a retry sends all of them again."""
    call: Any = gateway.rollouts.PutTensors
    return lambda messages, **options: call(iter(messages), **options)


class AsyncClient:
    """A client of Quire gateways for asyncio. It belongs to one event loop; close it or use it as a context manager.

    async with await AsyncClient.connect("localhost:50051") as client:
        result = await client.chat("What does os.path.join do?")
        print(result.text)

    `target`: "host:port"; for several gateways "a:1,b:2" or a list. Default: $QUIRE_TARGET, else localhost:50051. The
    first call opens the connections; `connect` also waits until a gateway answers. Instead of an address, `target` can
    be a `grpc.aio.Channel`, e.g. with interceptors, or a list of channels, one per gateway. For tests,
    `quire_client.testing` has a gateway that needs no model.
    `tls`: a Tls, True for its defaults, False for plaintext; default: the QUIRE_TLS* variables, else plaintext.
    `credentials`: gRPC channel credentials, used instead of `tls`.
    `timeout_s` limits a whole generation, `unary_timeout_s` every other call.

    A broken stream is resumed, on another gateway if there are several. No output is lost, repeated or changed, and
    the caller sees only a pause. `resume=False` disables this; `resume_timeout_s` limits the attempts after a break.
    If a gateway sends nothing for `stall_timeout_s`, the client checks its health. If the gateway does not answer, the
    stream moves to another gateway. None disables the check: then only the connection's keepalive detects a dead
    gateway.
    The logger "quire" logs breaks and retries.
    """

    def __init__(
        self,
        target: str | grpc.aio.Channel | Sequence[str] | Sequence[grpc.aio.Channel] | None = None,
        *,
        tls: Tls | bool | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        timeout_s: float | None = 600.0,
        unary_timeout_s: float | None = 30.0,
        retry: RetryPolicy | None = None,
        resume: bool = True,
        resume_timeout_s: float = 60.0,
        stall_timeout_s: float | None = 3.0,
    ) -> None:
        openers, explain = channel_openers(target, tls, credentials)
        self._calls = AsyncCalls(openers, call_metadata(api_key), retry or RetryPolicy(), explain)
        self._timeout_s = timeout_s
        self._unary_timeout_s = unary_timeout_s
        self._resume = ResumePolicy(resume, resume_timeout_s, stall_timeout_s)
        self._defaults: dict[str, Any] = {}  # options of every call
        self._turn_log: AsyncTurnLog | None = None

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
        """Create a client and wait until a gateway answers. It takes the parameters of the class.

        Raises ConnectionFailed when no gateway answers within `connect_timeout_s`.
        """
        client = cls(
            target,
            tls=tls,
            credentials=credentials,
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
        except BaseException:
            await client.close()
            raise
        return client

    def with_options(self, *, unary_timeout_s: float | None = None, **options: Unpack[GenerateOptions]) -> Self:
        """A client with the same connections but other defaults. The options of a call override the defaults.

        fast = client.with_options(model="small", temperature=0, timeout_s=10, metadata={"x-team": "search"})
        """
        requests.check_options(options)
        clone = copy.copy(self)
        clone._defaults = {**self._defaults, **options}
        clone._unary_timeout_s = self._unary_timeout_s if unary_timeout_s is None else unary_timeout_s
        return clone

    def recorded(self, path: str | PathLike[str]) -> Self:
        """A client with the same connections that appends a line per complete answer to a replay log (docs/replay.md).

        agent = client.recorded("run.jsonl")
        """
        clone = copy.copy(self)
        clone._turn_log = AsyncTurnLog(self.unary, path)
        return clone

    async def replay(self, request: pb.GenerateRequest) -> Entry:
        """Compute the request of a recorded turn again: the entry of the new answer. See `quire_client.replay`."""
        async with AsyncGenerateStream(self._calls, request, self._timeout_s, self._resume, self._metadata) as stream:
            await stream.result()
            return await AsyncTurnLog(self.unary, "").entry_of(stream.assembler)

    @property
    def raw(self) -> InferenceServiceAsyncStub:
        """The generated stub of the first gateway, for calls that the SDK does not wrap."""
        return self._calls.gateways.raw

    async def close(self) -> None:
        """Close the channels. Open calls and later calls raise Cancelled."""
        await self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: str | Iterable[int] | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        messages: Messages | None = None,
        response_model: type | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """Generate and wait for the whole result. Give exactly one of `prompt`, `token_ids` and `messages`.

        `prompt` is a text, or a list of token ids. `response_model`: a dataclass or pydantic model; the output is JSON
        of its schema, and `result.parsed` is the object. Raises UnexpectedOutput if max_tokens ends the JSON early.
        """
        if response_model is not None:
            options["json_schema"] = schema_of(response_model)
        async with self.stream(prompt, token_ids=token_ids, messages=messages, **options) as stream:
            result = await stream.result()
        return result if response_model is None else with_parsed(result, response_model)

    def stream(
        self,
        prompt: str | Iterable[int] | None = None,
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
        given = {**self._defaults, **cast(dict[str, Any], options)}
        timeout_s = given.pop("timeout_s", self._timeout_s)
        metadata = extra_metadata(given.pop("metadata", None))
        policy = policy_of_call(self._resume, given)
        request = requests.generate_request(prompt, token_ids, messages, given)
        return AsyncGenerateStream(self._calls, request, timeout_s, policy, metadata, self._turn_log)

    def resume(
        self,
        request_id: str,
        *,
        after: int | Mapping[int, int] = 0,
        timeout_s: float | None = None,
        resume_timeout_s: float | None = None,
    ) -> AsyncGenerateStream:
        """Continue the request with this id, which was sent with `resumable=True`. Any gateway can continue it.

        `after`: number of output tokens that you have; for several samples, a mapping from sample index to number. The
        stream and its result have only the later output. An earlier stream of the request ends with ABORTED.
        Raises RequestNotFound if there is no record of the request.
        """
        given: dict[str, Any] = {} if resume_timeout_s is None else {"resume_timeout_s": resume_timeout_s}
        request = requests.resume_request(request_id, after)
        timeout_s = self._defaults.get("timeout_s", self._timeout_s) if timeout_s is None else timeout_s
        policy = policy_of_call(self._resume, given)
        return AsyncGenerateStream(self._calls, request, timeout_s, policy, self._metadata)

    def session(self, session_id: str = "", /, **options: Unpack[GenerateOptions]) -> AsyncSession:
        """A conversation whose state the server keeps; with an id, the one with this state. See AsyncSession."""
        requests.check_options(options)
        return AsyncSession(self, session_id, options)

    async def list_sessions(self, *, timeout_s: float | None = None) -> tuple[SessionInfo, ...]:
        """Your sessions, the newest first. Only their ids and ends are set; `session(id).info()` has the rest."""
        request = session_pb2.ListSessionsRequest()
        response = await self.unary(lambda gateway: gateway.sessions.ListSessions, request, timeout_s)
        return tuple(convert.result(SessionInfo, session) for session in response.sessions)

    async def chat(
        self, messages: Messages, *, response_model: type | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerateResult:
        """Answer a conversation: a str (one user message), or messages as dicts, (role, content) pairs or Message."""
        return await self.generate(messages=messages, response_model=response_model, **options)

    def stream_chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> AsyncGenerateStream:
        """Answer a conversation and receive the output as it is produced."""
        return self.stream(messages=messages, **options)

    async def embed(
        self,
        inputs: str | Sequence[EmbedInput],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> EmbedResult:
        """Embeddings of one text, or of a list of texts, token ids and conversations."""
        request = requests.embed_request(inputs, model or self._model, options)
        response = await self.unary(lambda gateway: gateway.stub.Embed, request, timeout_s)
        return convert.embed_result(response)

    async def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """How well each document matches the query."""
        request = requests.score_request(query, documents, model or self._model, options)
        response = await self.unary(lambda gateway: gateway.stub.Score, request, timeout_s)
        return convert.result(ScoreResult, response)

    async def decide(
        self, messages: Messages, questions: Sequence[str | Question], **options: Unpack[GenerateOptions]
    ) -> DecideResult:
        """The probabilities of the answers to questions about a conversation. A str asks whether it is true."""
        given: dict[str, Any] = {"model": self._model, "metadata": self._defaults.get("metadata"), **options}
        timeout_s = given.pop("timeout_s", self._unary_timeout_s)
        metadata = extra_metadata(given.pop("metadata"))
        request = requests.decide_request(requests.generate_request(None, None, messages, given), questions)
        response = await self._calls.unary(lambda gateway: gateway.stub.Decide, request, timeout_s, metadata)
        return convert.result(DecideResult, response)

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
        request = requests.tokenize_request(prompt, messages, model or self._model, add_special_tokens, chat_options)
        response = await self.unary(lambda gateway: gateway.stub.Tokenize, request, timeout_s)
        return convert.result(TokenizeResult, response, token_ids=tuple(response.ids))

    async def count_tokens(
        self,
        prompt: str | Iterable[int] | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[GenerateOptions],
    ) -> int:
        """The number of prompt tokens that `generate` would have with these arguments, images included."""
        given = {**self._defaults, **cast(dict[str, Any], options)}
        timeout_s = given.pop("timeout_s", self._unary_timeout_s)
        metadata = extra_metadata(given.pop("metadata", None))
        policy_of_call(self._resume, given)
        request = pb.CountTokensRequest(request=requests.generate_request(prompt, token_ids, messages, given))
        response = await self._calls.unary(lambda gateway: gateway.stub.CountTokens, request, timeout_s, metadata)
        return response.prompt_tokens

    async def detokenize(
        self, ids: Iterable[int], *, model: str = "", skip_special_tokens: bool = False, timeout_s: float | None = None
    ) -> str:
        """Text of token ids; incomplete characters become U+FFFD."""
        request = requests.detokenize_request(ids, model or self._model, skip_special_tokens)
        response = await self.unary(lambda gateway: gateway.stub.Detokenize, request, timeout_s)
        return response.text

    async def models(self, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
        """The served models, sorted by name."""
        response = await self.unary(lambda gateway: gateway.stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return convert.models(response)

    async def model(self, name: str = "", *, timeout_s: float | None = None) -> ModelInfo:
        """One model; without a name, the only served model. Raises ModelNotFound."""
        request = pb.GetModelRequest(model=name or self._model)
        response = await self.unary(lambda gateway: gateway.stub.GetModel, request, timeout_s)
        return convert.model_info(response.model)

    async def status(self, *, timeout_s: float | None = None) -> Status:
        """Schedulers, workers, rows, blocks, queues and cache hits behind this gateway, or a summary (`is_summary`)."""
        response = await self.unary(lambda gateway: gateway.stub.GetStatus, pb.GetStatusRequest(), timeout_s)
        return convert.status(response)

    async def drain_worker(self, worker_id: str, *, model: str = "", timeout_s: float | None = None) -> int:
        """Drain a worker: its sequences move to other workers, then it exits. Returns the number of moved sequences.

        `timeout_s` limits the drain; default: the worker's --drain-timeout-s.
        """
        request = pb.DrainWorkerRequest(worker_id=worker_id, model=model, timeout_s=timeout_s or 0.0)
        response = await self.unary(lambda gateway: gateway.admin.DrainWorker, request, None)
        return response.num_moved

    async def load_adapter(self, name: str, path: str, *, model: str = "") -> AdapterStatus:
        """Load a LoRA adapter on all workers of a model. `path`: its folder, below the workers' --adapter-dir."""
        request = pb.LoadAdapterRequest(name=name, path=path, model=model)
        response = await self.unary(lambda gateway: gateway.admin.LoadAdapter, request, None)
        return convert.result(AdapterStatus, response.adapter)

    async def unload_adapter(self, name: str, *, model: str = "") -> None:
        """Unload an adapter. Refused while requests use it."""
        request = pb.UnloadAdapterRequest(name=name, model=model)
        await self.unary(lambda gateway: gateway.admin.UnloadAdapter, request, None)

    async def adapters(self, *, model: str = "") -> tuple[AdapterStatus, ...]:
        """The adapters of one model, or of all models."""
        request = pb.ListAdaptersRequest(model=model)
        response = await self.unary(lambda gateway: gateway.admin.ListAdapters, request, None)
        return tuple(convert.result(AdapterStatus, adapter) for adapter in response.adapters)

    async def set_route(self, name: str, targets: Mapping[str, int], *, shadow: str = "") -> None:
        """Make a name stand for models or adapters, each with its weight (docs/upgrade.md). Without targets: remove its
        route. `shadow`: gets copies.
        """
        request = pb.SetRouteRequest(route=pb.Route(name=name, targets=targets, shadow=shadow))
        await self.unary(lambda gateway: gateway.admin.SetRoute, request, None)

    async def routes(self) -> tuple[Route, ...]:
        """All routes."""
        response = await self.unary(lambda gateway: gateway.admin.ListRoutes, pb.ListRoutesRequest(), None)
        return tuple(convert.result(Route, route, targets=dict(route.targets)) for route in response.routes)

    # -- weights and pauses; see docs/rollouts.md ---------------------------------------------------------------------

    async def update_weights(
        self, paths: Sequence[str], *, version: int = 0, running_rows: str = "recompute", digest: str = ""
    ) -> WeightVersion:
        """Update the weights of all workers from safetensors files below their --weights-dir: `begin_update`,
        `put_tensors` for each file, `commit_update`. After a failure, the update is aborted.
        """
        update_id = secrets.token_hex(16)
        await self.begin_update(update_id, version=version)
        try:
            for path in paths:
                await self.put_tensors(update_id, path)
            return await self.commit_update(update_id, running_rows=running_rows, digest=digest)
        except QuireError:
            await self.abort_update(update_id)
            raise

    async def begin_update(self, update_id: str, *, version: int = 0, model: str = "") -> int:
        """Begin an update of the weights. Returns its version; 0 asks for the next one."""
        request = rollouts_pb2.BeginUpdateRequest(update_id=update_id, version=version, model=model)
        response = await self.unary(lambda gateway: gateway.rollouts.BeginUpdate, request, None)
        return response.version

    async def put_tensors(
        self, update_id: str, path: str = "", *, data: bytes = b"", model: str = ""
    ) -> tuple[TensorChecksum, ...]:
        """Add a safetensors file to an update: one below the workers' --weights-dir, or its bytes."""
        first = rollouts_pb2.PutTensorsRequest(update_id=update_id, path=path, model=model)
        pieces = (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
        messages = [first, *(rollouts_pb2.PutTensorsRequest(data=piece) for piece in pieces)]
        response = await self.unary(_put_tensors, messages, UPDATE_TIMEOUT_S)
        return tuple(convert.result(TensorChecksum, tensor) for tensor in response.tensors)

    async def commit_update(
        self, update_id: str, *, running_rows: str = "recompute", digest: str = "", model: str = ""
    ) -> WeightVersion:
        """Compute with the new weights. `running_rows`: recompute, keep or retire. `digest`: of all tensors."""
        request = rollouts_pb2.CommitUpdateRequest(
            update_id=update_id,
            model=model,
            digest=digest,
            running_rows=rollouts_pb2.RunningRows.Value(f"RUNNING_ROWS_{running_rows.upper()}"),
        )
        response = await self.unary(lambda gateway: gateway.rollouts.CommitUpdate, request, UPDATE_TIMEOUT_S)
        return convert.result(WeightVersion, response.weights)

    async def abort_update(self, update_id: str, *, model: str = "") -> None:
        """End an update without a change."""
        request = rollouts_pb2.AbortUpdateRequest(update_id=update_id, model=model)
        await self.unary(lambda gateway: gateway.rollouts.AbortUpdate, request, None)

    async def weights(self, *, model: str = "") -> WeightsStatus:
        """The weights in use, the open update, pauses and what sleeps."""
        request = rollouts_pb2.GetWeightsRequest(model=model)
        response = await self.unary(lambda gateway: gateway.rollouts.GetWeights, request, None)
        return convert.result(WeightsStatus, response)

    async def pause(self, pause_id: str, *, mode: str = "keep", model: str = "") -> tuple[PausedSample, ...]:
        """Compute no steps until `unpause`. `mode`: keep, retract, abort or finish."""
        chosen = rollouts_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.upper()}")
        request = rollouts_pb2.PauseRequest(pause_id=pause_id, mode=chosen, model=model)
        response = await self.unary(lambda gateway: gateway.rollouts.Pause, request, UPDATE_TIMEOUT_S)
        return tuple(convert.result(PausedSample, sample) for sample in response.samples)

    async def unpause(self, pause_id: str = "", *, model: str = "") -> tuple[str, ...]:
        """End a pause, or all. Returns the pauses that go on."""
        request = rollouts_pb2.UnpauseRequest(pause_id=pause_id, model=model)
        return tuple((await self.unary(lambda gateway: gateway.rollouts.Unpause, request, None)).pause_ids)

    async def sleep_workers(self, *tags: str, model: str = "") -> None:
        """Free memory of all workers until `wake_workers`. `tags`: weights, kv_cache; none: both."""
        request = rollouts_pb2.SleepRequest(tags=tags, model=model)
        await self.unary(lambda gateway: gateway.rollouts.Sleep, request, UPDATE_TIMEOUT_S)

    async def wake_workers(self, *tags: str, model: str = "") -> None:
        """Get memory of workers back."""
        request = rollouts_pb2.WakeRequest(tags=tags, model=model)
        await self.unary(lambda gateway: gateway.rollouts.Wake, request, UPDATE_TIMEOUT_S)

    async def reset_prefix_cache(self, *, model: str = "") -> None:
        """Forget all cached prefixes."""
        request = rollouts_pb2.ResetPrefixCacheRequest(model=model)
        await self.unary(lambda gateway: gateway.rollouts.ResetPrefixCache, request, None)

    async def profile(self, service: str = "gateway", *, seconds: float = 10.0, hz: int = 200) -> bytes:
        """Where the threads of a service spend their time: a trace in Chrome's JSON format, compressed with gzip.

        `service`: "gateway"; "scheduler" or "worker" if there is one; the address of a scheduler; the id of a worker.
        """
        kind = pb.INSPECT_KIND_PROFILE
        return await self._inspect(pb.InspectRequest(kind=kind, service=service, seconds=seconds, hz=hz), seconds)

    async def report(self, service: str = "gateway") -> dict[str, Any]:
        """Versions, settings without secrets, metrics and the last log lines of a service (named as in `profile`)."""
        data = await self._inspect(pb.InspectRequest(kind=pb.INSPECT_KIND_REPORT, service=service), 0.0)
        return dict(json.loads(data))

    async def _inspect(self, request: pb.InspectRequest, seconds: float) -> bytes:
        timeout_s = INSPECT_TIMEOUT_S + 2 * seconds  # the services in between have shorter limits
        response = await self.unary(lambda gateway: gateway.admin.Inspect, request, timeout_s)
        return response.data

    async def abort(self, *request_ids: str, timeout_s: float | None = None) -> AbortResult:
        """Abort requests by id; their streams finish with ABORTED. Calls every gateway: each knows its own streams."""
        request = pb.AbortRequest(request_ids=request_ids)
        if len(self._calls.gateways) == 1:
            response = await self.unary(lambda gateway: gateway.stub.Abort, request, timeout_s)
            return convert.abort_result([response], request)
        timeout_s = abort_timeout_s(self._unary_timeout_s if timeout_s is None else timeout_s)
        responses, errors = await self._calls.gateways.abort_on_all(request, timeout_s)
        if not responses:
            raise errors[0]
        return convert.abort_result(responses, request)

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether a gateway accepts requests now. Raises ConnectionFailed when none answers."""
        try:
            response = await self.unary(lambda gateway: gateway.health, health_request(service), timeout_s)
            return health_state(response) == "serving"
        except ModelNotFound:
            return False  # the server has no health entry of this name

    async def unary(
        self, method: Callable[[Gateway], Callable[..., Awaitable[T]]], request: Any, timeout_s: float | None = None
    ) -> T:
        """Any unary call on one of the gateways, with retries."""
        timeout_s = self._unary_timeout_s if timeout_s is None else timeout_s
        return await self._calls.unary(method, request, timeout_s, self._metadata)

    @property
    def _model(self) -> str:
        return str(self._defaults.get("model", ""))

    @property
    def _metadata(self) -> Metadata:
        return extra_metadata(self._defaults.get("metadata"))
