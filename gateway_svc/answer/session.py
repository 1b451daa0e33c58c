"""Requests that continue a session: what they take from it, and its answer as a message."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.internal.v1 import record_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import session_pb2
from quire.v1 import types_pb2 as types

from gateway_svc.answer.answer_stream import AnswerStream
from gateway_svc.records.store import StoredRecord
from gateway_svc.request.field_errors import invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.images import images_of
from gateway_svc.request.prompts.reader import PromptInput
from gateway_svc.request.tools import AnswerPlan, answer_plan, read_tools
from gateway_svc.text.chat_output import AnswerPiece, Item, ItemKind, call_id, call_key, items_of
from gateway_svc.text.stop_strings import StoppedText, StopStrings
from prefix_index.hashing import ids_from_bytes
from request_fields.fields import GRAMMAR_FIELDS, fields_of

# Fields of a turn, not of its session.
OWN_SAMPLING = (
    "n", "best_of", "beam_width", "length_penalty", "early_stopping", "num_forced_tokens", "logits_digests",
    "logprobs_mode", *(name for name in fields_of("sampling") if name.startswith("thinking_")),
)  # fmt: skip
OWN_STOP = ("max_tokens", "min_tokens")
CHAT_SETTINGS = ("tools_json", "template_kwargs_json", "chat_template", "parallel_tool_calls")
KINDS = ("text", "tokens", "chat")


@dataclass(frozen=True, slots=True)
class SessionBase:
    """The sample of a session that a request continues."""

    record: StoredRecord
    sample: int
    keeps_model: bool = True  # the request names the model of the session, or the route by which it was chosen

    @property
    def alias(self) -> str | None:
        """The route by which the session's model was chosen (empty: none); None if the request gets its own model."""
        return self.record.content.alias if self.keeps_model else None

    @property
    def request(self) -> pb.GenerateRequest:
        return self.record.content.request

    @property
    def output(self) -> Sequence[int]:
        """The tokens of the sample, with the one that ended it."""
        return self.record.outputs[self.sample]

    @property
    def ids(self) -> list[int]:
        """Prompt and output."""
        return [*ids_from_bytes(self.record.content.prompt_token_ids), *self.output]


def base_of(request: pb.GenerateRequest, record: StoredRecord, serves: Callable[[str], bool]) -> SessionBase:
    """The part that a request continues. Raises InvalidRequestError if it cannot be continued with new input."""
    earlier, num_samples = record.content.request, len(record.outputs)
    kind = earlier.prompt.WhichOneof("kind")
    if kind not in KINDS:
        raise invalid("session_id", f"names a session whose prompt is {kind}; only Resume continues it")
    if request.prompt.HasField("chat") and kind != "chat":
        raise invalid("prompt.chat", f"is set, but the prompt of the session is {kind}; send text or token ids")
    if request.session_sample >= num_samples:
        raise invalid("session_sample", f"is {request.session_sample}; must be from 0 to {num_samples - 1}")
    names = "", record.content.alias, earlier.model
    keeps_model = request.model in names and (not record.content.alias or serves(earlier.model))
    base = SessionBase(record, request.session_sample, keeps_model)
    if not record.keeps_output:
        words = "names a session whose output is not stored, because it has log probabilities or best_of"
        raise invalid("session_id", f"{words}; send the whole prompt")
    check_whole(record)
    return base


def check_whole(record: StoredRecord) -> None:
    """Refuse a session that is not known as a whole. Raises InvalidRequestError."""
    if record.is_cut:
        words = "names a session whose output does not fit in its record (--max-record-bytes)"
        raise invalid("session_id", f"{words}; send the whole prompt, or rewind it")


def inherit(request: pb.GenerateRequest, base: SessionBase) -> None:
    """Give a request the values of its session for fields that it does not set."""
    earlier = base.request
    _fill(request.sampling, earlier.sampling, OWN_SAMPLING)
    _fill(request.stop, earlier.stop, OWN_STOP)
    request.scheduling.cache_salt = request.scheduling.cache_salt or earlier.scheduling.cache_salt
    alias = base.record.content.alias
    if request.model in ("", alias):
        request.model = earlier.model if base.keeps_model else alias
        request.adapter = request.adapter or earlier.adapter


def continue_chat(request: pb.GenerateRequest, base: SessionBase, model: ServedModel) -> None:
    """Put the messages of the session and its answer in front of those of the request."""
    earlier, chat, own = base.request.prompt.chat, request.prompt.chat, pb.Chat()
    own.CopyFrom(chat)
    _fill(chat, earlier, {field.name for field in pb.Chat.DESCRIPTOR.fields} - set(CHAT_SETTINGS))
    before, answer = list(earlier.messages), answer_message(base, model)
    if earlier.continue_final_message:
        answer.content = before.pop().content + answer.content
    del chat.messages[:]
    chat.messages.extend([*before, answer, *own.messages])


def check_same_model(base: SessionBase, model: ServedModel) -> None:
    """Refuse a model for which the tokens of the session have another meaning, or are no part of a prompt."""
    if model.info.model != base.request.model:
        words = f"is {model.info.model!r}; the tokens of the session are those of {base.request.model!r}"
        raise invalid("model", f"{words}: leave the field unset, or send the conversation as messages")
    if model.info.HasField("encoder"):
        raise invalid(
            "session_id", "is set, but the prompt of this model is read by an encoder; only Resume is possible"
        )


