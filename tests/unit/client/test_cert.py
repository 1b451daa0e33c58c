"""`quire cert`: the certificates are accepted by their peers, and only for their roles and ids."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
from quire_client import cli
from quire_client.cli.certificates import Authority, write

from svc_common.own_certificate import OwnCertificate
from svc_common.tls import TlsFiles
from svc_common.trust import INTERNAL

EXPIRED = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


def problem(folder: Path, name: str, dns_name: str, ca: str = "ca.crt") -> str:
    files = TlsFiles(folder / f"{name}.crt", folder / f"{name}.key", folder / ca, INTERNAL)
    return OwnCertificate(files, dns_name).problem()


def test_each_role_gets_a_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    command = ["cert", str(folder), "--host", "llm.example.com", "--worker-id", "w-1"]
    assert cli.main(command) == 0
    assert "made with a new CA" in capsys.readouterr().out
    for role in ("gateway", "scheduler", "worker"):
        assert problem(folder, role, f"quire-{role}") == ""
        assert (folder / f"{role}.key").stat().st_mode & 0o077 == 0
    assert problem(folder, "server", "llm.example.com") == ""
    assert problem(folder, "worker-w-1", "w-1.quire-worker") == problem(folder, "worker-w-1", "quire-worker") == ""
    assert "not valid for 'quire-scheduler'" in problem(folder, "gateway", "quire-scheduler")
    ca, cert = ((folder / name).read_bytes() for name in ("ca.crt", "gateway.crt"))
    assert cli.main(command) == 0
    assert "renewed with the CA" in capsys.readouterr().out
    assert (folder / "ca.crt").read_bytes() == ca
    assert (folder / "gateway.crt").read_bytes() != cert
    ssl.create_default_context(cafile=folder / "ca.crt")


def test_a_service_sees_why_its_peers_refuse_its_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, other = Authority.create(), Authority.create()
    (tmp_path / "ca.crt").write_bytes(ours.pair.cert)
    write(tmp_path / "good", ours.issue("quire-worker"))
    write(tmp_path / "expired", ours.issue("quire-worker", ends_at=EXPIRED))
    write(tmp_path / "foreign", other.issue("quire-worker"))
    assert problem(tmp_path, "good", "quire-worker") == ""
    assert problem(tmp_path, "expired", "quire-worker") == "certificate has expired"
    assert problem(tmp_path, "expired", "") == "certificate has expired", "also of a service that only calls others"
    assert problem(tmp_path, "foreign", "") == "unable to get local issuer certificate"
    assert "none.key: [Errno 2] No such file" in problem(tmp_path, "none", "")

    files = TlsFiles(tmp_path / "used.crt", tmp_path / "used.key", tmp_path / "ca.crt", INTERNAL)
    own = OwnCertificate(files, "quire-worker")
    for issued in (
        ours.issue("quire-worker", ends_at=EXPIRED),
        ours.issue("quire-worker"),
        other.issue("quire-worker"),
    ):
        write(tmp_path / "used", issued)
        own.check()
        own.check()
    assert caplog.messages == [
        f"other services will refuse the certificate of --internal-tls-cert-file {tmp_path / 'used.crt'}: {why}"
        for why in ("certificate has expired", "unable to get local issuer certificate")
    ]


@pytest.mark.parametrize(
    ("content", "flags", "words", "code"),
    [
        ("no key", (), "ca.crt and ca.key are not a certificate and its key", 1),
        (None, ("--worker-id", "../x"), "cannot be part of a DNS name", 2),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    flags: tuple[str, ...],
    words: str,
    code: int,
) -> None:
    write(tmp_path / "ca", Authority.create().pair)
    if content is not None:
        (tmp_path / "ca.key").write_text(content)
    assert cli.main(["cert", str(tmp_path), *flags]) == code
    assert words in capsys.readouterr().err
