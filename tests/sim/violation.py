"""What the symbolic workers complain about, and what a failed row leaves behind."""

from __future__ import annotations

import numpy as np

POISON = np.uint64(0xDEAD)  # what a failed row leaves in its slots


class Violation(AssertionError):
    """The core sent a step that a real worker would compute wrongly or refuse."""
