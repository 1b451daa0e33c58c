"""Stop strings: matched across token boundaries, in output text only, with as little text held back as possible.

An Aho-Corasick automaton reads each character once. The match that ends first counts; if several end at the same
character, the stop string that is listed first. The automaton's state gives exactly the text that may still become part
of a match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gateway_svc.text.detokenizer import Detokenizer


class StopStrings:
    """The stop strings of one request, compiled; shared by its samples. Strings are not empty."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.first_chars = frozenset(stop[0] for stop in stops)
        self.edges: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.fails = [0]
        self.matches: list[int | None] = [None]  # index of the first listed stop string that ends here
        for index, stop in enumerate(self.stops):
            self._insert(index, stop)
        self._link()

    def new_matcher(self, *, include_stop: bool = False) -> StopMatcher:
        """A matcher at the start of a text."""
        return StopMatcher(self, include_stop=include_stop)

    def step(self, node: int, char: str) -> int:
        """The state after one more character: the longest suffix of the text that is a prefix of a stop string."""
        while char not in self.edges[node]:
            if node == 0:
                return 0
            node = self.fails[node]
        return self.edges[node][char]

    def _insert(self, index: int, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self.edges[node]:
                self.edges[node][char] = len(self.edges)
                self.edges.append({})
                self.depths.append(self.depths[node] + 1)
                self.fails.append(0)
                self.matches.append(None)
            node = self.edges[node][char]
        if self.matches[node] is None:
            self.matches[node] = index

    def _link(self) -> None:
        queue = deque(self.edges[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.edges[node].items():
                self.fails[child] = self.step(self.fails[node], char)
                queue.append(child)
            self._inherit_match(node)

    def _inherit_match(self, node: int) -> None:
        shorter = self.matches[self.fails[node]]
        own = self.matches[node]
        if shorter is not None and (own is None or shorter < own):
            self.matches[node] = shorter


class StopMatcher:
    """Matches one text. `match` is the stop string once it is complete; no text is released after it."""

    __slots__ = ("_held", "_include_stop", "_node", "_stops", "match")

    def __init__(self, stops: StopStrings, *, include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._node = 0
        self._held = ""
        self.match: str | None = None

    def push(self, text: str, *, can_match: bool = True) -> str:
        """Add text. Returns the text that can no longer become part of a match.

        If `can_match` is false, a stop string that ends in this text is ignored.
        """
        if self.match is not None or not text:
            return ""
        if self._node == 0 and self._stops.first_chars.isdisjoint(text):
            return text
        end = self._scan(text, can_match=can_match)
        whole = self._held + text[:end]
        if self.match is None:
            cut = len(whole) - self._stops.depths[self._node]
        else:
            cut = len(whole) if self._include_stop else len(whole) - len(self.match)
        self._held = whole[cut:] if self.match is None else ""
        return whole[:cut]

    def flush(self) -> str:
        """End the text. Returns the text held back, which did not become a match."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _scan(self, text: str, *, can_match: bool) -> int:
        """Read to the end of the text or of the first match. Returns the number of characters read."""
        for position, char in enumerate(text):
            self._node = self._stops.step(self._node, char)
            index = self._stops.matches[self._node]
            if index is not None and can_match:
                self.match = self._stops.stops[index]
                return position + 1
        return len(text)


class StoppedText:
    """The text of a sample that may end at a stop string."""

    __slots__ = ("_detokenizer", "_first_stop", "_matcher", "_num_tokens")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, *, first_stop: int = 0) -> None:
        """`first_stop`: the first output position whose token may complete a stop string."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._first_stop = first_stop
        self._num_tokens = 0  # number of tokens read so far

    @property
    def stop(self) -> str | None:
        """The stop string that matched; None: no match so far."""
        return self._matcher.match

    def read(self, ids: Sequence[int]) -> tuple[str, int]:
        """Add ids. Returns the released text, and how many of the ids belong to the output.

        If a stop string matches, the output ends with the id that completes it; the ids after it do not belong to it.
        """
        parts: list[str] = []
        for position in range(len(ids)):
            text = self._detokenizer.push(ids[position : position + 1])
            parts.append(self._matcher.push(text, can_match=self._num_tokens >= self._first_stop))
            self._num_tokens += 1
            if self._matcher.match is not None:
                return "".join(parts), position + 1
        return "".join(parts), len(ids)

    def flush(self) -> str:
        """End the text. Returns the text that was held back, cut before a stop string that it completes."""
        text = self._detokenizer.flush()
        if self._matcher.match is not None:
            return ""
        text = self._matcher.push(text, can_match=self._num_tokens > self._first_stop)
        return text if self._matcher.match is not None else text + self._matcher.flush()
