"""Events of generations as JSON: the chunks of a stream, or one whole answer. Pure.

Choice i of prompt p has index p * n + i, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Raw
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.answer.open_streams import FAILED, REASONS
from gateway_svc.answer.receipts import span_values
from gateway_svc.http.errors import error_body, error_of_sample
from gateway_svc.http.json_text import Json, encode, encode_text, encoded_list, joined_lists, sse
from gateway_svc.http.openai.bodies import Generation
from gateway_svc.http.openai.chat import MessageBuilder, delta_of
from gateway_svc.http.openai.logprobs import (
    ChatLogprobs,
    Entries,
    Position,
    TextLogprobs,
    first_of,
    positions,
    prompt_logprobs,
    prompt_positions,
)
from svc_common.errors import ServiceError

STOPPED = (types.FINISH_REASON_EOS, types.FINISH_REASON_STOP)
FINISH_REASONS = REASONS | dict.fromkeys(STOPPED, "stop") | {types.FINISH_REASON_ABORTED: "abort"}
STOP_REASONS = {types.FINISH_REASON_REPETITION: "repetition_detected"}  # for ends without a match
DONE = b"data: [DONE]\n\n"

# Placeholders for index and text while a chunk's other bytes are built. No other value of a chunk contains them:
# model names and ids have no U+0000.
PLACE_INDEX, PLACE_TEXT = "\0index", "\0text"
EVENT_BYTES = 1024  # least size of the log probabilities of one event


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The differences between answers to chats, to text completions and to token ids."""

    id_prefix: str
    chunk_object: str
    whole_object: str
    has_one_prompt: bool  # prompt_token_ids are a field of the answer, else of each choice
    has_parts: bool  # chunks have parts, else text
    new_logprobs: Callable[[], Entries]
    begin: Callable[[str], Json | None]  # first delta of a choice, from its echo; None: the choice starts without one
    delta: Callable[[str], Json]
    end: Json  # last delta
    whole: Callable[[str, MessageBuilder], Json]


CHAT = AnswerShape(
    "chatcmpl", "chat.completion.chunk", "chat.completion",
    has_one_prompt=True, has_parts=True, new_logprobs=ChatLogprobs,
    begin=lambda echo: {"delta": {"role": "assistant", "content": ""}},
    delta=lambda text: {"delta": {"content": text}},
    end={"delta": {}},
    whole=lambda text, parts: {"message": parts.message()},
)  # fmt: skip
COMPLETION = AnswerShape(  # a chunk has the form of a whole answer that holds a part of the text
    "cmpl", "text_completion", "text_completion",
    has_one_prompt=False, has_parts=False, new_logprobs=TextLogprobs,
    begin=lambda echo: {"text": echo} if echo else None,
    delta=lambda text: {"text": text},
    end={"text": ""},
    whole=lambda text, parts: {"text": text},
)  # fmt: skip
ROLLOUT = AnswerShape(  # token ids and their log probabilities, no text
    "gen", "rollout", "rollout",
    has_one_prompt=True, has_parts=False, new_logprobs=ChatLogprobs,
    begin=lambda echo: None, delta=lambda text: {}, end={}, whole=lambda text, parts: {},
)  # fmt: skip


def _weight_versions(finished: pb.Finished) -> list[Json]:
    """The weights that computed the tokens of a choice."""
    if not finished.weight_versions:
        return [{"version": 0, "start": 0, "end": finished.usage.output_tokens}]
    return span_values(finished.weight_versions)


@dataclass(frozen=True, slots=True)
class PromptParts:
    """The parts of a prompt that its answer repeats."""

    echo: str = ""  # text in front of the output
    token_ids: Sequence[int] | None = None


