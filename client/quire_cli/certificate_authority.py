"""A certificate authority for one deployment of Quire, and the certificates of its services (docs/trust.md).

authority = Authority.create()                   # or Authority.load(folder)
write(folder / "worker", authority.issue("quire-worker", days=90))   # worker.crt and worker.key
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise SystemExit(
        "certificates need the package cryptography: run `pip install cryptography`, or install quire-server[records]"
    ) from None

ROLES = ("gateway", "scheduler", "worker")
WORKER_NAME = "{id}.quire-worker"
AUTHORITY_DAYS = 3650
# Clocks of two machines differ by a few minutes at most.
BACKDATED = datetime.timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, as PEM."""

    cert: bytes
    key: bytes


class AuthorityError(ValueError):
    """The folder has no usable authority; the message names the file."""


class Authority:
    """Signs certificates. Each certificate can be used by a server and by a client."""

    def __init__(self, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._cert = cert
        self._key = key

    @classmethod
    def create(cls) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Quire CA")])
        usage = _key_usage(signs_certificates=True)
        builder = _builder(name, name, key, AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """The authority of ca.crt and ca.key. Raises AuthorityError or OSError."""
        try:
            cert = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
        except (ValueError, TypeError) as error:
            raise AuthorityError(f"{folder}: ca.crt and ca.key are not a certificate and its key: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
            raise AuthorityError(f"{folder}: ca.key is not the key of ca.crt")
        return cls(cert, key)

    @property
    def pair(self) -> Issued:
        """The certificate, which all services trust, and the key, which only the authority needs."""
        return Issued(self._cert.public_bytes(serialization.Encoding.PEM), _pem(self._key))

    def issue(self, *names: str, days: float = 90.0, ends_at: datetime.datetime | None = None) -> Issued:
        """A certificate for DNS names, IP addresses and URIs. `ends_at` replaces `days`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
        builder = _builder(subject, self._cert.subject, key, days, ends_at)
        for extension, is_critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.SubjectAlternativeName(list(map(_alternative_name, names))), False),
            (_key_usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False),
        ):
            builder = builder.add_extension(extension, critical=is_critical)
        cert = builder.sign(self._key, hashes.SHA256())
        return Issued(cert.public_bytes(serialization.Encoding.PEM), _pem(key))


def issue_all(
    authority: Authority, folder: Path, *, hosts: Sequence[str], worker_ids: Sequence[str] = (), days: float
) -> None:
    """Write a certificate for each role, one for each worker id, and one for the gateways' public port: server.crt."""
    for role in ROLES:
        write(folder / role, authority.issue(f"quire-{role}", days=days))
    for worker_id in worker_ids:
        names = ("quire-worker", WORKER_NAME.format(id=worker_id))
        write(folder / f"worker-{worker_id}", authority.issue(*names, days=days))
    write(folder / "server", authority.issue(*hosts, days=days))


def write(path: Path, issued: Issued) -> None:
    """Write PATH.crt and PATH.key, each replaced at once, the key readable only by this user."""
    for end, content, mode in ((".key", issued.key, 0o600), (".crt", issued.cert, 0o644)):
        scratch = path.with_name(f"{path.name}{end}.{os.getpid()}")
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content)
        scratch.replace(path.with_name(f"{path.name}{end}"))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: float,
    ends_at: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    ends_at = ends_at or now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, ends_at) - BACKDATED)
        .not_valid_after(ends_at)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
