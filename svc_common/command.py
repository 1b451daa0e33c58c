"""Starts the command of a service. Imports only the standard library, so that it can report missing packages."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

OWN_PACKAGES = {"gateway_svc", "scheduler_svc", "worker_svc", "svc_common", "prefix_index", "step_protocol"}
OWN_PACKAGES |= {"grammars", "request_fields", "hub_models", "quire_client", "quire"}


def run_command(service: str, module: str, *, needed_later: Sequence[str] = ()) -> None:
    """Call `main` of the module. If a package is missing, exit with status 1 and name the extra that installs it.

    `needed_later`: packages that the module imports only after its start.
    """
    try:
        for name in needed_later:
            if importlib.util.find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OWN_PACKAGES:
            raise
        sys.exit(
            f"quire-{service}: the package {missing} is not installed; run `pip install 'quire-server[{service}]'`, or "
            f"`pip install '.[{service}]'` in a checkout of Quire"
        )
    main()
