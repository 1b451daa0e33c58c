"""Puts a stream of events together, and proves that none is missing. No I/O.

The rules it checks, each broken one raises StreamCorrupted:
event_seq counts 0, 1, 2, ...; Accepted comes once and first; a chunk starts where its sample stands (tokens and
text); nothing follows a sample's Finished; at the end every sample is finished; output_digest fits the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.v1 import inference_pb2 as pb

from quire_client import convert
from quire_client.errors import GenerationFailed, StreamCorrupted
from quire_client.types import Delta, FinishReason, GenerateResult, Sample


def load_digest() -> Callable[[bytes], int] | None:
    """xxh3_64, when xxhash is installed: the SDK does not depend on it."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        return None
    return xxh3_64_intdigest


@dataclass(slots=True)
class _Partial:
    """A sample that grows."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    text_bytes: int = 0
    finished: Sample | None = None


class StreamAssembler:
    """Turns events into deltas and, at the end, into a result."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.accepted: pb.Accepted | None = None
        self._num_events = 0
        self._samples = [_Partial() for _ in range(max(1, request.sampling.n))]
        self._has_token_ids = request.output.token_ids or not request.output.HasField("token_ids")
        self._digest = load_digest()

    @property
    def request_id(self) -> str:
        return self.accepted.request_id if self.accepted else ""

    @property
    def finished_samples(self) -> tuple[Sample, ...]:
        """Samples that are complete, in order of their index."""
        return tuple(partial.finished for partial in self._samples if partial.finished is not None)

    def feed(self, event: pb.GenerateResponse) -> Delta | None:
        """Take the next event. Returns new output, or None when the event carried none."""
        if event.event_seq != self._num_events:
            raise self._corrupted(f"event {event.event_seq} came where {self._num_events} was due")
        self._num_events += 1
        kind = event.WhichOneof("event")
        if (kind == "accepted") != (self.accepted is None):
            raise self._corrupted(f"event {event.event_seq} is {kind}; Accepted comes once and first")
        if kind == "accepted":
            self.accepted = event.accepted
        elif kind == "chunk":
            return self._chunk(event.chunk)
        elif kind == "finished":
            self._finished(event.finished)
        return None

    def result(self) -> GenerateResult:
        """The whole request, once the stream has ended. Raises GenerationFailed when a sample ended with ERROR."""
        if self.accepted is None:
            raise self._corrupted("the stream ended before the request was accepted")
        samples = self.finished_samples
        if len(samples) < len(self._samples):
            raise self._corrupted(f"the stream ended with {len(samples)} of {len(self._samples)} samples finished")
        result = GenerateResult(self.accepted.request_id, self.accepted.model, self.accepted.seed, samples)
        for sample in samples:
            if sample.finish_reason is FinishReason.ERROR:
                raise GenerationFailed(
                    f"sample {sample.index} failed: {sample.message or 'no reason given'}", result=result
                )
        return result

    def _chunk(self, chunk: pb.Chunk) -> Delta:
        partial = self._open_sample(chunk.index)
        if chunk.token_ids and chunk.offset != len(partial.token_ids):
            raise self._corrupted(
                f"sample {chunk.index}: a chunk starts at position {chunk.offset}, {len(partial.token_ids)} was due"
            )
        if chunk.text and chunk.text_offset != partial.text_bytes:
            raise self._corrupted(
                f"sample {chunk.index}: a chunk's text starts at byte {chunk.text_offset}, {partial.text_bytes} was due"
            )
        partial.token_ids.extend(chunk.token_ids)
        partial.texts.append(chunk.text)
        partial.text_bytes += len(chunk.text.encode())
        return Delta(chunk.index, chunk.offset, tuple(chunk.token_ids), chunk.text)

    def _finished(self, finished: pb.Finished) -> None:
        partial = self._open_sample(finished.index)
        self._check_digest(finished, partial.token_ids)
        partial.finished = convert.sample(finished, partial.token_ids, "".join(partial.texts))

    def _check_digest(self, finished: pb.Finished, token_ids: list[int]) -> None:
        if self._digest is None or not self._has_token_ids:
            return
        digest = self._digest(struct.pack(f"<{len(token_ids)}I", *token_ids))
        if digest != finished.output_digest:
            raise self._corrupted(
                f"sample {finished.index}: the digest of {len(token_ids)} output tokens is {digest:#x}, "
                f"the server says {finished.output_digest:#x}"
            )

    def _open_sample(self, index: int) -> _Partial:
        if index >= len(self._samples):
            raise self._corrupted(f"output of sample {index}, but the request asked for {len(self._samples)}")
        if self._samples[index].finished is not None:
            raise self._corrupted(f"output of sample {index} after its end")
        return self._samples[index]

    def _corrupted(self, message: str) -> StreamCorrupted:
        return StreamCorrupted(f"{message}; the answer is not trustworthy, ask again", request_id=self.request_id)
