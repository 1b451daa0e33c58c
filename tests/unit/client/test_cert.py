"""`quire cert`: the certificates are accepted by their peers, and only for their roles and ids."""

from __future__ import annotations

import datetime
import ssl
import time
from pathlib import Path

import pytest
import quire_cli as cli
from prometheus_client import generate_latest
from quire_cli.certificate_authority import Authority, write

from gateway_svc.flags import make_parser
from svc_common.config import parse
from svc_common.observe.metrics import ServiceMetrics, make_registry
from svc_common.security.tls import OwnCertificate, TlsFiles, certificate_files, remaining_fraction
from svc_common.security.trust import INTERNAL
from tests.promql import read_scrape

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


def test_the_remaining_lifetime_is_a_metric(tmp_path: Path) -> None:
    authority, now = Authority.create(), time.time()
    write(tmp_path / "gateway", authority.issue("quire-gateway", days=10.0))
    write(tmp_path / "expired", authority.issue("quire-gateway", ends_at=EXPIRED))
    write(tmp_path / "distant", authority.issue("quire-gateway", days=40_000.0))  # after 2050: a year of four digits
    chain = (tmp_path / "gateway.crt").read_bytes() + authority.pair.cert
    (tmp_path / "chain.crt").write_bytes(chain)
    for name in ("gateway", "chain"):
        assert remaining_fraction(tmp_path / f"{name}.crt", now) == pytest.approx(1.0, abs=0.01)
        assert remaining_fraction(tmp_path / f"{name}.crt", now + 5 * 86_400) == pytest.approx(0.5, abs=0.01)
    assert remaining_fraction(tmp_path / "distant.crt", now + 20_000 * 86_400) == pytest.approx(0.5, abs=0.01)
    past = remaining_fraction(tmp_path / "expired.crt", now)
    assert past is not None
    assert past < 0
    assert remaining_fraction(tmp_path / "none.crt", now) is None
    assert remaining_fraction(tmp_path / "gateway.key", now) is None

    flags = ["--scheduler=a:1", f"--tls-cert-file={tmp_path / 'gateway.crt'}"]
    files = certificate_files(parse(make_parser(), flags))
    page = generate_latest(make_registry(ServiceMetrics("gateway", (), list, certificates=files))).decode()
    found = read_scrape(page)["quire_certificate_remaining_fraction"]
    assert found == {(("link", "public"),): pytest.approx(1.0, abs=0.01)}


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
