"""One Generate stream: journal in, events out.

    SampleJournal.outputs --cursor--> SampleText --> Chunk (ids, text, offsets) ... Finished (usage, digest)

Events are numbered without gaps. Tokens that arrived since the last event are sent as one Chunk. If there are many,
they are sent as several, so that a client that reads again after a long pause does not delay other streams.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import xxhash
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.answer.answer_stream import AnswerStream
from gateway_svc.answer.open_streams import RequestMeter
from gateway_svc.answer.receipts import ReceiptSigner, SampleProof
from gateway_svc.records.recorder import Recording
from gateway_svc.request.plan import GenerationPlan
from gateway_svc.schedulers.logprobs import PromptLogprobJournal, PromptLogprobStream, TakenLogprobs
from gateway_svc.schedulers.scheduler_request import SampleJournal, SchedulerRequest
from gateway_svc.text.answer import AnswerPiece
from gateway_svc.text.chat_output import call_key
from gateway_svc.text.detokenizer import SampleText
from prefix_index.hashing import token_bytes
from request_fields.fields import FinishReason
from svc_common.errors import InvalidRequestError

JOINED_BYTES = 64 << 10  # far below clients' limit of 4 MiB, with the largest event
MAX_CHUNK_TOKENS = 1024  # detokenizing takes a few milliseconds, and the message is far below clients' limit of 4 MiB


class SampleStream:
    """The stream of one sample: the position up to which it was sent, and the events for new tokens."""

    def __init__(
        self, index: int, plan: GenerationPlan, text: SampleText | None, signer: ReceiptSigner | None = None
    ) -> None:
        self.index = index
        self.is_done = plan.resume.finished[index]
        self.is_stopped = False  # a stop string matched
        self.num_output = 0
        self.usage: types.Usage | None = None  # set when it is done
        self._sent = 0 if plan.resume.replay is None else plan.resume.replay.sent[index]  # output that the client has
        self.reason = types.FINISH_REASON_UNSPECIFIED  # set when it is done
        self._plan = plan
        self._text = text
        self._answer: AnswerStream | None = None
        if plan.output.answer is not None:
            key = call_key(plan.request_id, plan.sampling.params.seed, plan.prompt.ids)
            self._answer = AnswerStream(plan.output.answer, key, index)
        self._parts: list[AnswerPiece] = []  # unsent parts of the answer
        self._cursor = 0
        self._cumulative = plan.resume.cumulative_logprobs[index] if plan.output.logprobs is not None else 0.0
        self._text_bytes = 0
        self._digest = xxhash.xxh3_64()
        self._proof = None if signer is None or not plan.output.wants_receipt else SampleProof(signer, plan, index)

    def prime(self, output: array[int]) -> scheduler_pb2.SampleFinished | None:
        """Read output that the client already has. Returns the end of a sample that is already complete.

        Raises InvalidRequestError if the output continues after a stop string.
        """
        finish = None if self.is_done else self._end_of(output)
        if self._plan.resume.replay is not None:  # the journal begins with `output`, and `advance` reads it from there
            return self._plan.resume.replay.ends[self.index] or finish
        text, count = self._read(output, finish)
        if count < len(output) and not self.is_done:
            raise InvalidRequestError(
                f"continuation: output_token_ids of sample {self.index} has tokens after stop string {self._stop!r}, "
                f"which ends at position {count - 1}; remove the ids after position {count - 1}",
                field="continuation.samples",
            )
        self._note(output, text)
        self._cursor = len(output)
        self.is_stopped = self._stop is not None
        if self._answer is not None and self.is_stopped:
            self._answer.finish("")
        self._parts.clear()  # the client has them
        if self.is_stopped:
            return scheduler_pb2.SampleFinished(sample_index=self.index, reason=types.FINISH_REASON_STOP)
        return finish

    def advance(self, journal: SampleJournal) -> Iterator[pb.GenerateResponse]:
        """Events for new tokens of the journal."""
        if self._cursor < self._sent:
            self._skip(journal)
        most = (
            MAX_CHUNK_TOKENS if journal.logprobs is None else min(MAX_CHUNK_TOKENS, journal.logprobs.tokens_per_event)
        )
        while not self.is_stopped and len(journal.outputs) - self._cursor > most:
            if (event := self._take(journal, most, None)) is not None:
                yield event
        finish = journal.finish
        is_current = not self.is_stopped and self._cursor >= self._sent
        if is_current and (event := self._take(journal, most, finish)) is not None:
            yield event
        if finish is not None:
            if self.num_output < self._sent:
                raise self._too_far()
            self.is_done = True
            yield pb.GenerateResponse(finished=self._finished(finish, journal))

    def _take(
        self, journal: SampleJournal, num_tokens: int, finish: scheduler_pb2.SampleFinished | None
    ) -> pb.GenerateResponse | None:
        """The event for the next ids of the journal, at most `num_tokens`; with `finish`, they are the last ids."""
        first = self._cursor
        ids = journal.outputs[first : first + num_tokens]
        self._cursor += len(ids)
        text, count = self._read(ids, finish)
        ids = ids[:count]
        stop = self._stop
        if finish is not None and self._text is not None and stop is None:
            text += self._text.flush()
            stop = self._stop  # the flushed text may complete a stop string
        self.is_stopped = stop is not None
        if self._answer is not None and (self.is_stopped or finish is not None):
            self._parts += self._answer.finish(text)
            text = ""
        chunk = self._chunk(ids, text)
        if journal.logprobs is not None and ids:
            self._add_logprobs(chunk, journal.logprobs.take(self._cursor - first).first(count))
        self._note(ids, text)
        return chunk

    def _skip(self, journal: SampleJournal) -> None:
        """Read the tokens that the client already has, and send nothing."""
        end = min(self._sent, len(journal.outputs))
        ids = journal.outputs[self._cursor : end]
        text, count = self._read(ids, journal.finish if end == len(journal.outputs) else None)
        self._cursor = end
        if journal.logprobs is not None:
            self._add_logprobs(None, journal.logprobs.take(len(ids)).first(count))
        self._note(ids[:count], text)
        self.is_stopped = self._stop is not None
        if self._answer is not None and self.is_stopped:
            self._answer.finish("")
        self._parts.clear()

    def _too_far(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"after: num_tokens of sample {self.index} is {self._sent}; must be at most {self.num_output}, the "
            "sample's number of output tokens; send the number of tokens that you have",
            field="after",
        )

    def _add_logprobs(self, event: pb.GenerateResponse | None, taken: TakenLogprobs) -> None:
        """Add the log probabilities of the tokens of a chunk."""
        for logprob in taken.chosen:
            self._cumulative += logprob
        if self._proof is not None:
            self._proof.digests.extend(taken.extras["logits_digests"])
        if event is not None:
            taken.fill(event.chunk.logprobs, self._plan.model.text.tokenizer if self._plan.output.wants_text else None)

    @property
    def _stop(self) -> str | None:
        return None if self._text is None else self._text.stop

    def _read(self, ids: array[int], finish: scheduler_pb2.SampleFinished | None) -> tuple[str, int]:
        """Text of the ids, and how many of the ids are output. A token id that ended the sample has no text."""
        if self._text is None or not ids:
            return "", len(ids)
        if finish is None or not _is_ended_by_token(finish):
            return self._push(self._text, ids)
        text, count = self._push(self._text, ids[:-1])
        return text, count if self._stop is not None else len(ids)

    def _push(self, sample_text: SampleText, ids: array[int]) -> tuple[str, int]:
        """Text of the ids, and how many of the ids are output. A parsed answer has parts instead of text."""
        if self._answer is None:
            return sample_text.read(ids)
        parts, count = self._answer.push(sample_text, ids)
        self._parts += parts
        return "", count

    def _chunk(self, ids: array[int], text: str) -> pb.GenerateResponse | None:
        plan = self._plan
        shown = text if plan.output.wants_text else ""
        wants_ids = plan.output.wants_token_ids or plan.output.logprobs is not None
        if not (shown or self._parts) and not (ids and wants_ids):
            return None
        event = pb.GenerateResponse()
        chunk = event.chunk  # filled in place, which costs half as much as building a Chunk and copying it
        chunk.index = self.index
        chunk.offset = self.num_output
        chunk.text = shown
        chunk.text_offset = self._text_bytes
        if plan.output.wants_token_ids:
            chunk.token_ids.extend(ids)
        if self._answer is not None and self._parts:
            self._answer.add_to(chunk, self._parts)
            self._parts = []
        return event

    def _note(self, ids: array[int], text: str) -> None:
        self.num_output += len(ids)
        self._text_bytes += len(text) if text.isascii() else len(text.encode())
        self._digest.update(token_bytes(ids))
        if self._proof is not None:
            self._proof.token_ids.extend(ids)

    def _finished(self, finish: scheduler_pb2.SampleFinished, journal: SampleJournal) -> pb.Finished:
        usage = types.Usage()
        usage.CopyFrom(finish.usage)
        usage.prompt_tokens = len(self._plan.prompt.ids)
        usage.output_tokens = self.num_output
        usage.reasoning_tokens = 0 if self._answer is None else self._answer.num_reasoning_tokens
        self.usage = usage
        finished = pb.Finished(
            index=self.index,
            reason=finish.reason,
            usage=usage,
            output_digest=self._digest.intdigest(),
            message=finish.message,
            preemptions=finish.preemptions,
        )
        if journal.versions:
            finished.weight_versions.extend(journal.spans(self.num_output))
        if self._plan.output.logprobs is not None:
            finished.cumulative_logprob = self._cumulative
        if self.is_stopped:
            finished.reason = types.FINISH_REASON_STOP
            finished.stop = self._stop or ""
            finished.message = ""
        elif finish.HasField("stop_token_id"):
            finished.stop_token_id = finish.stop_token_id
        if finish.HasField("cumulative_logprob"):
            finished.cumulative_logprob = finish.cumulative_logprob
        if finish.HasField("score"):
            finished.score = finish.score
        self.reason = finished.reason
        if self._proof is not None:
            finished.receipt = self._proof.receipt(finished)
        return finished

    def _end_of(self, output: array[int]) -> scheduler_pb2.SampleFinished | None:
        """The end of a complete output, by the scheduler's rule. None for an incomplete output, and for a beam, because
        only the scheduler has its score.
        """
        plan = self._plan
        if not output or plan.sampling.beams is not None:
            return None
        end = plan.sampling.condition.end_of(output, plan.model.info.eos_token_ids)
        if end is None:
            return None
        reason = types.FinishReason.Value(f"FINISH_REASON_{end.name}")
        finish = scheduler_pb2.SampleFinished(sample_index=self.index, reason=reason)
        if end is FinishReason.STOP:
            finish.stop_token_id = output[-1]
        return finish


def _is_ended_by_token(finish: scheduler_pb2.SampleFinished) -> bool:
    return finish.reason == types.FINISH_REASON_EOS or finish.HasField("stop_token_id")


class AnswerSource(Protocol):
    """A request with one journal per sample that is sent: a SchedulerRequest, or a BestSamples in front of one."""

    @property
    def samples(self) -> Sequence[SampleJournal]: ...

    @property
    def is_due(self) -> bool: ...

    @property
    def prompt_logprobs(self) -> PromptLogprobJournal | None: ...

    @property
    def is_resumed(self) -> bool: ...

    async def wait_accepted(self) -> None: ...

    async def wait(self) -> list[int]: ...

    def close_sample(self, index: int) -> None: ...


class GenerationStream:
    """All samples of one request. The constructor replays the continuation, which takes time if it is long.

    Then `report_known`, `begin`, and `next_messages` until it `is_over`.
    """

    def __init__(self, plan: GenerationPlan, signer: ReceiptSigner | None = None) -> None:
        self._plan = plan
        texts = plan.new_texts(plan.sampling.params.n)
        self._samples = [SampleStream(i, plan, text, signer) for i, text in enumerate(texts)]
        self._ends = [s.prime(output) for s, output in zip(self._samples, plan.resume.outputs, strict=True)]
        self._prompt: PromptLogprobStream | None = None
        if plan.output.prompt_logprobs is not None:
            tokenizer = plan.model.text.tokenizer if plan.output.wants_text else None
            self._prompt = PromptLogprobStream(plan.prompt.ids, plan.resume.num_prompt_logprobs, tokenizer)
        self._num_open = plan.resume.finished[: len(self._samples)].count(False)
        self._event_seq = 0
        self._is_accepted = False
        self._first: Sequence[pb.GenerateResponse] = ()  # Accepted, while it waits for the next events
        self.is_over = False  # no more messages follow
        self._source: AnswerSource
        self._meter: RequestMeter
        self._recording: Recording | None = None

    def report_known(self, request: SchedulerRequest) -> None:
        """Tell a request what its continuation decides: samples that have ended, output to send again."""
        for finish in self._ends:
            if finish is not None:
                request.on_finished(finish)
        if request.is_over:
            request.on_accepted()
        if self._plan.resume.replay is not None:
            request.announce_output()

    def begin(self, source: AnswerSource, meter: RequestMeter, recording: Recording | None) -> None:
        """Read from this source from now on."""
        self._source, self._meter, self._recording = source, meter, recording

    async def next_messages(self) -> Iterable[pb.GenerateResponse]:
        """Wait for the next messages. All must be read before the next call. Raises the refusal or the failure."""
        if not self._is_accepted:
            await self._source.wait_accepted()
            return self._accept()
        events = self._events(await self._source.wait())
        if not self._plan.output.joins_events:
            return events
        first, self._first = self._first, ()
        return joined(chain(first, events))

    def _accept(self) -> Sequence[pb.GenerateResponse]:
        """The first event; nothing if it is joined to the next events, which are ready."""
        self._is_accepted = True
        plan = self._plan
        self._meter.on_accepted(len(plan.prompt.ids), resumes=self._source.is_resumed)
        self.is_over = not self._num_open
        accepted = pb.Accepted(
            request_id=plan.request_id,
            seed=plan.sampling.params.seed,
            **plan.model.names,
            prompt_tokens=len(plan.prompt.ids),
            revision=plan.model.revision,
            n=plan.sampling.params.n,
            prompt_digest=xxhash.xxh3_128_digest(token_bytes(plan.prompt.ids)),
        )
        first = (pb.GenerateResponse(accepted=accepted, event_seq=0),)
        self._event_seq = 1
        if not plan.output.joins_events or not self._source.is_due or self.is_over:
            return first
        self._first = first
        return ()

    def _events(self, news: Sequence[int]) -> Iterator[pb.GenerateResponse]:
        """The Chunks for new output of the request, and one Finished per sample that has ended now."""
        source, meter, now = self._source, self._meter, self._meter.now()
        if self._prompt is not None and source.prompt_logprobs is not None:
            for event in self._prompt.events(source.prompt_logprobs):
                event.event_seq = self._event_seq
                self._event_seq += 1
                yield event
        for index in news:
            sample = self._samples[index]
            if sample.is_done:
                continue
            was_stopped, num_before = sample.is_stopped, sample.num_output
            for event in sample.advance(source.samples[index]):
                event.event_seq = self._event_seq
                self._event_seq += 1
                yield event
            if sample.num_output > num_before:
                meter.on_tokens(index, sample.num_output - num_before, now)
            if self._recording is not None:
                self._recording.advance(index, sample.num_output, is_done=sample.is_done)
            if sample.is_done:
                self._num_open -= 1
                meter.on_finished(sample.reason, sample.usage)
            if sample.is_stopped and not was_stopped:
                source.close_sample(index)
        self.is_over = not self._num_open


def joined(events: Iterable[pb.GenerateResponse]) -> Iterator[pb.GenerateResponse]:
    """Messages with several events each: a message costs gateway and client more than an event. A message ends with the
    event that reaches JOINED_BYTES.
    """
    message, size = None, 0
    for event in events:
        if message is None:
            message = event
        else:
            message.following.append(event)
        size += event.ByteSize()
        if size >= JOINED_BYTES:
            yield message
            message, size = None, 0
    if message is not None:
        yield message
