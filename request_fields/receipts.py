"""Receipts: signed records of answers, which anyone with the model can check by computing the answer again.

A receipt is a JSON object. `payload` is the signed text: what the answer depends on, and digests of prompt, output and
logits. The other keys carry what these digests are of, so that the receipt alone is enough to check the answer. Nothing
here does I/O; only signatures need the package `cryptography`. docs/receipts.md explains them to users.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMAT = 1
MAX_BYTES = 64 << 20
PARTS = {"prompt_token_ids": "I", "token_ids": "I", "logits_digests": "Q"}  # typecodes of array


class ReceiptError(ValueError):
    """The text is no valid receipt; the message says why."""


class MissingCryptographyError(ReceiptError):
    """Signatures need a package that is not installed."""


@dataclass(frozen=True, slots=True)
class ReceiptAnswer:
    """The answer that the digests of a payload cover."""

    prompt_token_ids: array[int]
    token_ids: array[int]
    logits_digests: array[int]  # digests of the last tokens; earlier ones were computed before the request was resumed

    def digests(self) -> dict[str, str]:
        """The digest of each part, by its key in the payload."""
        return {f"{name}_sha256": hashlib.sha256(little_endian(getattr(self, name))).hexdigest() for name in PARTS}


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt whose form is valid. `payload` is trusted only if `check` raised nothing."""

    payload: Mapping[str, Any]
    answer: ReceiptAnswer
    signed: bytes
    signature: bytes
    public_key: bytes

    @property
    def key_id(self) -> str:
        """Identifies the key in texts for people."""
        return hashlib.sha256(self.public_key).hexdigest()[:16]

    def check(self, public_key: bytes | None = None) -> None:
        """Raises ReceiptError if the signature is not that of `public_key` (None: of the key in the receipt), or if the
        parts were changed."""
        if public_key is not None and public_key != self.public_key:
            raise ReceiptError(f"the receipt was signed by another key, {self.key_id}")
        if not _is_signed(self.public_key, self.signature, self.signed):
            raise ReceiptError("the signature is not valid: the receipt was changed, or was not made by this key")
        for name, digest in self.answer.digests().items():
            if self.payload.get(name) != digest:
                raise ReceiptError(
                    f"{name.removesuffix('_sha256')} was changed: its digest differs from the signed one"
                )


def little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def receipt_text(payload: Mapping[str, Any], answer: ReceiptAnswer, key: Any) -> str:
    """The receipt of an answer, signed by an Ed25519 private key of `cryptography`."""
    signed = json.dumps({"format": FORMAT, **payload, **answer.digests()}, sort_keys=True)
    parts = {name: _base64(little_endian(getattr(answer, name))) for name in PARTS}
    return json.dumps(
        {
            "payload": signed,
            "signature": _base64(key.sign(signed.encode())),
            "public_key": _base64(key.public_key().public_bytes_raw()),
            **parts,
        }
    )


def parse_receipt(text: str | bytes) -> Receipt:
    """Reads a receipt. Raises ReceiptError; does not check its signature."""
    if len(text) > MAX_BYTES:
        raise ReceiptError(f"the receipt has {len(text)} bytes; at most {MAX_BYTES} are read")
    try:
        found = json.loads(text)
        payload = json.loads(found["payload"])
        parts = {name: _array(typecode, found[name]) for name, typecode in PARTS.items()}
        signature, public_key = (base64.b64decode(found[name], validate=True) for name in ("signature", "public_key"))
        signed = found["payload"].encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ReceiptError(f"not a receipt: {type(error).__name__}: {error}") from None
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise ReceiptError(f"not a receipt of format {FORMAT}")
    return Receipt(payload, ReceiptAnswer(**parts), signed, signature, public_key)


def private_key(pem: bytes) -> Any:
    """An Ed25519 private key in PEM, without a password. Raises ReceiptError."""
    serialization, ed25519 = _cryptography()
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise ReceiptError(f"not a private key in PEM without a password: {error}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ReceiptError("not an Ed25519 key; make one by `openssl genpkey -algorithm ed25519`")
    return key


def public_key_bytes(pem: bytes) -> bytes:
    """The Ed25519 key of a public or private key in PEM. Raises ReceiptError."""
    serialization, ed25519 = _cryptography()
    if b"PRIVATE KEY" in pem:
        found: bytes = private_key(pem).public_key().public_bytes_raw()
        return found
    try:
        key = serialization.load_pem_public_key(pem)
    except ValueError as error:
        raise ReceiptError(f"not a public key in PEM: {error}") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ReceiptError("not an Ed25519 key")
    return bytes(key.public_bytes_raw())


def _is_signed(public_key: bytes, signature: bytes, data: bytes) -> bool:
    _, ed25519 = _cryptography()
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        words = "receipts need the package cryptography; install it by `pip install 'quire[receipts]'`"
        raise MissingCryptographyError(words) from None
    return serialization, ed25519


def _array(typecode: str, text: str) -> array[int]:
    values = array(typecode)
    values.frombytes(base64.b64decode(text, validate=True))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
