"""Old answers that requests carry as drafts (docs/speculation.md): their bytes count like those of inputs."""

from __future__ import annotations

from scheduler_svc.core.sequence import Feature


class DraftBytes(Feature):
    """The size of an old answer, which the scheduler keeps, and sends with each row that is no fork."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
