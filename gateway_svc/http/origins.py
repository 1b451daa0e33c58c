"""Which web pages may call: CORS for permitted origins, and without keys no page of another site.

A browser sends requests of any page to servers of its machine and network. Where clients need no keys, nothing else
tells such a request from the user's own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from svc_common.errors import PermissionDeniedError

ANY = "*"
MAX_SHOWN = 200
# Names that no site on the internet can have: a page can point only a name of its own to this address (DNS rebinding).
LOCAL_SUFFIXES = (".localhost", ".svc", ".cluster.local")
EXPOSED_HEADERS = ("x-request-id", "x-ignored-fields", "x-should-retry", "retry-after", "retry-after-ms")


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The app with CORS headers for these origins; `*` is any origin. Without origins, the app is unchanged.

    The middleware answers the preflight requests of browsers, which have no API key.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
        max_age=3600,
    )


@dataclass(frozen=True, slots=True)
class SitePolicy:
    """Which hosts and origins a request without a key may name (--http-allow-host, --http-allow-origin)."""

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()

    def check(self, headers: Headers, method: str) -> None:
        """Raise PermissionDeniedError for a request of another site's page."""
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if not self._permits_host(host):
            raise PermissionDeniedError(
                "this port needs no key, so it answers only at an IP address or a local name, not at "
                f"{host[:MAX_SHOWN]!r}; require keys, or permit the name by --http-allow-host"
            )
        if ANY in self.origins or origin in self.origins:
            return
        is_foreign = bool(origin) and origin.partition("://")[2] != host
        if is_foreign or not _is_own(headers.get("sec-fetch-site", ""), headers.get("sec-fetch-mode", ""), method):
            raise PermissionDeniedError(
                f"this port needs no key, so it refuses requests of another site's page ({origin[:MAX_SHOWN]!r}); "
                "require keys, or permit the origin by --http-allow-origin"
            )

    def _permits_host(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        # Browsers always name a host. `*.example.com` is every name below it.
        return not host or is_local(name) or any(fnmatchcase(name, permitted) for permitted in self.hosts)


def _is_own(site: str, mode: str, method: str) -> bool:
    """Whether a request comes from this server's own page, from no page, or from a link that the user follows."""
    return site in ("", "none", "same-origin") or (mode == "navigate" and method == "GET")


def is_local(name: str) -> bool:
    """Whether a host is an IP address, or a name that nobody can register."""
    try:
        return bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return "." not in name or name.endswith(LOCAL_SUFFIXES)
