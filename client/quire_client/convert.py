"""Converts protos to the SDK's types, and the parts of a chat's answer to its text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2

from quire_client import results
from quire_client.plain import Result
from quire_client.types import (
    AbortResult,
    EmbedResult,
    FinishReason,
    ModelInfo,
    Sample,
    Status,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
    WeightVersionSpan,
)

R = TypeVar("R", bound=Result)

FINISH_REASONS = {types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


def token_logprobs(message: pb.Logprobs, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """The log probabilities of consecutive tokens. `token_ids` is empty if the server did not send them."""
    count = len(message.logprobs)
    num_top = len(message.top_logprobs) // count if count else 0
    top = tuple(
        map(TopLogprob, message.top_token_ids, message.top_logprobs, message.top_token_bytes)
        if message.top_token_bytes
        else map(TopLogprob, message.top_token_ids, message.top_logprobs)
    )
    return tuple(
        TokenLogprob(
            token_id=token_ids[i] if token_ids else None,
            logprob=message.logprobs[i],
            rank=message.ranks[i],
            token=message.token_bytes[i] if message.token_bytes else b"",
            top=top[i * num_top : (i + 1) * num_top],
            raw_logprob=message.raw_logprobs[i] if message.raw_logprobs else None,
            num_kept=message.num_kept[i] if message.num_kept else None,
            logits_digest=message.logits_digests[i] if message.logits_digests else None,
        )
        for i in range(count)
    )


def sample(finished: pb.Finished, token_ids: Iterable[int], text: str, logprobs: Iterable[TokenLogprob] = ()) -> Sample:
    """A finished sample. A reason that this version does not know (newer server) becomes ERROR."""
    matched: int | str | None = None
    if finished.WhichOneof("matched") == "stop_token_id":
        matched = finished.stop_token_id
    elif finished.WhichOneof("matched") == "stop":
        matched = finished.stop
    return Sample(
        index=finished.index,
        token_ids=tuple(token_ids),
        text=text,
        finish_reason=FINISH_REASONS.get(finished.reason, FinishReason.ERROR),
        matched=matched,
        usage=result(Usage, finished.usage),
        preemptions=finished.preemptions,
        message=finished.message,
        logprobs=tuple(logprobs),
        receipt=finished.receipt,
        weight_versions=tuple(result(WeightVersionSpan, span) for span in finished.weight_versions),
        score=finished.score if finished.HasField("score") else None,
        cumulative_logprob=finished.cumulative_logprob if finished.HasField("cumulative_logprob") else None,
    )


def result(kind: type[R], message: ProtoMessage, **others: Any) -> R:
    """The result that has the fields of a message. `others`: fields with other values."""
    descriptors = message.DESCRIPTOR.fields_by_name
    for name in kind.__match_args__:
        if name in others:
            continue
        field, value = descriptors[name], getattr(message, name)
        if field.enum_type is not None or field.has_presence or field.message_type is not None:
            value = _value(message, field)
        elif not isinstance(value, str | bytes | int | float):
            value = tuple(value)
        if value is not None:
            others[name] = value
    return kind(**others)


def _value(message: ProtoMessage, field: Any) -> Any:
    """The value of a message, an enum or an optional field; None: the default of its result."""
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.enum_type is not None:
        unspecified, known = field.enum_type.values[0].name, field.enum_type.values_by_number.get(value)
        return known.name.removeprefix(unspecified.removesuffix("UNSPECIFIED")).lower() if value and known else None
    if field.message_type is not None:
        kind = results.MESSAGES[field.message_type.name]
        return result(kind, value) if field.has_presence else tuple(result(kind, item) for item in value)
    return value


def embed_result(response: pb.EmbedResponse) -> EmbedResult:
    vectors = tuple(tuple(item.values) for item in response.embeddings)
    counts = tuple(item.prompt_tokens for item in response.embeddings)
    return EmbedResult(vectors, counts, response.model, response.revision, response.request_id)


def abort_result(responses: Iterable[pb.AbortResponse], request: pb.AbortRequest) -> AbortResult:
    """The union over all gateways; an id is unknown if no gateway knows it."""
    aborted = {request_id for response in responses for request_id in response.aborted_ids}
    ids = tuple(dict.fromkeys(request.request_ids))
    return AbortResult(tuple(i for i in ids if i in aborted), tuple(i for i in ids if i not in aborted))


def model_info(model: pb.Model) -> ModelInfo:
    return result(
        ModelInfo,
        model.info,
        name=model.info.model,
        ready_workers=model.ready_workers,
        quantization=model.info.quantization or None,
        adapters=tuple(adapter.name for adapter in model.info.adapters),
    )


def models(response: pb.ListModelsResponse) -> tuple[ModelInfo, ...]:
    return tuple(model_info(model) for model in response.models)


def status(response: pb.GetStatusResponse) -> Status:
    owners = {pins.owner: pins.num_sessions for pins in response.pins_by_owner}
    return result(Status, response, pins_by_owner=owners)


class PartError(ValueError):
    """A part does not continue the answer received so far."""


@dataclass(slots=True)
class _AnswerItem:
    kind: str  # reasoning, content or tool_call
    call_id: str = ""
    name: str = ""
    start: int = 0  # bytes of the item before `texts`
    texts: list[str] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True)
class NewParts:
    """The new output of one chunk."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class AnswerAssembler:
    """The items of one answer so far. `starts_late`: the first part may be at any item and byte of the answer."""

    def __init__(self, *, starts_late: bool = False) -> None:
        self._starts_late = starts_late
        self._first = 0  # number of the first item
        self._items: list[_AnswerItem] = []

    @property
    def reasoning(self) -> str:
        return self._text_of("reasoning")

    @property
    def content(self) -> str:
        return self._text_of("content")

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(item.call_id, item.name, item.text) for item in self._items if item.kind == "tool_call")

    def add(self, chunk: pb.Chunk, *, is_resuming: bool) -> NewParts:
        """Add the parts of a chunk. After a break, a server may repeat text that was received before.

        Raises PartError.
        """
        new = NewParts()
        for part in chunk.parts:
            text = self._append(part, is_resuming=is_resuming)
            if not text:
                continue
            if part.HasField("tool_call"):
                call = part.tool_call
                new.tool_calls.append(ToolCallDelta(call.index, call.id, call.name, text))
            elif part.HasField("reasoning"):
                new.reasoning += text
            else:
                new.content += text
        return new

    def _append(self, part: pb.AnswerPart, *, is_resuming: bool) -> str:
        """Append the part's new text to its item, and return it."""
        kind = part.WhichOneof("kind") or "content"
        text = part.tool_call.arguments if kind == "tool_call" else getattr(part, kind)
        start = 0
        if self._starts_late and not self._items:
            self._first, start = part.item, part.offset
        at = part.item - self._first
        if at == len(self._items):
            self._items.append(_AnswerItem(kind, part.tool_call.id, part.tool_call.name, start, num_bytes=start))
        if not 0 <= at < len(self._items) or self._items[at].kind != kind:
            end = self._first + len(self._items)
            raise PartError(f"unexpected part of item {part.item} ({kind}); number of items so far: {end}")
        item = self._items[at]
        if part.offset != item.num_bytes:
            text = _new_text(item, part, text, is_resuming=is_resuming)
        if text:
            item.texts.append(text)
            item.num_bytes += len(text) if text.isascii() else len(text.encode())
        return text

    def _text_of(self, kind: str) -> str:
        return "".join(item.text for item in self._items if item.kind == kind)


def _new_text(item: _AnswerItem, part: pb.AnswerPart, text: str, *, is_resuming: bool) -> str:
    data, have = text.encode(), item.num_bytes - part.offset
    if not is_resuming or have < 0 or part.offset < item.start:
        raise PartError(f"a part of item {part.item} starts at byte {part.offset}, expected {item.num_bytes}")
    known = item.text.encode()[part.offset - item.start :]
    if data[:have] != known[: len(data)]:
        raise PartError(f"item {part.item} at byte {part.offset} changed after the stream broke")
    return data[have:].decode()
