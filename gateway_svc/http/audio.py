"""The endpoints that turn speech into text: a form becomes one request per part of the speech, and their events become
the answer.

Speech that is longer than the model's input is divided at pauses. Where the answer has timestamps, the parts are
shorter, and each is a segment.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway_svc.callers.caller import record_request_id
from gateway_svc.http.forms import MultipartForm, parse_form
from gateway_svc.http.json_text import invalid, one_of, sse
from gateway_svc.http.replies import EventStream, ignored_headers, json_reply
from gateway_svc.pipeline.generation import GenerationPipeline
from gateway_svc.request.threads import Lane
from svc_common.errors import ServiceError

PLAIN, SEGMENTED = ("json", "text"), ("verbose_json", "srt", "vtt")  # values of response_format
SEGMENT_S = 12.0  # longest segment
NAMES = {  # paths of request fields -> fields of the form
    "prompt.audio": "file",
    "prompt.audio.data": "file",
    "prompt.audio.language": "language",
    "prompt.audio.prompt": "prompt",
    "prompt.audio.task": "model",
    "prompt": "model",
    "sampling.temperature": "temperature",
}
GRANULARITIES = "timestamp_granularities[]"
SERVED = ("file", "model", "language", "prompt", "response_format", "temperature", "stream", GRANULARITIES)


@dataclass(frozen=True, slots=True)
class Speech:
    """A form as a request, whose audio may be longer than the model's input."""

    request: pb.GenerateRequest
    format: str
    is_stream: bool
    ignored: tuple[str, ...]

    @property
    def max_part_s(self) -> float:
        """The longest part in seconds."""
        return SEGMENT_S if self.format in SEGMENTED else 1e9


@dataclass(slots=True)
class Segment:
    """A part of the speech and its text."""

    index: int
    start_s: float
    end_s: float
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprob: float = 0.0  # the sum of its tokens

    @property
    def text(self) -> str:
        return "".join(self.texts).strip()

    def json(self, temperature: float) -> dict[str, Any]:
        """The OpenAI API's form."""
        encoded = self.text.encode()
        return {
            "id": self.index,
            "seek": round(100 * self.start_s),
            "start": round(self.start_s, 2),
            "end": round(self.end_s, 2),
            "text": self.text,
            "tokens": self.ids,
            "temperature": temperature,
            "avg_logprob": self.logprob / max(1, len(self.ids)),
            "compression_ratio": len(encoded) / len(zlib.compress(encoded)),
            "no_speech_prob": None,  # not computed
        }


@dataclass(slots=True)
class Transcript:
    """The segments so far."""

    languages: Mapping[int, str]  # by id of its token
    segments: list[Segment] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(segment.text for segment in self.segments if segment.text)

    @property
    def seconds(self) -> float:
        return self.segments[-1].end_s if self.segments else 0.0

    @property
    def usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": round(self.seconds)}

    def language(self, given: str) -> str:
        """The given language, or the one that the model detected in the first segment."""
        ids = self.segments[0].ids[:1] if self.segments else ()
        return given or next((self.languages[id_] for id_ in ids if id_ in self.languages), "")


class AudioHandlers:
    """One method per endpoint. All raise ServiceError."""

    def __init__(self, generation: GenerationPipeline, lane: Lane) -> None:
        self._generation = generation
        self._lane = lane

    def routes(self) -> list[Route]:
        return [
            Route("/v1/audio/transcriptions", self.transcriptions, methods=["POST"]),
            Route("/v1/audio/translations", self.translations, methods=["POST"]),
        ]

    async def transcriptions(self, request: Request) -> Response | EventStream:
        """The text of speech, in its language."""
        return await self._answer(request, "transcribe")

    async def translations(self, request: Request) -> Response | EventStream:
        """The text of speech, in English."""
        return await self._answer(request, "translate")

    async def _answer(self, request: Request, task: str) -> Response | EventStream:
        data = await request.body()
        content_type = request.headers.get("content-type", "")
        asked: Speech = await self._lane.run(len(data), _speech_of, data, content_type, task)
        request.scope["names"] = NAMES
        transcript = Transcript({})
        deltas = self._deltas(asked, transcript)
        headers = ignored_headers(asked.ignored)
        if asked.is_stream:
            return await EventStream.begun(_events(deltas, transcript), headers)
        async with aclosing(deltas):
            async for _ in deltas:
                pass
        if asked.format in ("json", "verbose_json"):
            return json_reply(_whole(asked, transcript, task), asked.ignored)
        return PlainTextResponse(FORMATS[asked.format](transcript), headers=headers)

    async def _deltas(self, asked: Speech, transcript: Transcript) -> AsyncGenerator[str, None]:
        """The parts of the text as they are computed; `transcript` grows with them."""
        model, parts = await self._generation.audio_parts(asked.request, asked.max_part_s)
        transcript.languages = {id_: name for name, id_ in model.info.encoder.audio.language_ids.items()}
        request_id = f"audio-{secrets.token_hex(12)}"
        record_request_id(request_id)
        for index, part in enumerate(parts):
            request = pb.GenerateRequest()
            request.CopyFrom(asked.request)
            request.prompt.audio.CopyFrom(part.audio)
            request.request_id = f"{request_id}-{index}" if index else request_id
            segment = Segment(index, transcript.seconds, transcript.seconds + part.seconds)
            prefix = " " if transcript.text else ""
            transcript.segments.append(segment)
            async for text in _texts(self._generation.generate(request), segment):
                yield prefix + text
                prefix = ""


