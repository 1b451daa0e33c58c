"""Encrypts stored values with AES-GCM. A value is bound to its record and field, so it cannot be moved to another."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from svc_common.config import SettingError
from svc_common.security.tls import Reread

KEY_BYTES = 32
NONCE_BYTES = 12
ID_BYTES = 4
# The first byte of a stored value is its form. Without it, a gateway without keys takes encrypted bytes for a message
# whenever they happen to parse as one.
PLAIN = b"\x00"
ENCRYPTED = b"\x01"


class RecordKeyError(SettingError):
    """--record-key-file cannot be used."""


class UnreadableValueError(ValueError):
    """A stored value was not written with one of the keys, or was changed."""


class Cipher:
    """Converts values to their stored form and back: unencrypted, after the byte of their form.

    `place` names the record and the field of the value. `open` raises UnreadableValueError.
    """

    def seal(self, data: bytes, place: bytes) -> bytes:
        return PLAIN + data

    def open(self, stored: bytes, place: bytes) -> bytes:
        if not stored.startswith(PLAIN):
            raise UnreadableValueError("the value is encrypted, and this gateway has no --record-key-file")
        return stored[len(PLAIN) :]


class AesCipher(Cipher):
    """Encrypts with the first key and decrypts with any of them. Stored: form, key id, nonce, ciphertext with tag."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        make = _load_aes()
        self._keys = {_key_id(key): make(key) for key in keys}
        self._current = _key_id(keys[0])

    def seal(self, data: bytes, place: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        sealed: bytes = self._keys[self._current].encrypt(nonce, data, place)
        return ENCRYPTED + self._current + nonce + sealed

    def open(self, stored: bytes, place: bytes) -> bytes:
        if not stored.startswith(ENCRYPTED):
            raise UnreadableValueError("the value is not encrypted, and this gateway reads encrypted values only")
        key_id, rest = stored[1 : 1 + ID_BYTES], stored[1 + ID_BYTES :]
        key = self._keys.get(key_id)
        nonce, sealed = rest[:NONCE_BYTES], rest[NONCE_BYTES:]
        if key is None or len(nonce) != NONCE_BYTES:
            raise UnreadableValueError("the value was not encrypted with one of the keys of --record-key-file")
        from cryptography.exceptions import InvalidTag

        try:
            data: bytes = key.decrypt(nonce, sealed, place)
        except InvalidTag:
            raise UnreadableValueError("the value was changed after it was encrypted") from None
        return data


class FileCipher(Cipher):
    """Encrypts with the keys that a file has now. While a changed file is invalid, the previous keys stay in use."""

    def __init__(self, key_file: Path) -> None:
        self._cipher = Reread(partial(_read_cipher, key_file), "record keys", time.monotonic)

    def seal(self, data: bytes, place: bytes) -> bytes:
        return self._cipher().seal(data, place)

    def open(self, stored: bytes, place: bytes) -> bytes:
        return self._cipher().open(stored, place)


def make_cipher(key_file: Path | None) -> Cipher:
    """The cipher for the keys of a file; without a file, values are not encrypted. Raises RecordKeyError."""
    return Cipher() if key_file is None else FileCipher(key_file)


def _read_cipher(key_file: Path) -> AesCipher:
    try:
        lines = key_file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordKeyError(f"--record-key-file {key_file}: {error}") from None
    keys = [_read_key(key_file, line.strip()) for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise RecordKeyError(
            f"--record-key-file {key_file}: the file has no key; write one with `openssl rand -base64 32`"
        )
    return AesCipher(keys)


def _read_key(path: Path, line: str) -> bytes:
    try:
        key = base64.b64decode(line, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        words = f"a line is not {KEY_BYTES} bytes in base64; write a key with `openssl rand -base64 32`"
        raise RecordKeyError(f"--record-key-file {path}: {words}")
    return key


def _key_id(key: bytes) -> bytes:
    return hashlib.sha256(b"quire record key" + key).digest()[:ID_BYTES]


def _load_aes() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise RecordKeyError(
            "--record-key-file needs the package cryptography; install it with `pip install 'quire-server[records]'`"
        ) from None
    return AESGCM
