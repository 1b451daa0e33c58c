"""A gateway with TLS and API keys: accepted clients, errors for refused ones, and a certificate that is renewed."""

from __future__ import annotations

import datetime
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import quire_cli as cli
import trustme
from quire_client import Client, ConnectionFailed, InvalidRequest, Tls, Unauthenticated
from quire_client.connection.channel import resolve_tls

from gateway_svc.flags import make_parser
from svc_common.security.tls import TlsError, server_credentials, tls_files
from tests.processes.ports import free_port
from tests.processes.stack import Service

NAME = "quire.example.com"
NO_SCHEDULER = "127.0.0.1:1"  # no scheduler listens here; the gateway serves without it
API_KEY = "my-key"
DEADLINE_S = 20.0
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "deployment.md"


class Files:
    """The files of a certificate authority and of the gateway and client certificates that it issued."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.ca = folder / "ca.crt"
        self.keys = folder / "keys"
        self.keys.mkdir()
        (self.keys / "me").write_text(API_KEY)
        self.authority.cert_pem.write_to_path(self.ca)
        self.renew()
        self.client = self.write("me", self.authority.issue_cert("me@example.com"))

    def renew(self, authority: trustme.CA | None = None) -> None:
        """Issue a new certificate for the gateway."""
        self.cert, self.key = self.write("server", (authority or self.authority).issue_cert(NAME, "127.0.0.1"))

    def write(self, name: str, cert: trustme.LeafCert) -> tuple[Path, Path]:
        """Write chain and key to NAME.crt and NAME.key. Each is replaced atomically, as a kubelet does."""
        crt, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        _put(crt, b"".join(part.bytes() for part in cert.cert_chain_pems))
        _put(key, cert.private_key_pem.bytes())
        return crt, key


def _put(path: Path, pem: bytes) -> None:
    path.with_suffix(".new").write_bytes(pem)
    path.with_suffix(".new").rename(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def gateway(files: Files) -> Iterator[Service]:
    """A gateway that requires client certificates."""
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--tls-cert-file={files.cert}", f"--tls-key-file={files.key}", f"--tls-client-ca-file={files.ca}"]
    flags.append(f"--api-keys={files.keys}")
    command = [
        sys.executable,
        "-m",
        "gateway_svc.service",
        "--listen",
        address,
        "--scheduler",
        NO_SCHEDULER,
        *flags,
    ]
    service = Service("gateway", command, address, files.folder / "log")
    service.start()
    try:
        yield service
    finally:
        service.kill()


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", API_KEY)


def models(gateway: Service, tls: Tls | bool | None, within_s: float = DEADLINE_S) -> int:
    with Client.connect(gateway.address, tls=tls, connect_timeout_s=within_s) as client:
        return len(client.models())


def check_refusal(gateway: Service, tls: Tls | bool, words: str) -> None:
    """Connect until the error contains `words`; on a busy machine a handshake may take longer than one attempt."""
    deadline, message = time.monotonic() + DEADLINE_S, ""
    while words not in message:
        assert time.monotonic() < deadline, message
        with pytest.raises(ConnectionFailed) as failed:
            models(gateway, tls, within_s=0.3)
        message = failed.value.message


def test_errors_of_refused_clients(gateway: Service, files: Files) -> None:
    cert, key = files.client
    assert models(gateway, Tls(files.ca, cert, key, NAME)) == 0
    assert "TLS with client certificates" in gateway.log()
    unknown = trustme.CA()
    unknown.cert_pem.write_to_path(files.folder / "unknown.crt")
    other_cert, other_key = files.write("other", unknown.issue_cert("you@example.com"))
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9)
    expired = files.authority.issue_cert("me@example.com", not_before=past, not_after=past + datetime.timedelta(days=1))
    for tls, words in (
        (False, "the server requires TLS"),
        (Tls(files.ca, *files.write("expired", expired), NAME), "a client certificate"),
        (Tls(files.ca, server_name=NAME), "a client certificate"),
        (Tls(files.ca, other_cert, other_key, NAME), "a client certificate"),
        (Tls(files.ca, cert, key, "other.example.com"), "set --tls-server-name"),
        (Tls(files.folder / "unknown.crt", cert, key, NAME), "set --tls-ca"),
    ):
        check_refusal(gateway, tls, words)


def test_without_an_api_key_only_health_answers(gateway: Service, files: Files) -> None:
    tls = Tls(files.ca, *files.client, NAME)
    for key, words in (("", "an API key is required; set QUIRE_API_KEY"), ("my-ke", "the API key is not accepted")):
        with Client.connect(gateway.address, tls=tls, connect_timeout_s=DEADLINE_S, api_key=key) as client:
            assert client.health() is False, "not ready without a scheduler, but no error"
            for call in (client.models, lambda client=client: client.generate("x"), lambda: client.drain_worker("w")):
                with pytest.raises(Unauthenticated, match=words):
                    call()


def test_the_command_takes_flags_and_environment(
    gateway: Service, files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = files.client
    command = ["models", "--json", f"--target={gateway.address}", f"--tls-server-name={NAME}"]
    assert cli.main([*command, f"--tls-ca={files.ca}", f"--tls-cert={cert}", f"--tls-key={key}"]) == 0
    for name, path in (("CA", files.ca), ("CERT", cert), ("KEY", key)):
        monkeypatch.setenv(f"QUIRE_TLS_{name}", str(path))
    assert cli.main(command) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"models": []}] * 2


def test_the_example_of_the_deployment_guide_runs(
    gateway: Service, files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(files.folder)
    exec(compile(program.replace("llm.example.com:50051", gateway.address), str(GUIDE), "exec"), {})
    assert capsys.readouterr().out == "()\n"


def test_a_renewed_certificate_needs_no_restart(gateway: Service, files: Files) -> None:
    trusted = Tls(files.ca, *files.client, NAME)
    assert models(gateway, trusted) == 0
    files.cert.write_text("no certificate")
    assert [models(gateway, trusted) for _ in range(2)] == [0, 0], "the previous certificate stays in use"
    newer = trustme.CA()
    newer.cert_pem.write_to_path(files.folder / "newer.crt")
    files.renew(newer)
    assert models(gateway, Tls(files.folder / "newer.crt", *files.client, NAME)) == 0
    check_refusal(gateway, trusted, "the CA of the server's certificate is unknown")
    assert gateway.log().count("cannot load the certificate, keeping the previous one: --tls-cert-file") == 1
    assert "loaded a new certificate" in gateway.log()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"cert": "server.crt"}, "--tls-cert-file and --tls-key-file must be set together"),
        ({"client-ca": "ca.crt"}, "set --tls-cert-file and --tls-key-file too"),
        ({"cert": "none.crt", "key": "server.key"}, "none.crt: No such file"),
        ({"cert": "server.crt", "key": "me.key"}, "key values mismatch"),
        ({"cert": "server.crt", "key": "server.key", "client-ca": "server.key"}, "--tls-client-ca-file"),
    ],
)
def test_bad_files_fail_the_start(tmp_path: Path, names: dict[str, str], words: str) -> None:
    files = Files(tmp_path)
    flags = [f"--tls-{name}-file={files.folder / path}" for name, path in names.items()]
    args = make_parser().parse_args(["--scheduler", NO_SCHEDULER, *flags])
    with pytest.raises(TlsError) as refused:
        server_credentials(
            tls_files(args.tls_cert_file, args.tls_key_file, args.tls_client_ca_file)
            or pytest.fail("the files were accepted")
        )
    assert words in str(refused.value)


def test_sdk_errors_name_the_bad_file() -> None:
    with pytest.raises(InvalidRequest, match="'/none': No such file"):
        Client.connect("127.0.0.1:1", tls=Tls(ca_file="/none"))
    with pytest.raises(InvalidRequest, match=r"tls\.cert_file and tls\.key_file must be set together"):
        Client.connect("127.0.0.1:1", tls=Tls(cert_file="/some"))


def test_environment_variables_enable_tls() -> None:
    assert resolve_tls(None, {}) is None
    assert resolve_tls(None, {"QUIRE_TLS": "0"}) is None
    assert resolve_tls(None, {"QUIRE_TLS": "1"}) == Tls()
    assert resolve_tls(None, {"QUIRE_TLS_SERVER_NAME": "a.b"}) == Tls(server_name="a.b")
    assert resolve_tls(False, {"QUIRE_TLS": "1"}) is None
    assert resolve_tls(True, {"QUIRE_TLS_CA": "ca"}) == Tls(ca_file="ca")
