"""Inputs besides tokens in the simulation: a few contents, whose ids show in prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prefix_index.hashing import FIRST_CONTENT_ID, content_digest, content_ids

NUM_CONTENTS = 3
MAX_LENGTH = 256


@dataclass(frozen=True, slots=True)
class SimInput:
    """`length` positions of a content, from position `start` of the prompt on."""

    start: int
    length: int
    content: int

    @property
    def ids(self) -> list[int]:
        return IDS[self.content][: self.length]

    @property
    def digest(self) -> bytes:
        return content_digest(bytes([self.content]))

    @property
    def end(self) -> int:
        return self.start + self.length


def _ids_of(content: int) -> list[int]:
    return np.frombuffer(content_ids(SimInput(0, 0, content).digest, MAX_LENGTH), "<u4").tolist()


IDS = [_ids_of(content) for content in range(NUM_CONTENTS)]
PLACES = {id_: (content, index) for content, ids in enumerate(IDS) for index, id_ in enumerate(ids)}


def inputs_of(prompt: Sequence[int]) -> list[SimInput]:
    """The inputs of a prompt, by the content ids in it."""
    found: list[SimInput] = []
    for position, token in enumerate(prompt):
        if token < FIRST_CONTENT_ID:
            continue
        content, index = PLACES[token]
        if index == 0:
            found.append(SimInput(position, 1, content))
        else:
            last = found.pop()
            assert (last.content, last.length, last.end) == (content, index, position)
            found.append(SimInput(last.start, index + 1, content))
    return found


def with_contents(token_ids: np.ndarray, inputs: Iterable[SimInput]) -> np.ndarray:
    """The token ids with the ids of the real contents at the positions of the inputs."""
    known = token_ids.copy()
    for item in inputs:
        known[item.start : item.end] = item.ids
    return known
