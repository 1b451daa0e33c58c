"""Assembles the events of one request over one or several RPCs, and verifies that none is missing. No I/O.

It raises StreamCorrupted unless all of these hold:
- event_seq counts 0, 1, 2, ... in each RPC.
- Accepted is the first event of each RPC, and repeats the same values after a break.
- Each chunk starts at the current end of its sample (tokens and text).
- Nothing follows a sample's Finished, and at the end of the stream every sample is finished.
- output_digest matches the tokens of the whole sample.
- Log probabilities, if requested, come for every output token, and for every prompt token once, in order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2

from quire_client import convert
from quire_client.convert import AnswerAssembler, NewParts, PartError
from quire_client.errors import GenerationFailed, StreamCorrupted, StreamEndedEarly
from quire_client.types import Delta, FinishReason, GenerateResult, PartialSample, Sample, TokenLogprob

NO_PARTS = NewParts()


def load_digest() -> Callable[[bytes], int] | None:
    """xxh3_64 if xxhash is installed; the SDK does not require it."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        return None
    return xxh3_64_intdigest


@dataclass(slots=True)
class _Partial:
    """The output of one sample so far. `start`: number of earlier tokens that the caller already had."""

    start: int = 0
    text_start: int = 0  # bytes of the sample's text before `texts`
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    text_bytes: int = 0
    answer: AnswerAssembler = field(default_factory=AnswerAssembler)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Sample | None = None

    @property
    def num_tokens(self) -> int:
        return self.start + len(self.token_ids)


