"""Stop strings, compared with a search in the whole text, and the amount of text that is held back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.text.detokenizer import Detokenizer
from gateway_svc.text.stop_strings import StoppedText, StopStrings


def reference(text: str, stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The definition: the match that ends first counts; on a tie, the first in the list."""
    found = [(text.find(stop) + len(stop), i) for i, stop in enumerate(stops) if stop in text]
    if not found:
        return text, None
    end, index = min(found)
    return text[: end if include_stop else end - len(stops[index])], stops[index]


@given(
    chunks=st.lists(st.text("abc", max_size=6), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    include_stop=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_any_split_gives_the_result_of_a_search_in_the_whole_text(
    chunks: list[str], stops: list[str], include_stop: bool
) -> None:
    matcher = StopStrings(stops).new_matcher(include_stop=include_stop)
    released = "".join(matcher.push(chunk) for chunk in chunks) + matcher.flush()
    assert (released, matcher.match) == reference("".join(chunks), stops, include_stop=include_stop)


@pytest.mark.parametrize(
    ("stops", "text", "released"),
    [
        (["END"], "text E", "text "),
        (["END"], "text EN", "text "),
        (["END"], "text ENx", "text ENx"),
        (["\n\n", "Human:"], "line\n", "line"),
        (["Human:"], "a Hum", "a "),
        (["aab"], "xaaa", "xa"),
        (["abc"], "plain", "plain"),
    ],
)
def test_only_text_that_may_become_a_match_is_held_back(stops: list[str], text: str, released: str) -> None:
    assert StopStrings(stops).new_matcher().push(text) == released


def test_among_matches_that_end_together_the_first_listed_counts() -> None:
    matcher = StopStrings(["bc", "abc"]).new_matcher()
    assert matcher.push("xabc") == "xa"
    assert matcher.match == "bc"
    matcher = StopStrings(["abc", "bc"]).new_matcher()
    assert matcher.push("xabc") == "x"
    assert matcher.match == "abc"


def test_the_match_that_ends_first_counts_before_list_order() -> None:
    matcher = StopStrings(["cde", "bc"]).new_matcher()
    assert matcher.push("abcde") == "a"
    assert matcher.match == "bc"


def test_nothing_is_released_after_a_match() -> None:
    matcher = StopStrings(["."]).new_matcher(include_stop=True)
    assert matcher.push("a.b") == "a."
    assert matcher.push("c") == ""
    assert matcher.flush() == ""


class Letters(Detokenizer):
    """A detokenizer whose ids are code points; 0 is held until the flush."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join(chr(id_) for id_ in ids if id_)

    def flush(self) -> str:
        return "!"


def test_ids_after_the_match_do_not_belong_to_the_output() -> None:
    text = StoppedText(Letters(), StopStrings(["cd"]).new_matcher())
    assert text.read([ord(c) for c in "abc"]) == ("ab", 3)
    assert text.read([ord(c) for c in "dxyz"]) == ("", 1)
    assert text.stop == "cd"
    assert text.flush() == ""


def test_the_flush_can_complete_a_stop_string() -> None:
    text = StoppedText(Letters(), StopStrings(["b!"]).new_matcher())
    assert text.read([ord("a"), ord("b")]) == ("a", 2)
    assert text.flush() == ""
    assert text.stop == "b!"


def test_without_a_match_the_flush_releases_the_held_text() -> None:
    text = StoppedText(Letters(), StopStrings(["bcd"]).new_matcher())
    assert text.read([ord("a"), ord("b"), 0]) == ("a", 3)
    assert text.flush() == "b!"
    assert text.stop is None


@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    first_stop=st.integers(0, 26),
    num_first=st.integers(0, 24),
)
@settings(max_examples=400, deadline=None)
def test_a_stop_string_counts_only_if_it_ends_at_or_after_the_first_stop(
    text: str, stops: list[str], first_stop: int, num_first: int
) -> None:
    """One character per token; the match does not depend on how the tokens are grouped."""
    ends = [
        (end, i) for end in range(first_stop + 1, len(text) + 1) for i, s in enumerate(stops) if text[:end].endswith(s)
    ]
    sample = StoppedText(Letters(), StopStrings(stops).new_matcher(include_stop=True), first_stop=first_stop)
    ids = [ord(char) for char in text]
    parts = [sample.read(ids[:num_first])]
    if sample.stop is None:
        parts.append(sample.read(ids[num_first:]))
    if ends:
        end, index = min(ends)
        assert (sample.stop, "".join(part for part, _ in parts)) == (stops[index], text[:end])
        assert sum(count for _, count in parts) == end
    else:
        assert sample.stop is None
        assert "".join(part for part, _ in parts) + sample.flush() == text + "!"
