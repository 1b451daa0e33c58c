"""API keys. Each file of a folder is an owner, each of its lines a key, as `sha256:HEX` or in plaintext.

    chart (gateway.apiKeys)   a Secret mounted as the folder; each entry is an owner
    by hand                   quire key new team-a --dir keys

Files may be added, changed and removed while the gateway runs; to replace a key, add a line first, and later remove the
old one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway_svc.callers.caller import Caller, CallersError, owner_name
from svc_common.security.tls import Reread

log = logging.getLogger(__name__)

PREFIX = b"sha256:"
HASHED = re.compile(rb"sha256:[0-9a-fA-F]{64}")
INDEX_BYTES = 8
KEY_ID_CHARS = 12  # length of the digest's beginning in the audit log


class ApiKeysError(CallersError):
    """The folder cannot be read, a line is invalid, or there is no key at start."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """Owners by digest, under the first bytes of the digest. The other bytes are compared in constant time."""

    owners: Mapping[bytes, tuple[bytes, str]]
    num_plaintext: int

    def owner_of(self, digest: bytes) -> str | None:
        stored, owner = self.owners.get(digest[:INDEX_BYTES], (b"", ""))
        return owner if hmac.compare_digest(stored, digest) else None


class ApiKeys:
    """The accepted keys, as digests. Read again at most every 5 s."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic, flag: str = "--api-keys") -> None:
        self._keys = Reread(lambda: _read(folder, flag), "API keys", clock)
        keys = self._keys()
        if not keys.owners:
            raise ApiKeysError(f"{flag} {folder}: the folder holds no key; `quire key new OWNER --dir DIR` adds one")
        log.info("%s: %d API keys", flag, len(keys.owners))
        if keys.num_plaintext:
            words = "%s: %d of %d keys are stored in plaintext; `quire key hash` prints the line to store instead"
            log.warning(words, flag, keys.num_plaintext, len(keys.owners))

    def find(self, key: str) -> Caller | None:
        """The caller with this key; None if the key is not accepted. The time reveals nothing about a key."""
        digest = _digest(key.encode("utf-8", "surrogateescape"))
        owner = self._keys().owner_of(digest)
        return None if owner is None else Caller(owner, f"key:{digest.hex()[:KEY_ID_CHARS]}")


def _read(folder: Path, flag: str) -> _Keys:
    """The keys of a folder. Hidden files are skipped: a kubelet creates them beside mounted Secrets.

    Raises ApiKeysError, which never contains a key.
    """
    owners: dict[bytes, tuple[bytes, str]] = {}
    num_plaintext = 0
    try:
        files = [path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file()]
        lines = [(path, number, line) for path in files for number, line in _lines_of(path)]
    except OSError as error:
        raise ApiKeysError(f"{flag} {folder}: {error.strerror or error}") from None
    for path, number, line in lines:
        is_hashed = line.startswith(PREFIX)
        if is_hashed and not HASHED.fullmatch(line):
            raise ApiKeysError(f"{flag} {path}, line {number}: not {PREFIX.decode()} and 64 hexadecimal digits")
        digest = bytes.fromhex(line.removeprefix(PREFIX).decode()) if is_hashed else _digest(line)
        owners[digest[:INDEX_BYTES]] = digest, owner_name(path.name)
        num_plaintext += not is_hashed
    return _Keys(owners, num_plaintext)


def _lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers and text of the lines that are not empty."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            yield number, line.strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