@dataclass(slots=True)
class Tally:
    """Tokens of all prompts and choices so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    outputs: dict[int, int] = field(default_factory=dict)  # by choice
    reasoning_tokens: int | None = None  # sum over all choices; None: the answer has no such field

    def usage(self) -> Json:
        num_output = sum(self.outputs.values())
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": num_output,
            "total_tokens": self.prompt_tokens + num_output,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class ChoicesAnswer:
    """The common fields of chunks and whole answers: head, choices and usage."""

    late_fields: Callable[[], Json] = dict  # fields that are known after the last event

    def __init__(
        self, asked: Generation, shape: AnswerShape, answer_id: str, created: int, prompts: Sequence[PromptParts]
    ) -> None:
        self._asked = asked
        self._shape = shape
        self._prompts = prompts
        self._tally = Tally(reasoning_tokens=0 if shape.has_parts else None)
        self._calling: set[int] = set()  # choices with tool calls
        self._logprobs: dict[int, Entries] = {}
        self._seeds: dict[int, int] = {}  # by prompt
        self._head: Json = {"id": answer_id, "object": "", "created": created, "model": asked.model}

    def _accept(self, prompt: int, accepted: pb.Accepted) -> None:
        self._seeds[prompt] = accepted.seed
        self._tally.prompt_tokens += accepted.prompt_tokens
        self._head |= {"model": accepted.model, "system_fingerprint": accepted.revision}

    def _finish(self, choice: int, finished: pb.Finished) -> Json:
        """The finish fields of a choice. Raises ServiceError for a choice that failed."""
        if finished.reason in FAILED:
            raise error_of_sample(finished.message)
        self._tally.outputs[choice] = finished.usage.output_tokens + finished.usage.discarded_tokens
        if finished.index == 0:
            self._tally.cached_tokens += finished.usage.cached_tokens
        if self._tally.reasoning_tokens is not None:
            self._tally.reasoning_tokens += finished.usage.reasoning_tokens
        matched = finished.WhichOneof("matched")
        reason = FINISH_REASONS[finished.reason]
        is_call = reason == "stop" and matched != "stop" and choice in self._calling  # a stop string may cut a call
        return {
            "finish_reason": "tool_calls" if is_call else reason,
            "stop_reason": STOP_REASONS.get(finished.reason) if matched is None else getattr(finished, matched),
            **({"weight_versions": _weight_versions(finished)} if self._shape is ROLLOUT else {}),
        }

    def _logprobs_of(self, choice: int, found: Sequence[Position]) -> Json:
        """`logprobs` of the next tokens of a choice."""
        if choice not in self._logprobs:
            self._logprobs[choice] = self._shape.new_logprobs()
        return self._logprobs[choice].entry(found)

    def _echoed(self, event: pb.PromptLogprobs) -> list[Position]:
        """The positions of the prompt that are in the answer's logprobs."""
        k = self._asked.num_logprobs
        return first_of(prompt_positions(event), k) if self._asked.has_echo and k is not None else []

    def _index(self, prompt: int, sample: int) -> int:
        return prompt * self._asked.n + sample

    def _add_prompt_ids(self, answer: Json) -> None:
        """Add the prompts' token ids and the seeds of their samples to an answer or to the first chunk of a choice."""
        for choice in answer["choices"]:
            place = answer if self._shape.has_one_prompt else choice
            prompt = choice["index"] // self._asked.n
            place["prompt_token_ids"], place["seed"] = self._prompts[prompt].token_ids, self._seeds[prompt]


