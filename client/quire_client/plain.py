"""The base of the SDK's results, and their form as JSON."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any, ClassVar


class Result:
    """Base of all results."""

    __slots__: tuple[str, ...] = ()
    __match_args__: ClassVar[tuple[str, ...]]  # names of the fields

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary that `json.dumps` accepts."""
        return dict(plain(self))


def plain(value: Any) -> Any:
    """A structure of dataclasses as one that `json.dumps` accepts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bytes):  # the bytes of a token may not be valid UTF-8
        return value.decode(errors="backslashreplace")
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


class TokenCounts(Result):
    """Sums of the fields of `Usage`."""

    __slots__ = ()
    prompt_tokens: int
    output_tokens: int
    discarded_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens + self.discarded_tokens


class Chances(Result):
    """Meaning of the log probabilities of an `Answer`."""

    __slots__ = ()
    logprobs: tuple[float, ...]

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Probabilities of each choice or level; of a predicate: of true and false."""
        return tuple(map(math.exp, self.logprobs))

    @property
    def score(self) -> float:
        """The mean of the levels, which count from 0."""
        return math.fsum(i * chance for i, chance in enumerate(self.probabilities))
