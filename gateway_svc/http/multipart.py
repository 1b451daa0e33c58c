"""Parses bodies of multipart/form-data (RFC 7578): few fields, of which one may be a file. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway_svc.http.fields import invalid

MAX_PARTS = 64
MAX_VALUE_BYTES = 64 << 10  # of a field that is no file
BOUNDARY = re.compile(r"boundary=(?:\"([^\"]{1,70})\"|([^\s;,]{1,70}))", re.IGNORECASE)
NAME = re.compile(rb"(?:^|;)\s*name=\"([^\"]*)\"", re.IGNORECASE)
FILE_NAME = re.compile(rb";\s*filename\*?=", re.IGNORECASE)


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
