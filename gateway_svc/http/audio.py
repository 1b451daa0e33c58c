"""The endpoints that turn speech into text: a form becomes a request, and its events become the answer.

Bodies are multipart/form-data (RFC 7578) with few fields, of which one may be a file.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway_svc.http.fields import invalid
from gateway_svc.http.replies import ignored_headers, json_reply
from gateway_svc.operators.audit.entry import record_request_id
from gateway_svc.pipeline.generation import GenerationPipeline
from gateway_svc.request.threads import Lane
from svc_common.errors import QuireError

FORMATS = ("json", "text")
NAMES = {  # paths of request fields -> fields of the form
    "prompt.audio": "file",
    "prompt.audio.data": "file",
    "prompt.audio.language": "language",
    "prompt.audio.task": "model",
    "prompt": "model",
    "sampling.temperature": "temperature",
}
UNSERVED = {"stream": ("false",), "prompt": ("",), "timestamp_granularities[]": ()}  # values without an effect
SERVED = ("file", "model", "language", "response_format", "temperature")
MAX_PARTS = 64
MAX_VALUE_BYTES = 64 << 10  # of a field that is no file
BOUNDARY = re.compile(r"boundary=(?:\"([^\"]{1,70})\"|([^\s;,]{1,70}))", re.IGNORECASE)
NAME = re.compile(rb"(?:^|;)\s*name=\"([^\"]*)\"", re.IGNORECASE)
FILE_NAME = re.compile(rb";\s*filename\*?=", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Speech:
    """A form as a request."""

    request: pb.GenerateRequest
    is_text: bool  # the answer is plain text
    ignored: tuple[str, ...]


class AudioHandlers:
    """One method per endpoint. All raise QuireError."""

    def __init__(self, generation: GenerationPipeline, lane: Lane) -> None:
        self._generation = generation
        self._lane = lane

    def routes(self) -> list[Route]:
        return [
            Route("/v1/audio/transcriptions", self.transcriptions, methods=["POST"]),
            Route("/v1/audio/translations", self.translations, methods=["POST"]),
        ]

    async def transcriptions(self, request: Request) -> Response:
        """The text of speech, in its language."""
        return await self._answer(request, "transcribe")

    async def translations(self, request: Request) -> Response:
        """The text of speech, in English."""
        return await self._answer(request, "translate")

    async def _answer(self, request: Request, task: str) -> Response:
        data = await request.body()
        content_type = request.headers.get("content-type", "")
        asked: Speech = await self._lane.run(len(data), _speech_of, data, content_type, task)
        request.scope["names"] = NAMES
        asked.request.request_id = f"audio-{secrets.token_hex(12)}"
        record_request_id(asked.request.request_id)
        text, usage = await _text_of(self._generation.generate(asked.request))
        if asked.is_text:
            return PlainTextResponse(text + "\n", headers=ignored_headers(asked.ignored))
        return json_reply({"text": text, "usage": usage}, asked.ignored)


def _speech_of(data: bytes, content_type: str, task: str) -> Speech:
    form = parse_form(data, content_type)
    if "file" not in form.files:
        raise invalid("file", "is not set; send a WAV file")
    for name, neutral in UNSERVED.items():
        if name in form.values and form.value(name) not in neutral:
            raise invalid(name, f"is {form.value(name)!r:.80}; this server does not support it: leave it unset")
    answer = form.value("response_format") or "json"
    if answer not in FORMATS:
        raise invalid("response_format", f"is {answer!r:.40}; must be one of {', '.join(FORMATS)} (no timestamps)")
    audio = pb.Audio(data=form.files["file"], language=form.value("language") or "", task=task)
    request = pb.GenerateRequest(
        model=form.value("model") or "",
        prompt=pb.Prompt(audio=audio),
        sampling=types.SamplingParams(temperature=_temperature(form)),
        output=pb.OutputParams(token_ids=False),
    )
    ignored = tuple(sorted(name for name in {*form.values, *form.files} if name not in (*SERVED, *UNSERVED)))
    return Speech(request, answer == "text", ignored)


def _temperature(form: MultipartForm) -> float:
    value = form.value("temperature")
    try:
        return float(value or 0)
    except ValueError:
        raise invalid("temperature", f"is {value!r:.40}; must be a number from 0 to 2") from None


async def _text_of(events: AsyncIterator[pb.GenerateResponse]) -> tuple[str, dict[str, Any]]:
    """The whole text of the only sample, and its usage."""
    parts: list[str] = []
    usage: dict[str, Any] = {}
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if event.HasField("chunk"):
                parts.append(event.chunk.text)
            if event.HasField("finished"):
                usage = _usage_of(event.finished)
    return "".join(parts).strip(), usage


def _usage_of(finished: pb.Finished) -> dict[str, Any]:
    if finished.reason in (types.FINISH_REASON_ERROR, types.FINISH_REASON_ABORTED):
        raise QuireError(f"the request ended early: {finished.message}")
    given, made = finished.usage.prompt_tokens, finished.usage.output_tokens
    return {"type": "tokens", "input_tokens": given, "output_tokens": made, "total_tokens": given + made}


@dataclass(frozen=True, slots=True)
class MultipartForm:
    """The fields of a form. A field that is sent several times has several values."""

    values: dict[str, list[str]]
    files: dict[str, bytes]

    def value(self, name: str) -> str | None:
        """The last value of a field; None if it is not sent."""
        return self.values[name][-1] if name in self.values else None


def parse_form(data: bytes, content_type: str) -> MultipartForm:
    """Raises InvalidRequestError for a body that is not multipart/form-data."""
    found = BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise invalid("body", f"has content type {content_type[:80]!r}; must be multipart/form-data with a boundary")
    delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
    parts = (b"\r\n" + data).split(delimiter, MAX_PARTS + 1)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise invalid("body", f"is cut off, or has more than {MAX_PARTS} parts; send multipart/form-data")
    form = MultipartForm({}, {})
    for part in parts[1:-1]:
        _add(form, part)
    return form


def _add(form: MultipartForm, part: bytes) -> None:
    head, separator, content = part.partition(b"\r\n\r\n")
    line = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")), b"")
    found = NAME.search(line)
    if not separator or found is None:
        raise invalid("body", "has a part without a name; send multipart/form-data")
    name = found[1].decode("utf-8", "replace")
    if FILE_NAME.search(line):
        form.files[name] = content
        return
    if len(content) > MAX_VALUE_BYTES:
        raise invalid(name, f"has {len(content)} bytes; at most {MAX_VALUE_BYTES} are allowed")
    form.values.setdefault(name, []).append(content.decode("utf-8", "replace"))
