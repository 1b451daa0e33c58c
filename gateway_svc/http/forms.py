"""Bodies of multipart/form-data (RFC 7578) with few fields and large files, read as they arrive. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gateway_svc.http.json_text import invalid

MAX_PARTS = 64
MAX_VALUE_BYTES = 64 << 10  # limit for a field that is no file
MAX_HEAD_BYTES = 16 << 10  # limit for the header of a part
BOUNDARY = re.compile(r"boundary=(?:\"([^\"]{1,70})\"|([^\s;,]{1,70}))", re.IGNORECASE)
NAME = re.compile(rb"(?:^|;)\s*name=\"([^\"]*)\"", re.IGNORECASE)
FILE_NAME = re.compile(rb";\s*filename\*?=(?:\"([^\"]*)\")?", re.IGNORECASE)
HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class MultipartForm:
    """The fields of a form. A field that is sent several times has several values."""

    values: dict[str, list[str]]
    files: dict[str, bytes]

    def value(self, name: str) -> str | None:
        """The last value of a field; None if it is not sent."""
        return self.values[name][-1] if name in self.values else None


class FormReader:
    """Reads a form. Keeps the values of fields and the names of files. Raises InvalidRequestError."""

    def __init__(self, content_type: str) -> None:
        found = BOUNDARY.search(content_type)
        if not content_type.lower().startswith("multipart/form-data") or found is None:
            raise invalid(
                "body", f"has content type {content_type[:80]!r}; must be multipart/form-data with a boundary"
            )
        self.values: dict[str, list[str]] = {}
        self.file_names: dict[str, str] = {}
        self._delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
        self._buffer = b"\r\n"
        self._is_head = self._is_over = self._is_file = False
        self._num_parts = 0
        self._name = ""  # name of the present part; empty before the first one
        self._value = b""

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Takes the next bytes. The content of files, in pieces, with the name of their field."""
        self._buffer += data
        while not self._is_over and (self._read_head() if self._is_head else True):
            content, found, rest = self._buffer.partition(self._delimiter)
            if not found:
                keep = len(self._delimiter) - 1
                content, rest = self._buffer[:-keep], self._buffer[-keep:]
            self._buffer = rest
            if self._is_file and content:
                yield self._name, content
            elif self._name and not self._is_file:
                self._add(content)
            if not found:
                return
            self._end_part()

    def end(self) -> None:
        """The body is complete."""
        if not self._is_over:
            raise invalid("body", f"is cut off, or has more than {MAX_PARTS} parts; send multipart/form-data")

    def _read_head(self) -> bool:
        """Read the header of a part. False if it is not here yet, or if the form is over."""
        if self._buffer.startswith(b"--"):
            self._is_over = True
            return False
        head, found, rest = self._buffer.partition(HEAD_END)
        if len(head) > MAX_HEAD_BYTES:
            raise invalid(
                "body", f"has a part with a header of {len(head)} bytes; at most {MAX_HEAD_BYTES} are allowed"
            )
        line = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")), b"")
        name = NAME.search(line)
        if self._delimiter in head or (found and name is None):
            raise invalid("body", "has a part without a name; send multipart/form-data")
        if not found or name is None:
            return False
        self._name, self._buffer, self._is_head = name[1].decode("utf-8", "replace"), rest, False
        file_name = FILE_NAME.search(line)
        self._is_file = file_name is not None
        if file_name is not None:
            self.file_names[self._name] = (file_name[1] or b"").decode("utf-8", "replace")
        return True

    def _add(self, content: bytes) -> None:
        self._value += content
        if len(self._value) > MAX_VALUE_BYTES:
            raise invalid(self._name, f"has {len(self._value)} bytes; at most {MAX_VALUE_BYTES} are allowed")

    def _end_part(self) -> None:
        if self._name and not self._is_file:
            self.values.setdefault(self._name, []).append(self._value.decode("utf-8", "replace"))
        self._value, self._is_head, self._num_parts = b"", True, self._num_parts + 1
        if self._num_parts > MAX_PARTS + 1:
            self.end()


def parse_form(data: bytes, content_type: str) -> MultipartForm:
    """The form of a whole body."""
    reader, files = FormReader(content_type), dict[str, list[bytes]]()
    for name, content in reader.feed(data):
        files.setdefault(name, []).append(content)
    reader.end()
    return MultipartForm(reader.values, {name: b"".join(files.get(name, ())) for name in reader.file_names})
