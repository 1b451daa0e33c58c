"""The file of --key-limits: a table of limits per owner, read again when it changes.

    [default]                     # owners without a table of their own
    requests_per_s = 20
    tokens_per_min = 200_000      # prompt and output tokens
    max_streams = 50              # open requests
    max_rows = 64                 # samples and beams of open requests
    record_bytes = 268_435_456    # all stored requests and sessions (docs/sessions.md)
    max_records = 10_000
    min_priority = 0
    models = ["llama", "qwen"]

    [owners.team-a]               # overrides these settings; the others are from [default]
    tokens_per_min = 2_000_000

A limit that is not set does not apply.
"""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from svc_common.config import SettingError
from svc_common.security.tls import Reread


class LimitsError(SettingError):
    """The file cannot be used; the message names the table and the setting."""


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """The limits of one owner. None: no limit."""

    requests_per_s: float | None = None
    tokens_per_min: float | None = None
    max_streams: int | None = None
    max_rows: int | None = None
    record_bytes: int | None = None
    max_records: int | None = None
    min_priority: int | None = None
    models: frozenset[str] | None = None

    @property
    def is_counted(self) -> bool:
        """Whether requests must be counted."""
        return not (self.requests_per_s is self.tokens_per_min is self.max_streams is self.max_rows is None)


NO_LIMITS = OwnerLimits()
RANGES = {
    "requests_per_s": (0.001, 1e6),
    "tokens_per_min": (1, 1e12),
    "max_streams": (1, 10**6),
    "max_rows": (1, 10**6),
    "record_bytes": (1, 2**50),
    "max_records": (1, 10_000),
    "min_priority": (-1000, 1000),
}
WHOLE = ("max_streams", "max_rows", "record_bytes", "max_records", "min_priority")


class LimitsFile:
    """The limits of each owner. An invalid new version is logged, and the previous limits stay in force."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = Reread(lambda: read_limits(path), "limits", clock)

    def of(self, owner: str) -> OwnerLimits:
        default, owners = self._file()
        return owners.get(owner, default)


def read_limits(path: Path) -> tuple[OwnerLimits, dict[str, OwnerLimits]]:
    """The default limits, and those of the named owners. Raises LimitsError."""
    where = f"--key-limits {path}"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LimitsError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    owners = tables.pop("owners", {})
    default = _checked(tables.pop("default", {}), f"{where}: [default]")
    if tables or not isinstance(owners, dict):
        raise LimitsError(f"{where}: {', '.join(tables) or 'owners'} is not a table; use [default] and [owners.NAME]")
    return OwnerLimits(**default), {
        owner: OwnerLimits(**default | _checked(table, f"{where}: [owners.{owner}]")) for owner, table in owners.items()
    }


def _checked(table: Any, where: str) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise LimitsError(f"{where} is not a table")
    return {name: _value(name, value, where) for name, value in table.items()}


def _value(name: str, value: Any, where: str) -> Any:
    if name == "models":
        if not isinstance(value, list) or not all(isinstance(model, str) for model in value):
            raise LimitsError(f"{where}: models is not a list of names")
        return frozenset(value)
    if name not in RANGES:
        known = ", ".join(field.name for field in fields(OwnerLimits))
        raise LimitsError(f"{where}: {name} is not a limit; there are {known}")
    low, high = RANGES[name]
    kinds = (int,) if name in WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or not low <= value <= high:
        noun = "a whole number" if name in WHOLE else "a number"
        raise LimitsError(f"{where}: {name} is {value!r}; must be {noun} from {low:g} to {high:g}")
    return value