def join_prompts(request: pb.GenerateRequest, base: SessionBase, before: PromptInput, own: PromptInput) -> PromptInput:
    """The prompt of a request that continues a session. The request gets all its images, for its record."""
    media = [image.data for image in images_of(base.request)] + list(request.media)
    del request.media[:]
    request.media.extend(media)
    shift, inputs = len(before.ids), list(before.inputs)
    for carried in own.inputs:
        carried.start += shift
        inputs.append(carried)
    return PromptInput([*before.ids, *own.ids], tuple(inputs))


def _fill(message: Any, earlier: Any, own: Collection[str]) -> None:
    """Set the fields that a message does not set, except `own` ones, to those of an earlier message."""
    filled = type(message)()
    filled.CopyFrom(earlier)
    for name in own:
        filled.ClearField(name)
    given = {field.name for field, _ in message.ListFields()}
    for name in given | (set() if given.isdisjoint(GRAMMAR_FIELDS) else GRAMMAR_FIELDS):
        filled.ClearField(name)
    filled.MergeFrom(message)
    message.CopyFrom(filled)


# -- answers ----------------------------------------------------------------------------------------------------------


def answer_message(base: SessionBase, model: ServedModel) -> pb.ChatMessage:
    """The output of a session as a message of the assistant."""
    request, content = pb.GenerateRequest(), base.record.content
    request.CopyFrom(base.request)
    prompt_ids = ids_from_bytes(content.prompt_token_ids)
    plan = answer_plan(request, model, read_tools(request.prompt.chat), prompt_ids)
    if plan is None:
        raise invalid("prompt.chat", f"is set, but model {model.name!r} has no tokenizer; send token ids")
    pieces = _pieces(base, model, plan)
    message = pb.ChatMessage(role="assistant")
    key = call_key(content.origin_id or base.request.request_id, base.request.sampling.seed, prompt_ids)
    call = 0
    for item in items_of(pieces):
        if item.kind is ItemKind.TOOL_CALL:
            message.tool_calls.add(id=call_id(key, base.sample, call), name=item.name, arguments=item.text)
            call += 1
        else:
            _add_text(message, item)
    return message


def _add_text(message: pb.ChatMessage, item: Item) -> None:
    if item.kind is ItemKind.REASONING:
        message.reasoning += item.text
    else:
        message.content += item.text


def _pieces(base: SessionBase, model: ServedModel, plan: AnswerPlan) -> list[AnswerPiece]:
    """The parsed text, as the client of the output got it."""
    tokenizer, stop, ids = model.require_tokenizer("prompt.chat"), base.request.stop, list(base.output)
    text: Any = tokenizer.new_detokenizer(skip_special_tokens=True, visible=frozenset(plan.format.markers))
    if stop.stop:
        matcher = StopStrings(stop.stop).new_matcher(include_stop=stop.include_stop_in_output)
        text = StoppedText(text, matcher, first_stop=stop.min_tokens)
    if _is_ended_by_token(base.record.ends[base.sample]):
        ids.pop()
    answer = AnswerStream(plan, "", base.sample)
    pieces, _ = answer.push(text, ids)
    return [*pieces, *answer.finish("" if text.stop is not None else text.flush())]


def _is_ended_by_token(end: record_pb2.SampleEnd | None) -> bool:
    if end is None:
        return False
    return end.finish.reason == types.FINISH_REASON_EOS or end.finish.HasField("stop_token_id")


# -- values -----------------------------------------------------------------------------------------------------------


def changes_of_copy(record: StoredRecord, source_id: str, session_id: str) -> record_pb2.RequestRecord:
    """Changes to the content of a session in its copy."""
    changes = record_pb2.RequestRecord(origin_id=record.content.origin_id or record.content.request.request_id)
    changes.request.request_id, changes.request.session_id = session_id, source_id
    return changes


def add_content(response: session_pb2.GetSessionResponse, record: StoredRecord) -> None:
    """Add the request and the output of a record."""
    request = response.request
    request.CopyFrom(record.content.request)
    if not request.sampling.beam_width:
        for name in ("length_penalty", "early_stopping"):  # a request without beams that sets them is refused
            request.sampling.ClearField(name)
    if request.prompt.WhichOneof("kind") in ("text", "tokens") and not request.media:
        request.prompt.CopyFrom(pb.Prompt(tokens=types.TokenIds(ids=ids_from_bytes(record.content.prompt_token_ids))))
    response.outputs.extend(types.TokenIds(ids=output) for output in record.outputs)


def rewound(record: StoredRecord, num_tokens: int) -> StoredRecord:
    """A record with the first tokens of each sample. Raises InvalidRequestError if no sample has as many."""
    longest = max(map(len, record.outputs))
    if num_tokens > longest:
        raise invalid("num_tokens", f"is {num_tokens}; must be at most {longest}, the stored tokens of the session")
    outputs = tuple(output[:num_tokens] for output in record.outputs)
    ends = tuple(
        end if len(output) == len(before) else None
        for end, output, before in zip(record.ends, outputs, record.outputs, strict=True)
    )
    return replace(record, outputs=outputs, ends=ends, is_cut=False)
