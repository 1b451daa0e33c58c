"""Bodies of multipart/form-data."""

from __future__ import annotations

import pytest

from gateway_svc.http.forms import MAX_HEAD_BYTES, MAX_PARTS, MAX_VALUE_BYTES, FormReader, MultipartForm, parse_form
from svc_common.errors import InvalidRequestError

TYPE = 'multipart/form-data; boundary="--B o"'


def body(*parts: tuple[str, bytes], boundary: str = "--B o") -> bytes:
    lines = [f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data for head, data in parts]
    return b"\r\n".join([*lines, f"--{boundary}--\r\n".encode()])


def test_values_and_files_keep_their_bytes() -> None:
    data = bytes(range(256)) + b"\r\n--B\r\n\r\n"
    found = parse_form(
        body(('name="model"', "größe".encode()), ('name="file"; filename="a;b.wav"', data), ('name="x"', b"")), TYPE
    )
    assert found == MultipartForm({"model": ["größe"], "x": [""]}, {"file": data})
    assert found.value("model") == "größe"
    assert found.value("other") is None


@pytest.mark.parametrize("step", [1, 3, 64])
def test_a_form_that_arrives_in_pieces_is_the_same(step: int) -> None:
    data = bytes(range(256)) + b"\r\n--B\r\n\r\n"
    whole = body(('name="model"', b"1"), ('name="file"; filename="a;b.wav"', data), ('name="x"', b""))
    reader, found = FormReader(TYPE), []
    for start in range(0, len(whole), step):
        found += reader.feed(whole[start : start + step])
    reader.end()
    assert b"".join(content for _, content in found) == data
    assert (reader.values, reader.file_names) == ({"model": ["1"], "x": [""]}, {"file": "a;b.wav"})


def test_a_repeated_field_has_its_last_value() -> None:
    found = parse_form(body(('name="a"', b"1"), ('name="a"', b"2"), boundary="x"), "multipart/form-data; boundary=x")
    assert found.value("a") == "2"


@pytest.mark.parametrize(
    ("data", "content_type", "message"),
    [
        (b"{}", "application/json", "must be multipart/form-data with a boundary"),
        (b"", "multipart/form-data", "must be multipart/form-data with a boundary"),
        (b"", TYPE, "is cut off"),
        (body(('name="a"', b"1"))[:-6], TYPE, "is cut off"),
        (body(('filename="a"', b"1")), TYPE, "a part without a name"),
        (body(('name="a"', b"1")).replace(b"\r\n\r\n", b"\r\n"), TYPE, "a part without a name"),
        (body((f'name="a"\r\n{"a" * MAX_HEAD_BYTES}', b"1")), TYPE, f"at most {MAX_HEAD_BYTES} are allowed"),
        (body(*[('name="a"', b"1")] * (MAX_PARTS + 1)), TYPE, f"more than {MAX_PARTS} parts"),
        (body(('name="a"', b"1" * (MAX_VALUE_BYTES + 1))), TYPE, f"a has {MAX_VALUE_BYTES + 1} bytes"),
    ],
)
def test_other_bodies_are_refused(data: bytes, content_type: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_form(data, content_type)