class StreamAnswer(ChoicesAnswer):
    """Chunks, each as a server-sent event."""

    _text_chunk: tuple[bytes, bytes, bytes] | None = None

    def take(self, prompt: int, event: pb.GenerateResponse) -> bytes:
        """The chunks for an event of the generation of this prompt. Raises ServiceError for a choice that failed."""
        kind = event.WhichOneof("event")
        if kind == "chunk":
            return self._text(prompt, event.chunk)
        return b"".join(map(sse, self._chunks(prompt, event)))

    def failed(self, error: ServiceError, names: Mapping[str, str]) -> bytes:
        """The last event of a stream that fails."""
        return sse(error_body(error, names))

    def end(self) -> bytes:
        """The data after the last event: usage if the client wants it and late fields, then [DONE]."""
        last = self.late_fields() | ({"usage": self._tally.usage()} if self._asked.includes_usage else {})
        return sse({**self._head, "choices": [], **last}) + DONE if last else DONE

    def _text(self, prompt: int, chunk: pb.Chunk) -> bytes:
        """The events for new text. Most chunks differ only in index and text: their other bytes are built once."""
        choice = self._index(prompt, chunk.index)
        parts = chunk.parts
        if any(part.HasField("tool_call") for part in parts):
            self._calling.add(choice)
        if self._asked.has_continuous_usage or self._asked.returns_token_ids:
            self._tally.outputs[choice] = chunk.offset + len(chunk.token_ids)
        own: Json = {"token_ids": list(chunk.token_ids)} if self._asked.returns_token_ids else {}
        if chunk.HasField("logprobs"):
            own["logprobs"] = self._logprobs_of(choice, list(positions(chunk.logprobs, chunk.token_ids)))
        if own or self._asked.has_continuous_usage:
            return b"".join(self._part_events(choice, chunk, own))
        if not parts:
            return self._text_event(choice, chunk.text)
        if len(parts) == 1 and parts[0].HasField("content"):
            return self._text_event(choice, parts[0].content)
        return b"".join(self._part_events(choice, chunk, {}))

    def _part_events(self, choice: int, chunk: pb.Chunk, own: Json) -> Iterator[bytes]:
        """One event per part, because clients expect one kind of output in a delta. The first event has the token ids
        and the log probabilities.
        """
        deltas = [{"delta": delta_of(part)} for part in chunk.parts] or [self._shape.delta(chunk.text)]
        for i, delta in enumerate(deltas):
            rest: Json = {"token_ids": []} if "token_ids" in own else {}
            yield sse(self._chunk(choice, {**delta, **(rest if i else own)}))

    def _text_event(self, choice: int, text: str) -> bytes:
        if self._text_chunk is None:
            around = sse(self._chunk(PLACE_INDEX, self._shape.delta(PLACE_TEXT)))
            before, _, rest = around.rpartition(encode_text(PLACE_INDEX))
            between, _, after = rest.partition(encode_text(PLACE_TEXT))
            self._text_chunk = before, between, after
        before, between, after = self._text_chunk
        return b"%b%d%b%b%b" % (before, choice, between, encode_text(text), after)

    def _chunks(self, prompt: int, event: pb.GenerateResponse) -> Iterator[Json]:
        if event.HasField("accepted"):
            self._accept(prompt, event.accepted)
            self._head["object"] = self._shape.chunk_object
            yield from self._first_chunks(prompt)
        elif event.HasField("prompt_logprobs"):
            yield from self._prompt_chunks(prompt, self._echoed(event.prompt_logprobs))
        elif event.HasField("finished"):
            choice = self._index(prompt, event.finished.index)
            end = self._finish(choice, event.finished)
            yield self._chunk(choice, self._shape.end, end)

    def _first_chunks(self, prompt: int) -> Iterator[Json]:
        parts = self._prompts[prompt]
        for sample in range(self._asked.n):
            begin = self._shape.begin(parts.echo)
            if begin is None and parts.token_ids is not None:
                begin = self._shape.delta("")
            if begin is None:
                continue
            chunk = self._chunk(self._index(prompt, sample), begin)
            if parts.token_ids is not None:
                self._add_prompt_ids(chunk)
            yield chunk

    def _prompt_chunks(self, prompt: int, found: Sequence[Position]) -> Iterator[Json]:
        """The log probabilities of an echoed prompt, for each of its choices."""
        for choice in range(self._index(prompt, 0), self._index(prompt + 1, 0)) if found else ():
            yield self._chunk(choice, {**self._shape.delta(""), "logprobs": self._logprobs_of(choice, found)})

    def _chunk(self, choice: int | str, part: Json, end: Json | None = None) -> Json:
        own = {"index": choice, "logprobs": None, **part, **(end or {"finish_reason": None})}
        chunk = {**self._head, "choices": [own]}
        if self._asked.includes_usage:
            chunk["usage"] = self._tally.usage() if self._asked.has_continuous_usage else None
        return chunk


