"""The caller of the current call, and the ids of its requests inside the services."""

from __future__ import annotations

import hashlib
import re
from contextvars import ContextVar
from dataclasses import dataclass

from svc_common.config import SettingError

OWNER = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class CallersError(SettingError):
    """A setting about callers cannot be used; the message names the flag and says what to do."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The result of a check of credentials. `credential` identifies them in the audit log and is not a secret."""

    owner: str = ""  # owns request ids and records, has limits, is the tenant; empty: callers are not identified
    credential: str = ""

    @property
    def sender(self) -> str:
        """Has places of its own while its requests arrive. Tokens of two tenants may have one subject, or none."""
        return self.credential and f"{self.owner}/{self.credential}"


ANONYMOUS = Caller()

# The caller of the current call. Tasks that a call starts inherit it.
current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANONYMOUS)


def scoped(request_id: str) -> str:
    """The id of a request inside the services: `OWNER/request_id`, so that no other owner can abort or resume it.

    A client's request id cannot contain `/`.
    """
    owner = current_caller.get().owner
    return f"{owner}/{request_id}" if owner else request_id


def tenant_salt(owner: str, cache_salt: str) -> str:
    """The cache salt of a tenant's request, from the salt that the request has: tenants share no cached blocks.

    The length in front separates owner and salt, which may contain any characters.
    """
    pair = f"{len(owner)}:{owner}{cache_salt}"
    return f"tenant:{hashlib.sha256(pair.encode()).hexdigest()}"


def owner_name(name: str) -> str:
    """The name, or its digest if it cannot be part of a request id."""
    return name if OWNER.fullmatch(name) else hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]
