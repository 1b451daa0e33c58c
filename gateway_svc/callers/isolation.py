"""Isolation of tenants: their requests share no cached blocks (docs/adr/0020-identities.md)."""

from __future__ import annotations

import hashlib


def tenant_salt(owner: str, cache_salt: str) -> str:
    """The cache salt of a tenant's request, from the salt that the request has. Each pair has a salt of its own.

    The length in front separates owner and salt, which may contain any characters.
    """
    pair = f"{len(owner)}:{owner}{cache_salt}"
    return f"tenant:{hashlib.sha256(pair.encode()).hexdigest()}"