class WholeAnswer(ChoicesAnswer):
    """One JSON object."""

    def __init__(
        self, asked: Generation, shape: AnswerShape, answer_id: str, created: int, prompts: Sequence[PromptParts]
    ) -> None:
        super().__init__(asked, shape, answer_id, created, prompts)
        indices = [self._index(prompt, sample) for prompt in range(len(prompts)) for sample in range(asked.n)]
        self._texts = {choice: [prompts[choice // asked.n].echo] for choice in indices}
        self._messages = {choice: MessageBuilder() for choice in indices}
        self._token_ids: dict[int, list[int]] = {choice: [] for choice in indices}
        self._found: dict[int, list[Json]] = {choice: [] for choice in indices}  # logprobs
        self._prompt_logprobs: dict[int, list[Raw]] = {}
        self._ends: dict[int, Json] = {}

    def take(self, prompt: int, event: pb.GenerateResponse) -> None:
        """Add an event of the generation of this prompt. Raises ServiceError for a choice that failed."""
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self._accept(prompt, event.accepted)
        elif kind == "chunk":
            choice = self._index(prompt, event.chunk.index)
            self._texts[choice].append(event.chunk.text)
            self._messages[choice].add(event.chunk.parts)
            self._token_ids[choice].extend(event.chunk.token_ids)
            if event.chunk.HasField("logprobs"):
                self._found[choice].append(
                    self._logprobs_of(choice, list(positions(event.chunk.logprobs, event.chunk.token_ids)))
                )
        elif kind == "prompt_logprobs":
            self._take_prompt_logprobs(prompt, event.prompt_logprobs)
        elif kind == "finished":
            choice = self._index(prompt, event.finished.index)
            if self._messages[choice].has_calls:
                self._calling.add(choice)
            self._ends[choice] = self._finish(choice, event.finished)

    def _take_prompt_logprobs(self, prompt: int, event: pb.PromptLogprobs) -> None:
        if self._asked.returns_prompt_logprobs:
            found = encoded_list(prompt_logprobs(prompt_positions(event)))
            self._prompt_logprobs.setdefault(prompt, []).append(found)
        if echoed := self._echoed(event):
            for choice in range(self._index(prompt, 0), self._index(prompt + 1, 0)):
                self._found[choice].append(self._logprobs_of(choice, echoed))

    @property
    def num_bytes(self) -> int:
        """About the size of the lists."""
        num_parts = sum(map(len, self._found.values())) + sum(map(len, self._prompt_logprobs.values()))
        return EVENT_BYTES * num_parts + sum(map(len, self._token_ids.values()))

    def encoded(self) -> bytes:
        """The answer as JSON, after the last event."""
        return encode(self._whole())

    def _whole(self) -> Json:
        choices = [self._choice(choice, "".join(texts)) for choice, texts in self._texts.items()]
        answer = {**self._head, "object": self._shape.whole_object, "choices": choices, "usage": self._tally.usage()}
        answer |= self.late_fields()
        if self._asked.returns_token_ids:
            self._add_prompt_ids(answer)
        for choice in choices if self._asked.returns_prompt_logprobs else ():
            place = answer if self._shape.has_one_prompt else choice
            place["prompt_logprobs"] = self._joined_prompt(choice["index"] // self._asked.n)
        return answer

    def _joined_prompt(self, prompt: int) -> Raw | None:
        found = self._prompt_logprobs.get(prompt)
        return None if found is None else joined_lists(found)

    def _choice(self, choice: int, text: str) -> Json:
        ids = {"token_ids": self._token_ids[choice]} if self._asked.returns_token_ids else {}
        own = self._shape.whole(text, self._messages[choice])
        found = self._logprobs[choice].joined(self._found[choice]) if choice in self._logprobs else None
        return {"index": choice, **own, "logprobs": found, **ids, **self._ends[choice]}


def encoded_tokens(reply: pb.TokenizeResponse, has_strings: bool) -> bytes:
    """The answer of /tokenize."""
    strings = encoded_list(reply.token_strings) if has_strings else None
    ids = encoded_list(reply.ids)
    answer = {"count": len(reply.ids), "max_model_len": reply.max_model_len, "tokens": ids, "token_strs": strings}
    return encode(answer)


def models_of(model: pb.Model, created: int) -> list[Json]:
    """The entries of a model and of its adapters in /v1/models."""
    own = _entry_of(model, created)
    return [own, *(own | {"id": adapter.name, "parent": model.info.model} for adapter in model.info.adapters)]


def _entry_of(model: pb.Model, created: int) -> Json:
    """One entry of /v1/models. The length has three names, because clients read different ones."""
    length = model.info.max_model_len
    return {
        "id": model.info.model,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "max_model_len": length,
        "context_length": length,
        "context_window": length,
    }
