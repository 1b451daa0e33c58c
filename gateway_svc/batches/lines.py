"""The lines of batches in OpenAI's format: parts of an input, checks, requests, results, and what shelves keep. Pure.

Input:   {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
Result:  {"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": null}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from request_fields.fields import LAST_PRIORITY
from svc_common.errors import InvalidRequestError

FILE, BATCH = "file", "batch"
UNCHECKED = -1  # the chunk of a batch whose input is not checked yet
SWEPT = 16  # ended items that are deleted at once
MAX_LINE_BYTES = 4 << 20
PART_BYTES = 256 << 10
PART_LINES = 32  # lines that one gateway takes at a time
MAX_ID_CHARS = 512
MAX_PROBLEMS = 20  # invalid lines that an error lists
SEEDED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
URLS = (*SEEDED, "/v1/embeddings", "/v1/score", "/v1/rerank")
MESSAGES = "/v1/messages"
ENDED = {  # code and message of lines that a batch has not sent
    "canceled": ("batch_cancelled", "The batch was cancelled before this request was answered."),
    "expired": ("batch_expired", "This request could not be answered before the batch expired."),
}


class LineAnswer(NamedTuple):
    """The result of a line of a chunk: succeeded, errored, canceled or expired. `size`: bytes before the seal."""

    line: int
    kind: str
    data: bytes
    size: int


class TakenChunk(NamedTuple):
    """A chunk that was leased, None if there is none; the number of chunks to do; lines that have answers."""

    chunk: int | None
    left: int
    answered: frozenset[int] = frozenset()


class BatchLine(msgspec.Struct):
    """One line of an input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


NULL = msgspec.Raw(b"null")


class _Head(msgspec.Struct):
    """Fields of a body that must be false."""

    stream: msgspec.Raw = NULL
    background: msgspec.Raw = NULL


LINE, HEAD, NOT_SET = msgspec.json.Decoder(BatchLine), msgspec.json.Decoder(_Head), (b"false", b"null")


class Reply(NamedTuple):
    """The answer of an endpoint to a line."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None  # the line should be sent again


class Splitter:
    """Cuts a file that arrives in pieces into parts of whole lines. The parts joined are the file."""

    def __init__(self) -> None:
        self._rest = b""
        self._part: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The parts that are complete. Raises InvalidRequestError for a line that is too long."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield from self._add(line + b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise InvalidRequestError(f"a line has more than {MAX_LINE_BYTES} bytes; send a shorter one", field="file")

    def end(self) -> Iterator[bytes]:
        """The last part, if the file is not empty."""
        if last := b"".join(self._part) + self._rest:
            yield last

    def _add(self, line: bytes) -> Iterator[bytes]:
        if len(self._part) == PART_LINES or (self._part and sum(map(len, self._part)) + len(line) > PART_BYTES):
            yield b"".join(self._part)
            self._part = []
        self._part.append(line)


def lines_of(part: bytes) -> list[bytes]:
    """The lines of a part that are not empty."""
    return [line for line in part.split(b"\n") if line.strip()]


@dataclass(slots=True)
class Checker:
    """Checks all parts of an input, in order."""

    endpoint: str
    max_lines: int
    num_lines: int = 0
    num_chunks: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list)
    _line_of: dict[bytes, int] = field(default_factory=dict)  # by digest of the custom_id

    def check(self, part: bytes) -> None:
        """Count the lines of a part, and note the problem of each invalid one."""
        self.num_chunks += 1
        for line in lines_of(part):
            self.num_lines += 1
            if problem := self._problem_of(line):
                self._note(*problem, self.num_lines)

    def end(self) -> None:
        """Note the problems of the whole input."""
        if not 0 < self.num_lines <= self.max_lines:
            words = f"the file has {self.num_lines} requests; a batch has 1 to {self.max_lines} (--batch-max-lines)"
            self._note("invalid_file", words, None)

    def _note(self, code: str, message: str, line: int | None) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append({"code": code, "message": message, "param": None, "line": line})

    def _problem_of(self, data: bytes) -> tuple[str, str] | None:
        try:
            line = LINE.decode(data)
            head = HEAD.decode(line.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return "invalid_json_line", f"not a request: {error}"
        if not 0 < len(line.custom_id) <= MAX_ID_CHARS:
            return "invalid_custom_id", f"custom_id has {len(line.custom_id)} characters; it needs 1 to {MAX_ID_CHARS}"
        if line.method != "POST" or line.url != self.endpoint:
            return "invalid_url", f"method and url must be POST {self.endpoint}, the endpoint of the batch"
        for name in ("stream", "background"):
            if bytes(getattr(head, name)).strip() not in NOT_SET:
                return "invalid_body", f"body.{name} must be false: a batch collects whole answers"
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        first = self._line_of.setdefault(digest, self.num_lines)
        return None if first == self.num_lines else ("duplicate_custom_id", f"custom_id is already in line {first}")


def request_of(line: BatchLine, batch_id: str) -> bytes:
    """The body that is sent: at the lowest priority, and, unless it has a seed, with one that is always the same for
    this line. So a line that is computed again gets the same answer.
    """
    first = b""
    if line.url in SEEDED:
        digest = hashlib.sha256(f"{batch_id}/{line.custom_id}".encode()).digest()
        first = b'"seed":%d,' % int.from_bytes(digest[:6], "little")
    own = bytes(line.body).strip()[1:-1].strip()  # the last one of equal names counts
    return b'{%b%b"priority":%d}' % (first, own + b"," if own else b"", LAST_PRIORITY)


def result_of(line: BatchLine, reply: Reply) -> tuple[str, bytes]:
    """Kind and line of the result."""
    is_ok, body = reply.status == 200, msgspec.Raw(reply.body)
    kind = "succeeded" if is_ok else "errored"
    if line.url == MESSAGES:
        return kind, _message_result(line, {"type": kind, "message" if is_ok else "error": body})
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
    return kind, _result(line, reply.request_id, response, None)


def unsent(line: BatchLine, kind: str) -> bytes:
    """The result of a line that was not answered before the batch was canceled or has expired."""
    if line.url == MESSAGES:
        return _message_result(line, {"type": kind})
    code, message = ENDED[kind]
    return _result(line, kind, None, {"code": code, "message": message})


def _message_result(line: BatchLine, result: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"custom_id": line.custom_id, "result": result}) + b"\n"


def _result(line: BatchLine, request_id: str, response: Any, error: Any) -> bytes:
    fields = {"id": f"batch_{request_id}", "custom_id": line.custom_id, "response": response, "error": error}
    return msgspec.json.encode(fields) + b"\n"
