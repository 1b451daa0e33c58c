"""The text of one sample: detokenizer and stop strings together, token by token where stops need it."""

from __future__ import annotations

from collections.abc import Sequence

from gateway_svc.text.detokenizer import Detokenizer
from gateway_svc.text.stop_strings import StopMatcher


class SampleText:
    """Turns a sample's ids into text. What is released after k tokens depends on those k tokens only, not on how
    they were grouped, so a stream that is continued elsewhere goes on at exactly the same byte.
    """

    __slots__ = ("_detokenizer", "_first_stop", "_matcher", "_num_tokens")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher | None = None, *, first_stop: int = 0) -> None:
        """`first_stop`: the first output position whose token may complete a stop string."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._first_stop = first_stop
        self._num_tokens = 0  # so far

    @property
    def stop(self) -> str | None:
        """The stop string that matched."""
        return None if self._matcher is None else self._matcher.match

    def push(self, ids: Sequence[int]) -> tuple[str, int]:
        """Take ids; returns the text released and how many of the ids belong to the output.

        Fewer than given: a stop string is complete with the last of these, the rest was generated past it.
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
        """The end: everything that was held back. May still complete a stop string."""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        if self._matcher.match is not None:
            return ""
        text = self._matcher.push(text, can_match=self._num_tokens > self._first_stop)
        return text if self._matcher.match is not None else text + self._matcher.flush()
