"""For every kind of tokenizer, the deltas together equal decode() of all ids; no delta has an incomplete character."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.text.bundle import Tokenizer
from tests.unit.gateway.tokenizer_kinds import KINDS, bundle_files


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer.from_files(bundle_files(KINDS[kind]()))


@functools.cache
def vocab_size_of(kind: str) -> int:
    return KINDS[kind]().get_vocab_size()


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], *, skip_special_tokens: bool) -> str:
    detokenizer = tokenizer.new_detokenizer(skip_special_tokens=skip_special_tokens)
    parts, start = [], 0
    for size in [*sizes, len(ids)]:
        parts.append(detokenizer.push(ids[start : start + size]))
        start += size
    return "".join(parts) + detokenizer.flush()


SIZES = st.lists(st.integers(1, 5), max_size=60)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=SIZES, skip=st.booleans())
@settings(max_examples=150)
def test_deltas_of_random_ids_add_up_to_decode(kind: str, data: st.DataObject, sizes: list[int], skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, vocab_size_of(kind) + 2), max_size=60))  # also ids without a token
    tokenizer = tokenizer_of(kind)
    assert stream(tokenizer, ids, sizes, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


SCRIPTS = st.text(
    st.one_of(
        st.characters(blacklist_categories=["Cs"]), st.sampled_from("😀👩‍👧🇩🇪你好世界こんにちは안녕e\u0301 \n▁ñ")
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma_style"])
@given(text=SCRIPTS, sizes=SIZES)
@settings(max_examples=150)
def test_text_of_any_script_streams_without_incomplete_characters(kind: str, text: str, sizes: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    streamed = stream(tokenizer, ids, sizes, skip_special_tokens=True)
    assert streamed == tokenizer.decode(ids, skip_special_tokens=True)
    assert ("\ufffd" in streamed) == ("\ufffd" in text)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_an_emoji_is_released_only_when_it_is_complete(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("🦜!", add_special_tokens=False)
    detokenizer = tokenizer.new_detokenizer(skip_special_tokens=True)
    deltas = [detokenizer.push([id_]) for id_ in ids]
    assert [delta for delta in deltas if delta] in (["🦜", "!"], ["🦜!"])


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("a🦜", add_special_tokens=False)[:-1]
    detokenizer = tokenizer.new_detokenizer(skip_special_tokens=True)
    assert detokenizer.push(ids) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("<|im_start|>Hi<|im_end|>", add_special_tokens=False)
    assert stream(tokenizer, ids, [], skip_special_tokens=True) == "Hi"
    assert stream(tokenizer, ids, [], skip_special_tokens=False) == "<|im_start|>Hi<|im_end|>"


def test_the_generic_window_stays_small() -> None:
    tokenizer = tokenizer_of("word_piece")
    detokenizer = tokenizer.new_detokenizer(skip_special_tokens=True)
    ids = [2, 3, 4, 5, 6, 7] * 200
    assert "".join(detokenizer.push([id_]) for id_ in ids) == tokenizer.decode(ids, skip_special_tokens=True)
    assert len(detokenizer._ids) <= 64  # type: ignore[attr-defined]
