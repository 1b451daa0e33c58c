"""The SDK's logger, "quire". It logs broken and resumed streams, and retries, if the program configures logging."""

from __future__ import annotations

import logging

log = logging.getLogger("quire")
log.addHandler(logging.NullHandler())