async def _texts(events: AsyncGenerator[pb.GenerateResponse, None], segment: Segment) -> AsyncGenerator[str, None]:
    """The text of the only sample of a generation, without space before it, added to the segment."""
    async with aclosing(events):
        async for event in events:
            if event.HasField("chunk"):
                segment.ids += event.chunk.token_ids
                text = event.chunk.text if segment.text else event.chunk.text.lstrip()
                segment.texts.append(text)
                if text:
                    yield text
            elif event.HasField("finished"):
                if event.finished.reason in (types.FINISH_REASON_ERROR, types.FINISH_REASON_ABORTED):
                    raise ServiceError(f"the request ended early: {event.finished.message}")
                segment.logprob = event.finished.cumulative_logprob


async def _events(deltas: AsyncGenerator[str, None], transcript: Transcript) -> AsyncGenerator[bytes, None]:
    async with aclosing(deltas):
        async for text in deltas:
            yield sse({"type": "transcript.text.delta", "delta": text})
    yield sse({"type": "transcript.text.done", "text": transcript.text, "usage": transcript.usage})


def _whole(asked: Speech, transcript: Transcript, task: str) -> dict[str, Any]:
    if asked.format == "json":
        return {"text": transcript.text, "usage": transcript.usage}
    temperature = asked.request.sampling.temperature
    return {
        "task": task,
        "language": transcript.language(asked.request.prompt.audio.language),
        "duration": round(transcript.seconds, 2),
        "text": transcript.text,
        "segments": [segment.json(temperature) for segment in transcript.segments],
        "usage": transcript.usage,
    }


def _clock(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(1000 * seconds), 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{point}{milliseconds % 1000:03d}"


def _subtitles(segments: Sequence[Segment], point: str, *, is_numbered: bool) -> str:
    """Subtitles (SubRip, WebVTT) of the segments with a text."""
    blocks = [
        f"{_clock(segment.start_s, point)} --> {_clock(segment.end_s, point)}\n{segment.text}\n"
        for segment in segments
        if segment.text
    ]
    return "\n".join(f"{i}\n{block}" if is_numbered else block for i, block in enumerate(blocks, 1))


FORMATS: Mapping[str, Callable[[Transcript], str]] = {
    "text": lambda transcript: transcript.text + "\n",
    "srt": lambda transcript: _subtitles(transcript.segments, ",", is_numbered=True),
    "vtt": lambda transcript: "WEBVTT\n\n" + _subtitles(transcript.segments, ".", is_numbered=False),
}


def _speech_of(data: bytes, content_type: str, task: str) -> Speech:
    form = parse_form(data, content_type)
    if "file" not in form.files:
        raise invalid("file", "is not set; send an audio file")
    answer = one_of("response_format", form.value("response_format") or "json", (*PLAIN, *SEGMENTED))
    _check_granularities(form, answer)
    stream = one_of("stream", form.value("stream") or "false", ("true", "false"))
    if stream == "true" and answer not in PLAIN:
        raise invalid("stream", f"is true, but response_format {answer} is not streamed; set it to json or text")
    audio = pb.Audio(
        data=form.files["file"], language=form.value("language") or "", task=task, prompt=form.value("prompt") or ""
    )
    request = pb.GenerateRequest(
        model=form.value("model") or "",
        prompt=pb.Prompt(audio=audio),
        sampling=types.SamplingParams(temperature=_temperature(form)),
        output=pb.OutputParams(token_ids=True, logprobs=0 if answer == "verbose_json" else None),
    )
    ignored = tuple(sorted(name for name in {*form.values, *form.files} if name not in SERVED))
    return Speech(request, answer, stream == "true", ignored)


def _check_granularities(form: MultipartForm, answer: str) -> None:
    for value in form.values.get(GRANULARITIES, ()):
        if value != "segment":
            raise invalid(GRANULARITIES, f"is {value!r:.40}; only segment is supported")
        if answer != "verbose_json":
            raise invalid(GRANULARITIES, f"is set, but response_format is {answer}; set it to verbose_json")


def _temperature(form: MultipartForm) -> float:
    value = form.value("temperature")
    try:
        return float(value or 0)
    except ValueError:
        raise invalid("temperature", f"is {value!r:.40}; must be a number from 0 to 2") from None
