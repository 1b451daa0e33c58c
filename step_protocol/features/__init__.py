"""The columns of features: one `Part` each, written and read by itself alone. Other packages import them from here."""

from __future__ import annotations

from step_protocol.columns import Part
from step_protocol.features.beams import *  # noqa: F403
from step_protocol.features.beams import BeamCandidates, BeamMoves
from step_protocol.features.images import *  # noqa: F403
from step_protocol.features.images import ImageSteps
from step_protocol.features.logprobs import *  # noqa: F403
from step_protocol.features.logprobs import PromptLogprobs
from step_protocol.features.pooling import *  # noqa: F403
from step_protocol.features.pooling import PooledRows
from step_protocol.features.snapshots import *  # noqa: F403
from step_protocol.features.snapshots import TakenSnapshots
from step_protocol.features.thinking import *  # noqa: F403

STEP_PARTS: tuple[type[Part], ...] = (BeamMoves, ImageSteps, TakenSnapshots)
ANSWER_PARTS: tuple[type[Part], ...] = (PromptLogprobs, BeamCandidates, PooledRows)
