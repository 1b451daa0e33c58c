"""The SDK's logger, "quire": breaks and resumptions of streams, retries. Silent until the program sets up logging."""

from __future__ import annotations

import logging

log = logging.getLogger("quire")
log.addHandler(logging.NullHandler())
