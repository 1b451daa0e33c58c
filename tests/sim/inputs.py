"""Inputs besides tokens in the simulation: a few contents, whose ids show in prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prefix_index.hashing import FIRST_CONTENT_ID, content_digest, content_ids
from scheduler_svc.core.features.public_prefix import PublicPrefix
from scheduler_svc.core.sequence import SequenceGroup
from tests.builders import inputs_in

NUM_CONTENTS = 3
MAX_LENGTH = 256
SALT_SHIFT = 20  # bits of a token id; above them the first token after a public prefix has its salt


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


class Border(PublicPrefix):
    """The end of a public prefix. The content of the token after it depends on the salt, as if it were an input."""

    def __init__(self, prompt: Sequence[int], start: int, block_size: int) -> None:
        self.start, self.end, self.ids = start, start + 1, [prompt[start]]
        self.digest = b"salt %d" % (prompt[start] >> SALT_SHIFT)
        super().__init__(start // block_size, self.digest)


def without_salt(prompt: Sequence[int]) -> list[int]:
    """The prompt as gateways send it."""
    return [token if token >= FIRST_CONTENT_ID else token % (1 << SALT_SHIFT) for token in prompt]


def borders_of(prompt: Sequence[int], block_size: int) -> list[Border]:
    """The border of a prompt's public prefix, if it has one."""
    found = [i for i, token in enumerate(prompt) if 1 << SALT_SHIFT <= token < FIRST_CONTENT_ID]
    return [Border(prompt, start, block_size) for start in found]


def contents_in(group: SequenceGroup) -> list[SimInput | Border]:
    """The parts of a request that change the content of its tokens."""
    border = group.features.find(Border)
    return [*([] if border is None else [border]), *inputs_in(group)]


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


def with_contents(token_ids: np.ndarray, inputs: Iterable[SimInput | Border]) -> np.ndarray:
    """The token ids with the ids of the real contents at the positions of the inputs."""
    known = token_ids.copy()
    for item in inputs:
        known[item.start : item.end] = item.ids
    return known
