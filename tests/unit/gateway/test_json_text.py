"""JSON of bodies: refused before many values exist, decoded in parts, and equal to what `json` decodes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.http import json_text
from gateway_svc.http.json_text import (
    MAX_VALUES,
    TooManyValuesError,
    check_values,
    decode,
    encode,
    encoded_list,
    joined_lists,
)

MANY = MAX_VALUES + 1
TOO_MANY = {
    "keys": b"{%b}" % b",".join(b'"%d":1' % number for number in range(MANY)),
    "biases": b'{"logit_bias":{%b}}' % b",".join(b'"%d":1' % number for number in range(MANY)),
    "empty lists": b'{"x":[%b]}' % b",".join([b"[]"] * MANY),
    "empty objects": b'{"x":[%b]}' % b",".join([b"{}"] * MANY),
    "nested lists": b"[" * MANY + b"]" * MANY,
    "strings": b'{"x":[%b]}' % b",".join([b'"a\\"b"'] * MANY),
    "numbers beside a string": b'{"x":[%b,"a"]}' % b",".join([b"1"] * MANY),
    "numbers beside a long string": b'{"x":[%b,"%b"]}' % (b",".join([b"1"] * MANY), b"a" * 600_000),
    "numbers beside a list": b'{"x":[%b,[]]}' % b",".join([b"1"] * MANY),
}
values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize("name", TOO_MANY)
def test_many_values_are_refused_before_they_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "_decoded", None)
    with pytest.raises(TooManyValuesError, match=f"more than {MAX_VALUES} strings, lists, objects"):
        decode(TOO_MANY[name])


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": [[5] * 2000] * 1024},
        {"prompt": list(range(1_000_000))},
        {"prompt": 'say "[{,:}]" \\ ' * 100_000},
        {"messages": [{"role": "user", "content": "hello, [you]"}] * 10_000},
    ],
    ids=["prompts of ids", "ids", "text", "messages"],
)
def test_large_bodies_of_few_values_are_decoded_in_parts(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, whole = [], json_text.VALUE.decode

    def counted(part: bytes) -> Any:
        sizes.append(len(part))
        return whole(part)

    monkeypatch.setattr(json_text, "VALUE", SimpleNamespace(decode=counted))
    assert decode(json.dumps(value).encode()) == value
    assert max(sizes) <= 2 * json_text.PART_BYTES or isinstance(value["prompt"], str)


@settings(max_examples=200)
@given(value=values, part_bytes=st.integers(1, 60), is_ascii=st.booleans())
def test_parts_of_any_size_give_the_value(value: Any, part_bytes: int, is_ascii: bool) -> None:
    text = json.dumps({"x": value}, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "PART_BYTES", part_bytes)
        check_values(text)
        assert decode(text) == {"x": value}


def test_numbers_are_those_of_the_standard_library_and_not_decoded_by_msgspec() -> None:
    """msgspec takes 10 us for some: 60 KB of them held the interpreter for 0.1 s."""
    texts = ["1e308", "9e307", "1e-308", "2.2250738585072011e-308", "-0.0", "1.5", "0.1", "123456789012345678.5"]
    assert decode(f"[{','.join(texts)}]".encode()) == json.loads(f"[{','.join(texts)}]")
    assert json_text.VALUE.float_hook is not None


@pytest.mark.parametrize("text", [b"[1,,2]", b'{"a":NaN}', b"[1e999]", b'"\\ud800"', b"[1", b"", b"\xff", b'"\xff"'])
def test_what_is_not_json(text: bytes) -> None:
    with pytest.raises(ValueError):
        decode(text)


def test_what_is_too_deep() -> None:
    with pytest.raises(RecursionError):
        decode(b"[" * 30_000 + b"]" * 30_000)


def test_large_values_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, whole = [], msgspec.json.encode

    def counted(value: Any) -> bytes:
        sizes.append(len(value))
        return whole(value)

    monkeypatch.setattr(msgspec.json, "encode", counted)
    values = [{"logprob": -0.5 * number} for number in range(10_000)]
    answer = {"found": joined_lists([encoded_list(values[:1]), encoded_list([]), encoded_list(values[1:])])}
    assert json.loads(encode(answer)) == {"found": values}
    assert max(sizes) == json_text.PART_VALUES


def test_integers_of_any_size_are_encoded() -> None:
    assert encode({"x": 2**70}) == b'{"x":1180591620717411303424}'
