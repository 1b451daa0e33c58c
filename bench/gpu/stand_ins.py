"""Stand-ins for small packages that a GPU machine may lack, so that the engine's sections run without them.

Digests are those of hashlib: equal input gives equal digests in one process, but not those of other machines. The whole
path through gRPC needs the real packages, which bench/gpu/pack collects.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import partial
from types import ModuleType
from typing import Any


def install_stand_ins() -> list[str]:
    """Installs them for the packages that are missing here, and returns their names."""
    missing = [name for name in MAKERS if name not in sys.modules and importlib.util.find_spec(name) is None]
    for name in missing:
        sys.modules[name] = MAKERS[name]()
    return missing


def _xxhash() -> ModuleType:
    module: Any = ModuleType("xxhash")
    for bits in (64, 128):
        make = partial(_digest, bits // 8)
        name = f"xxh3_{bits}"
        setattr(module, name, make)
        setattr(module, f"{name}_digest", lambda data, make=make: make(data).digest())
        setattr(module, f"{name}_hexdigest", lambda data, make=make: make(data).hexdigest())
        setattr(module, f"{name}_intdigest", lambda data, make=make: int.from_bytes(make(data).digest(), "big"))
    return module


def _digest(size: int, data: bytes = b"") -> Any:
    return hashlib.blake2b(data, digest_size=size)


MAKERS = {"xxhash": _xxhash}
