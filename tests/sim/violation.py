"""The complaint of symbolic workers, and the mark that a failed row leaves behind."""

from __future__ import annotations

import numpy as np

POISON = np.uint64(0xDEAD)  # content of slots that a failed row has written


class Violation(AssertionError):
    """The core sent a step that a real worker would compute wrongly or refuse."""
