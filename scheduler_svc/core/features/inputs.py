"""Inputs besides tokens: embeddings and images that take positions of a prompt.

The prompt has content ids at these positions. A row carries the inputs whose positions are not all computed. Work on
an image (its encoder) counts against the budget of a step like tokens, in parts if it is larger than a step; the
positions of an image wait until all work on it is planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from prefix_index.hashing import extra_keys
from scheduler_svc.core.messages import RowAssignment
from scheduler_svc.core.sequence import Feature, Sequence
from scheduler_svc.core.worker_state import StepPlan, WorkerPart, WorkerState
from step_protocol.features import ImageSteps, ImageWork
from step_protocol.messages import StepBatch


class Carried(Protocol):
    """An input that takes positions of a prompt in place of tokens. The core does not read its data."""

    @property
    def start(self) -> int:
        """Its first position."""

    @property
    def length(self) -> int:
        """Its number of positions."""

    @property
    def digest(self) -> bytes:
        """16 bytes that depend on its content."""


class Inputs(Feature):
    """The inputs of a request, in the order of their positions. `num_bytes`: the size of their data. `image_work`: per
    image, its first position, and its work as a number of tokens.
    """

    def __init__(self, items: Seq[Carried], num_bytes: int, image_work: Seq[tuple[int, int]] = ()) -> None:
        self.items = items
        self.num_bytes = num_bytes
        self.image_work = image_work

    def after(self, num_computed_tokens: int) -> Seq[Carried]:
        """The inputs that are needed to compute the positions from `num_computed_tokens` on."""
        return [carried for carried in self.items if carried.start + carried.length > num_computed_tokens]

    def block_keys(self, block_size: int) -> Mapping[int, bytes]:
        """The digests of the inputs that begin in each block."""
        return extra_keys(self.items, block_size)


class InputRows(WorkerPart):
    """The images of one worker's rows that are not computed yet."""

    def __init__(self, worker: WorkerState) -> None:
        super().__init__(worker)
        self._waiting: dict[int, list[ImageWork]] = {}  # by row, in order
        self._planned: list[ImageWork] = []  # in the step that is being planned

    def open(self, seq: Sequence, opened: RowAssignment, plan: StepPlan) -> None:
        found = seq.group.features.find(Inputs)
        if found is None or opened.fork_of_row is not None:
            return
        opened.inputs = found.after(opened.num_computed_tokens)
        if not opened.inputs:
            return
        starts, row = {carried.start for carried in opened.inputs}, opened.row
        work = [ImageWork(row, start, 0, total) for start, total in found.image_work if start in starts]
        if work:
            self._waiting[row] = work
            self.worker.chunk_parts[row] = self

    def plan_chunk(self, row: int, count: int, plan: StepPlan) -> int:
        """Plan the work on images that begin among the next `count` tokens of a row. A token of an image waits until
        all work on the image is planned.
        """
        begin, waiting = int(self.worker.rows.num_computed_tokens[row]), self._waiting[row]
        while waiting and count > 0:
            image = waiting[0]
            if image.start > begin:
                return min(count, image.start - begin)
            part = min(image.total - image.done, plan.budget)
            plan.budget -= part
            plan.has_part_work = True
            waiting[0] = image._replace(done=image.done + part)
            self._planned.append(waiting[0])
            if waiting[0].done < image.total:
                return 0
            waiting.pop(0)
            count = min(count, plan.budget)
        if not waiting:
            del self.worker.chunk_parts[row]
        return count

    def fill(self, batch: StepBatch) -> None:
        if self._planned:
            batch.add(ImageSteps(tuple(self._planned)))
            self._planned = []

    def close(self, row: int) -> None:
        self._waiting.pop(row, None)


Inputs.part = InputRows
