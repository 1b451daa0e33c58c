"""A gateway without a model, for tests of programs that use the SDK.

with FakeGateway({"What is 1 + 1?": "2"}) as gateway, Client.connect(gateway.target) as client:
    assert client.chat("What is 1 + 1?").text == "2"

It serves real gRPC on a free local port, so it works with both clients, the `quire` command and other languages. One
token is one character; its id is the code point. It applies n, max_tokens, min_tokens, stop and stop_token_ids, and
refuses the values that a gateway refuses. It accepts continuations, so streams can be resumed. An answer that is a
ToolCall, or a list of them, calls tools. Embeddings count letters, so that similar texts have similar ones. Subclass it
to simulate errors and broken streams.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2, status_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import (
    AdminServiceServicer,
    InferenceServiceServicer,
    add_AdminServiceServicer_to_server,
    add_InferenceServiceServicer_to_server,
)

from quire_client.assembly import load_digest
from quire_client.errors import DETAILS_KEY
from quire_client.types import ToolCall
from request_fields.checks import check_fields, values_set
from request_fields.fields import FieldError, stop_condition

MAX_MODEL_LEN = 4096
HEALTH_SERVING = b"\x08\x01"
EMBEDDING_SIZE = 16

Answer = str | ToolCall | Sequence[ToolCall]
Answers = Mapping[str, Answer] | Callable[[str], Answer]


class FakeGateway(InferenceServiceServicer, AdminServiceServicer):
    """Answers prompts from a table or a function; the prompt of a chat is its last message. Echoes unknown prompts.

    `requests` has the received GenerateRequests, in order.
    """

    def __init__(self, answers: Answers = {}, *, model: str = "fake") -> None:  # noqa: B006 - never modified
        self.requests: list[pb.GenerateRequest] = []
        self.aborted_ids: list[str] = []
        self.drained_ids: list[str] = []
        self.target = ""
        self._answers = answers
        self._model = model
        self._server: grpc.Server | None = None

    def __enter__(self) -> Self:
        server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        add_InferenceServiceServicer_to_server(self, server)
        add_AdminServiceServicer_to_server(self, server)
        health: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
            lambda request, context: HEALTH_SERVING
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": health}),)
        )
        self.target = f"localhost:{server.add_insecure_port('localhost:0')}"
        server.start()
        self._server = server
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._server is not None:
            self._server.stop(None).wait()

    def answer(self, prompt: str) -> Answer:
        """The answer to a prompt."""
        if callable(self._answers):
            return self._answers(prompt)
        return self._answers.get(prompt, prompt)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self._check(request, context)
        for event_seq, event in enumerate(self.events(request)):
            event.event_seq = event_seq
            yield event

    def Resume(self, request: pb.ResumeRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        """Answer the last request of this id again, after the given positions."""
        sent = [one for one in self.requests if one.resumable and one.request_id == request.request_id]
        if not sent:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no record of request {request.request_id!r}")
        again = pb.GenerateRequest()
        again.CopyFrom(sent[-1])
        answer = FakeAnswer.of(self.answer(prompt_text(again.prompt)), again.stop)
        for position in request.after:
            ids = [ord(char) for char in answer.tokens[: position.num_tokens]]
            again.continuation.samples.add(index=position.index, output_token_ids=ids)
        for event_seq, event in enumerate(self.events(again)):
            event.event_seq = event_seq
            yield event

    def _check(self, request: pb.GenerateRequest, context: Any) -> None:
        """Refuse what a gateway refuses: values outside their limits, and unknown models."""
        try:
            check_fields(request)
            stop_condition(values_set(request.stop) | {"max_tokens": _max_tokens(request, MAX_MODEL_LEN)})
        except FieldError as error:
            code = grpc.StatusCode.INVALID_ARGUMENT
            context.set_trailing_metadata(((DETAILS_KEY, bad_request(code, error)),))
            context.abort(code, str(error))
        if request.model not in ("", self._model):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.model!r}; there is {self._model!r}")

    def events(self, request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        """The events of an answer, without event_seq. A continuation gets only the output that its samples lack."""
        prompt = prompt_text(request.prompt)
        answer = FakeAnswer.of(self.answer(prompt), request.stop)
        yield pb.GenerateResponse(
            accepted=pb.Accepted(
                request_id=request.request_id or f"fake-{len(self.requests)}",
                seed=request.sampling.seed,
                model=self._model,
                prompt_tokens=len(prompt),
                n=max(1, request.sampling.n),
            )
        )
        have = {sample.index: sample for sample in request.continuation.samples}
        for index in range(max(1, request.sampling.n)):
            sample = have.get(index, types_pb2.SampleState())
            if not sample.finished:
                start = len(sample.output_token_ids)
                yield from sample_events(index, answer, num_prompt_tokens=len(prompt), start=start)

    def embedding(self, text: str) -> list[float]:
        """The embedding of a text: how often it has each letter, scaled to length 1."""
        counts = [0.0] * EMBEDDING_SIZE
        for char in text.lower():
            counts[ord(char) % EMBEDDING_SIZE] += 1.0
        length = math.hypot(*counts) or 1.0
        return [count / length for count in counts]

    def score(self, query: str, document: str) -> float:
        """How well a document matches a query."""
        return sum(a * b for a, b in zip(self.embedding(query), self.embedding(document), strict=True))

    def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        texts = [prompt_text(prompt) for prompt in request.inputs]
        size = request.dimensions or EMBEDDING_SIZE
        found = [pb.Embedding(values=self.embedding(text)[:size], prompt_tokens=len(text)) for text in texts]
        return pb.EmbedResponse(request_id=request.request_id, model=self._model, revision="fake", embeddings=found)

    def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        response = pb.ScoreResponse(request_id=request.request_id, model=self._model, revision="fake")
        for pair in request.pairs:
            response.scores.append(self.score(pair.query, pair.document))
            response.prompt_tokens.append(len(pair.query) + len(pair.document))
        return response

    def Decide(self, request: pb.DecideRequest, context: Any) -> pb.DecideResponse:
        """All answers are equally likely."""
        response = pb.DecideResponse(request_id=request.request.request_id, model=self._model)
        for question in request.questions:
            count = len(question.choices) or len(question.levels) or 2
            response.answers.add(logprobs=[-math.log(count)] * count, token_ids=range(count))
        return response

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        self.aborted_ids.extend(request.request_ids)
        return pb.AbortResponse(aborted_ids=request.request_ids)

    def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> pb.DrainWorkerResponse:
        if request.worker_id != "w0":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no worker {request.worker_id!r}; there is 'w0'")
        self.drained_ids.append(request.worker_id)
        return pb.DrainWorkerResponse(num_moved=2)

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(ids=map(ord, prompt_text(request.prompt)), max_model_len=MAX_MODEL_LEN)

    def CountTokens(self, request: pb.CountTokensRequest, context: Any) -> pb.CountTokensResponse:
        self._check(request.request, context)
        return pb.CountTokensResponse(prompt_tokens=len(prompt_text(request.request.prompt)))

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(map(chr, request.ids)))

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._proto_model()])

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        if request.model not in ("", self._model):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.model!r}; there is {self._model!r}")
        return pb.GetModelResponse(model=self._proto_model())

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        worker = pb.WorkerInfo(
            worker_id="w0", address="localhost:0", state=types_pb2.WORKER_STATE_READY, rows_total=8, blocks_free=64
        )
        scheduler = pb.SchedulerStatus(
            address="localhost:0", model=self._model, connected=True, prefix_index="memory", workers=[worker]
        )
        return pb.GetStatusResponse(schedulers=[scheduler])

    def _proto_model(self) -> pb.Model:
        info = types_pb2.ModelInfo(
            model=self._model, max_model_len=MAX_MODEL_LEN, vocab_size=0x110000, block_size=16, dtype="float32"
        )
        return pb.Model(info=info, ready_workers=1)


def prompt_text(prompt: pb.Prompt) -> str:
    """The text of a prompt; for a chat, its last message."""
    kind = prompt.WhichOneof("kind")
    if kind == "chat":
        return prompt.chat.messages[-1].content if prompt.chat.messages else ""
    return "".join(map(chr, prompt.tokens.ids)) if kind == "tokens" else prompt.text


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """The output of a sample: its tokens, its text and its end."""

    tokens: str  # one character per token; of tool calls, their arguments
    text: str
    reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_EOS
    matched: str | int | None = None
    calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, answer: Answer, stop: types_pb2.StopParams) -> Self:
        """An answer, ended by the first stop condition that applies. Tool calls are not ended by one."""
        if not isinstance(answer, str):
            calls = (answer,) if isinstance(answer, ToolCall) else tuple(answer)
            return cls("".join(call.arguments for call in calls), "", calls=calls)
        limit = stop.max_tokens if stop.HasField("max_tokens") else MAX_MODEL_LEN
        for end in range(1, min(limit, len(answer)) + 1):
            tokens = answer[:end]
            if end <= stop.min_tokens:
                continue
            if ord(tokens[-1]) in stop.stop_token_ids:
                return cls(tokens, tokens[:-1], types_pb2.FINISH_REASON_STOP, ord(tokens[-1]))
            found = next((text for text in stop.stop if tokens.endswith(text)), None)
            if found is not None:
                kept = tokens if stop.include_stop_in_output else tokens.removesuffix(found)
                return cls(tokens, kept, types_pb2.FINISH_REASON_STOP, found)
        if len(answer) >= limit:
            return cls(answer[:limit], answer[:limit], types_pb2.FINISH_REASON_LENGTH)
        return cls(answer, answer)


def call_parts(calls: Sequence[ToolCall]) -> list[pb.AnswerPart]:
    """A part per character of the arguments."""
    return [
        pb.AnswerPart(
            item=i,
            offset=offset,
            tool_call=pb.ToolCallPart(index=i, id=call.id or f"call-{i + 1}", name=call.name, arguments=char),
        )
        for i, call in enumerate(calls)
        for offset, char in enumerate(call.arguments)
    ]


def sample_events(
    index: int, answer: str | FakeAnswer, *, num_prompt_tokens: int = 0, start: int = 0
) -> Iterator[pb.GenerateResponse]:
    """One Chunk per token of a sample from output position `start`, then Finished. event_seq is not set."""
    whole = FakeAnswer(answer, answer) if isinstance(answer, str) else answer
    ids = [ord(char) for char in whole.tokens]
    parts = call_parts(whole.calls)
    text_offset = len(whole.text[:start].encode())
    for offset in range(start, len(ids)):
        text = whole.text[offset : offset + 1]
        chunk = pb.Chunk(index=index, offset=offset, token_ids=[ids[offset]], text=text, text_offset=text_offset)
        chunk.parts.extend(parts[offset : offset + 1])
        yield pb.GenerateResponse(chunk=chunk)
        text_offset += len(text.encode())
    digest = load_digest()
    finished = pb.Finished(
        index=index,
        reason=whole.reason,
        usage=types_pb2.Usage(prompt_tokens=num_prompt_tokens, output_tokens=len(ids)),
        output_digest=digest(struct.pack(f"<{len(ids)}I", *ids)) if digest else 0,
    )
    if isinstance(whole.matched, int):
        finished.stop_token_id = whole.matched
    elif whole.matched is not None:
        finished.stop = whole.matched
    yield pb.GenerateResponse(finished=finished)


def bad_request(code: grpc.StatusCode, error: FieldError) -> bytes:
    """google.rpc.Status with a BadRequest that names the field."""
    status = status_pb2.Status(code=code.value[0], message=str(error))
    violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
    status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return bytes(status.SerializeToString())


def _max_tokens(request: pb.GenerateRequest, default: int) -> int:
    return request.stop.max_tokens if request.stop.HasField("max_tokens") else default
