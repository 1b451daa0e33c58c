"""The two files of a batch, in OpenAI's format: one JSON object per line.

Input:  {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
Output: {"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": null}
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_PROBLEMS = 5  # a message lists at most this many invalid lines
MAX_ID_CHARS = 512
HTTP_OK = 200


class BatchFileError(Exception):
    """An input or output file cannot be used. The message has the file, the line and the reason."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    """The HTTP answer to one request."""

    status_code: int
    request_id: str
    body: Any


def check_input(path: Path) -> list[str]:
    """The custom_ids of all requests. Raises BatchFileError with the first invalid lines."""
    line_of: dict[str, int] = {}
    problems: list[str] = []
    for number, line in _lines(path):
        try:
            custom_id = _request(line).custom_id
            if custom_id in line_of:
                raise ValueError(f"custom_id {custom_id!r} is already used in line {line_of[custom_id]}")
            line_of[custom_id] = number
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        shown = problems[:MAX_PROBLEMS]
        rest = f"; and {len(problems) - len(shown)} more" if len(problems) > len(shown) else ""
        noun = "line" if len(problems) == 1 else "lines"
        raise BatchFileError(f"{path} has {len(problems)} invalid {noun}, nothing was sent: {'; '.join(shown)}{rest}")
    if not line_of:
        raise BatchFileError(f"{path} has no requests")
    return list(line_of)


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests of a file that `check_input` has accepted."""
    for _, line in _lines(path):
        yield _request(line)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise BatchFileError(f"cannot read {path}: {error.strerror or error}") from None


def _request(line: bytes) -> BatchRequest:
    """One request. Raises ValueError with the reason."""
    fields = _json_object(line)
    custom_id, url, body = (fields.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        raise ValueError(f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters; got {custom_id!r}")
    if fields.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST; got {fields['method']!r}")
    if url not in URLS:
        raise ValueError(f"url must be {' or '.join(URLS)}; got {url!r}")
    if not isinstance(body, dict):
        raise ValueError(f"body must be a JSON object; got {type(body).__name__}")
    if body.get("stream"):
        raise ValueError("body.stream must be false: a batch collects whole answers")
    return BatchRequest(custom_id, url, body)


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"must be a JSON object; got {type(fields).__name__}")
    return fields


class ResultFile:
    """The output of a batch, opened for appending. Owns the file and the set of answered custom_ids.

    Opening repairs the end of the file after a crash: an incomplete last line is removed. Only one process at a time
    can have the file open. `num_errors` counts the answers whose status is not 200.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[str] = set()
        self.num_errors = 0
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise BatchFileError(f"cannot write {path}: {error.strerror or error}") from None
        try:
            _lock(self._file, path)
            self._load()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def write(self, custom_id: str, response: Response) -> None:
        """Append one answer as one line."""
        fields = {"status_code": response.status_code, "request_id": response.request_id, "body": response.body}
        line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": fields, "error": None}
        self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()
        self._record(line)

    def _load(self) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break  # the process was killed while it wrote this line
            end += len(line)
            try:
                self._record(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise BatchFileError(
                    f"line {number} of {self.path} is not a result of `quire batch`; choose another output file"
                ) from None
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)

    def _record(self, line: dict[str, Any]) -> None:
        self.done.add(line["custom_id"])
        self.num_errors += line["response"]["status_code"] != HTTP_OK


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock the file until it is closed. On systems without flock, the file is not locked."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BatchFileError(f"{path} is locked by another process; wait or choose another output file") from None
