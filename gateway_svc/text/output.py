"""The text of one sample: detokenizer and stop strings combined."""

from __future__ import annotations

from collections.abc import Sequence

from gateway_svc.text.detokenizer import Detokenizer
from gateway_svc.text.stop_strings import StopMatcher


class SampleText:
    """Turns a sample's ids into text. The text released after k tokens depends only on these k tokens, not on their
    grouping into pushes, so a resumed stream continues at exactly the same byte.
    """

    __slots__ = ("_detokenizer", "_first_stop", "_matcher", "_num_tokens")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher | None = None, *, first_stop: int = 0) -> None:
        """`first_stop`: the first output position whose token may complete a stop string."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._first_stop = first_stop
        self._num_tokens = 0  # number of tokens pushed so far

    @property
    def stop(self) -> str | None:
        """The stop string that matched; None: no match so far."""
        return None if self._matcher is None else self._matcher.match

    def push(self, ids: Sequence[int]) -> tuple[str, int]:
        """Add ids. Returns the released text, and how many of the ids belong to the output.

        If a stop string matches, the output ends with the id that completes it; the ids after it do not belong to it.
        """
        if self._matcher is None:
            return self._detokenizer.push(ids), len(ids)
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
        if self._matcher is None:
            return text
        if self._matcher.match is not None:
            return ""
        text = self._matcher.push(text, can_match=self._num_tokens > self._first_stop)
        return text if self._matcher.match is not None else text + self._matcher.flush()
