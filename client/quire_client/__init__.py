"""The Quire SDK.

from quire_client import Client

with Client.connect("localhost:50051") as client:
    print(client.chat("What does os.path.join do?").text)
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_client.api import *  # noqa: F403

    __version__: str


def __getattr__(name: str) -> Any:
    """Import a public name of `quire_client.api` on first use, so that the command can set gRPC's variables first."""
    if name == "__version__":
        return _version()
    if name != "__all__" and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")  # a submodule, e.g. `from quire_client import convert`
    api = importlib.import_module("quire_client.api")
    if name == "__all__" or name in api.__all__:
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__"), "__version__"})


def _version() -> str:
    """The version of the installed wheel, or of the checkout if there is no wheel."""
    for distribution in ("quire-client", "quire"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