class StreamAssembler:
    """Turns events into deltas and, at the end, into a result. After a break, builds the continuation request.

    With `can_resume` the server always sends token ids; they are hidden from a caller that did not request them.
    """

    def __init__(self, request: pb.GenerateRequest, *, can_resume: bool = False) -> None:
        self.accepted: pb.Accepted | None = None
        self.num_resumes = 0
        self._num_events = 0
        self._is_resuming = False
        self.ended_samples: list[Sample] = []  # in the order in which they ended
        self.ends: dict[int, pb.Finished] = {}  # by sample
        self._prompt_logprobs: list[TokenLogprob | None] = []
        self._samples: list[_Partial] = []  # created after Accepted: until then, the server may refuse this n
        self._num_open = max(1, request.sampling.n)
        self._shows_token_ids = request.output.token_ids or not request.output.HasField("token_ids")
        self._wants_logprobs = request.output.HasField("logprobs")
        self._wants_prompt_logprobs = request.output.HasField("prompt_logprobs")
        self._has_token_ids = self._shows_token_ids or can_resume
        self._digest = load_digest()
        self.request = request
        if not self._shows_token_ids and can_resume:
            self.request = pb.GenerateRequest()
            self.request.CopyFrom(request)
            self.request.output.token_ids = True

    @property
    def request_id(self) -> str:
        return self.accepted.request_id if self.accepted else self.request.request_id

    @property
    def finished_samples(self) -> tuple[Sample, ...]:
        """Samples that are complete, in order of their index."""
        return tuple(partial.finished for partial in self._samples if partial.finished is not None)

    @property
    def num_samples(self) -> int:
        """Samples of the request; known after Accepted."""
        return len(self._samples)

    @property
    def is_complete(self) -> bool:
        """Every sample has ended."""
        return self._num_open == 0

    @property
    def made_progress(self) -> bool:
        """This RPC delivered events after its Accepted."""
        return self._num_events > 1

    def next_request(self, *, is_repeated: bool = False) -> pb.GenerateRequest | pb.ResumeRequest:
        """The request for the next RPC: the original, or after Accepted its continuation.

        `is_repeated`: an earlier RPC may have reached a server; the new one then takes over the request_id.
        """
        self._num_events = 0
        self._is_resuming = self.accepted is not None
        if self.accepted is None and not (is_repeated and self.request.request_id):
            return self.request
        request = pb.GenerateRequest()
        request.CopyFrom(self.request)
        request.continuation.SetInParent()
        if self.accepted is None:
            return request
        request.request_id = self.accepted.request_id
        request.model = self.accepted.model
        request.sampling.seed = self.accepted.seed
        request.continuation.revision = self.accepted.revision
        request.continuation.samples.extend(
            types_pb2.SampleState(
                index=i,
                output_token_ids=p.token_ids,
                finished=p.finished is not None,
                cumulative_logprob=sum(entry.logprob for entry in p.logprobs) if p.logprobs else None,
            )
            for i, p in enumerate(self._samples)
        )
        request.continuation.num_prompt_logprobs = len(self._prompt_logprobs)
        return request

    def feed(self, event: pb.GenerateResponse) -> Delta | None:
        """Process the next event. Returns new output, or None if the event has none."""
        if event.event_seq != self._num_events:
            raise self._corrupted(f"received event {event.event_seq}, expected event {self._num_events}")
        self._num_events += 1
        kind = event.WhichOneof("event")
        if (kind == "accepted") != (event.event_seq == 0):
            raise self._corrupted(f"event {event.event_seq} is {kind}; Accepted must be the first event, and only that")
        if kind == "chunk":
            return self._chunk(event.chunk)
        if kind == "accepted":
            self._accept(event.accepted)
        elif kind == "finished":
            self._finished(event.finished)
        elif kind == "prompt_logprobs":
            self._prompt(event.prompt_logprobs)
        return None

    def partial(self) -> tuple[PartialSample, ...]:
        """The output so far of every sample."""
        return tuple(
            PartialSample(
                index,
                tuple(sample.token_ids if self._shows_token_ids else ()),
                sample.finished.text if sample.finished else "".join(sample.texts) + sample.answer.content,
                sample.finished is not None,
            )
            for index, sample in enumerate(self._samples)
        )

    def ended_early(self) -> StreamEndedEarly:
        """The error of a stream that ended before `is_complete`."""
        if self.accepted is None:
            return StreamEndedEarly("the stream ended before the request was accepted", request_id=self.request_id)
        num_finished = len(self._samples) - self._num_open
        return StreamEndedEarly(
            f"the stream ended with {num_finished} of {len(self._samples)} samples finished", request_id=self.request_id
        )

    def result(self) -> GenerateResult:
        """The result, after the stream has ended. Raises GenerationFailed if a sample ended with ERROR."""
        if self.accepted is None or not self.is_complete:
            raise self.ended_early()
        accepted, samples = self.accepted, self.finished_samples
        result = GenerateResult(
            accepted.request_id,
            accepted.model,
            accepted.seed,
            samples,
            self.num_resumes,
            prompt_logprobs=tuple(self._prompt_logprobs),
        )
        for sample in samples:
            if sample.finish_reason is FinishReason.ERROR:
                error = GenerationFailed(
                    f"sample {sample.index} failed: {sample.message or 'no reason given'}", result=result
                )
                error.partial = self.partial()
                raise error
        return result

    def _accept(self, accepted: pb.Accepted) -> None:
        if self.accepted is None:
            self.accepted = accepted
            self._samples = self._new_samples(accepted)
            return
        self.num_resumes += 1
        for name in ("request_id", "seed", "model", "prompt_tokens"):
            before, now = getattr(self.accepted, name), getattr(accepted, name)
            if before != now:
                raise self._corrupted(f"{name} was {before} before the stream broke and is {now} after it")

    def _new_samples(self, accepted: pb.Accepted) -> list[_Partial]:
        return [_Partial() for _ in range(self._num_open)]

    def _prompt(self, message: pb.PromptLogprobs) -> None:
        if not self._prompt_logprobs:
            self._prompt_logprobs.append(None)  # the first token has none
        num_repeated = len(self._prompt_logprobs) - message.offset
        if num_repeated < 0 or (num_repeated and not self._is_resuming):
            raise self._corrupted(
                f"log probabilities start at prompt position {message.offset}, expected {len(self._prompt_logprobs)}"
            )
        self._prompt_logprobs += convert.token_logprobs(message.logprobs, message.token_ids)[num_repeated:]

    def _check_prompt_logprobs(self) -> None:
        """Check that the log probabilities of all prompt tokens precede the first output token."""
        num_expected = self.accepted.prompt_tokens if self.accepted is not None else 0
        if self._wants_prompt_logprobs and len(self._prompt_logprobs) != num_expected:
            raise self._corrupted(
                f"received log probabilities of {len(self._prompt_logprobs)} of {num_expected} prompt tokens before "
                "the first output"
            )

    def _chunk(self, chunk: pb.Chunk) -> Delta | None:
        self._check_prompt_logprobs()
        partial, ids = self._open_sample(chunk.index), tuple(chunk.token_ids)
        if ids and chunk.offset != partial.num_tokens:
            raise self._corrupted(
                f"sample {chunk.index}: a chunk starts at position {chunk.offset}, expected {partial.num_tokens}"
            )
        text = chunk.text
        if text and partial.start and not partial.texts:
            partial.text_start = partial.text_bytes = chunk.text_offset
        if text and chunk.text_offset != partial.text_bytes:
            text = self._new_text(partial, chunk)
        partial.token_ids.extend(ids)
        logprobs = convert.token_logprobs(chunk.logprobs, ids) if chunk.HasField("logprobs") else ()
        if self._wants_logprobs and self._has_token_ids and len(logprobs) != len(ids):
            raise self._corrupted(
                f"sample {chunk.index}: the lengths of token_ids and logprobs of a chunk differ: "
                f"{len(ids)} and {len(logprobs)}"
            )
        partial.logprobs += logprobs
        if text:
            partial.texts.append(text)
            partial.text_bytes += len(text) if text.isascii() else len(text.encode())
        new = self._new_parts(partial, chunk) if chunk.parts else NO_PARTS
        token_ids = ids if self._shows_token_ids else ()
        if not (self._shows_token_ids or text or new or logprobs):
            return None
        content, calls = text + new.content, tuple(new.tool_calls)
        return Delta(chunk.index, chunk.offset, token_ids, content, new.reasoning, calls, logprobs)

    def _new_parts(self, partial: _Partial, chunk: pb.Chunk) -> NewParts:
        try:
            return partial.answer.add(chunk, is_resuming=self._is_resuming)
        except PartError as error:
            raise self._corrupted(f"sample {chunk.index}: {error}") from None

    def _new_text(self, partial: _Partial, chunk: pb.Chunk) -> str:
        """The new part of a chunk's text. After a break, a server may repeat text that was received before."""
        data = chunk.text.encode()
        have = partial.text_bytes - chunk.text_offset
        if not self._is_resuming or have < 0 or chunk.text_offset < partial.text_start:
            raise self._corrupted(
                f"sample {chunk.index}: the text of a chunk starts at byte {chunk.text_offset}, "
                f"expected {partial.text_bytes}"
            )
        known = "".join(partial.texts).encode()[chunk.text_offset - partial.text_start :]
        if data[:have] != known[: len(data)]:
            raise self._corrupted(
                f"sample {chunk.index}: text at byte {chunk.text_offset} changed after the stream broke"
            )
        return data[have:].decode()

    def _finished(self, finished: pb.Finished) -> None:
        partial = self._open_sample(finished.index)
        if not partial.start:
            self._check_digest(finished, partial.token_ids)
        token_ids = partial.token_ids if self._shows_token_ids else ()
        answer = partial.answer
        sample = convert.sample(finished, token_ids, "".join(partial.texts) + answer.content, partial.logprobs)
        sample = replace(sample, reasoning=answer.reasoning, tool_calls=answer.tool_calls)
        if self._is_resuming:
            sample = replace(sample, usage=replace(sample.usage, output_tokens=partial.num_tokens))
        partial.finished = sample
        self.ends[finished.index] = finished
        self.ended_samples.append(sample)
        self._num_open -= 1

    def _check_digest(self, finished: pb.Finished, token_ids: list[int]) -> None:
        if self._digest is None or not self._has_token_ids:
            return
        digest = self._digest(struct.pack(f"<{len(token_ids)}I", *token_ids))
        if digest != finished.output_digest:
            raise self._corrupted(
                f"sample {finished.index}: the digest of {len(token_ids)} output tokens is {digest:#x}, "
                f"the server sent {finished.output_digest:#x}"
            )

    def _open_sample(self, index: int) -> _Partial:
        if index >= len(self._samples):
            raise self._corrupted(f"received output of sample {index}, but n of the request is {len(self._samples)}")
        if self._samples[index].finished is not None:
            raise self._corrupted(f"received output of sample {index} after its Finished")
        return self._samples[index]

    def _corrupted(self, message: str) -> StreamCorrupted:
        return StreamCorrupted(f"{message}; discard this answer and send the request again", request_id=self.request_id)


