"""Whether the services are installed, and the command that installs them."""

from __future__ import annotations

import importlib.util

SERVICES = {"gateway": "gateway_svc", "scheduler": "scheduler_svc", "worker": "worker_svc"}


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def install_command(extra: str) -> str:
    """The command that installs a service with its requirements; `all`: every service."""
    return f"`pip install 'quire-server[{extra}]'`, or `pip install '.[{extra}]'` in a checkout of Quire"