class ResumedAssembler(StreamAssembler):
    """Assembles a request that continues from its record. All its RPCs are Resume.

    `result` has only the output after the positions in `request`. The digest can be checked only for samples that start
    at position 0.
    """

    def __init__(self, request: pb.ResumeRequest) -> None:
        super().__init__(pb.GenerateRequest(request_id=request.request_id), can_resume=True)
        self._after = {position.index: position.num_tokens for position in request.after}

    def next_request(self, *, is_repeated: bool = False) -> pb.ResumeRequest:
        """The request for the next RPC, after all output so far."""
        self._num_events = 0
        self._is_resuming = self.accepted is not None
        after = self._after | {i: partial.num_tokens for i, partial in enumerate(self._samples)}
        positions = [pb.ResumePosition(index=index, num_tokens=count) for index, count in after.items()]
        return pb.ResumeRequest(request_id=self.request_id, after=positions)

    def _new_samples(self, accepted: pb.Accepted) -> list[_Partial]:
        self._num_open = accepted.n
        starts = [self._after.get(index, 0) for index in range(accepted.n)]
        return [_Partial(start=start, answer=AnswerAssembler(starts_late=start > 0)) for start in starts]

    def _chunk(self, chunk: pb.Chunk) -> Delta | None:
        return None if self._is_resuming and self._is_known(chunk.index) else super()._chunk(chunk)

    def _finished(self, finished: pb.Finished) -> None:
        # Resume repeats the end of every sample, with the text that was held back until the end.
        if self._is_resuming and self._is_known(finished.index):
            return
        super()._finished(finished)

    def _is_known(self, index: int) -> bool:
        return index < len(self._samples) and self._samples[index].finished is not None


def assembler_of(request: pb.GenerateRequest | pb.ResumeRequest, *, can_resume: bool) -> StreamAssembler:
    """The assembler for the first request of a stream."""
    if isinstance(request, pb.ResumeRequest):
        return ResumedAssembler(request)
    return StreamAssembler(request, can_resume=can_resume)
