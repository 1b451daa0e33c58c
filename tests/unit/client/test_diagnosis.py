"""Wrong addresses, ports and TLS settings: the error names the cause and the remedy."""

import asyncio
import socket
import subprocess
import sys
from concurrent import futures
from http.server import BaseHTTPRequestHandler

import grpc
import pytest
import trustme
from quire_client import AsyncClient, Client, ConnectionFailed, InvalidRequest, Tls
from quire_client.testing import FakeGateway

from tests.http_thread import HttpThread


def connect_error(target, tls=None, timeout_s=0.5):
    with pytest.raises((ConnectionFailed, InvalidRequest)) as caught:
        Client.connect(target, tls=tls, connect_timeout_s=timeout_s)
    return caught.value.message


@pytest.fixture(scope="module")
def tls_server():
    """A gRPC server with TLS: its port and the CA's certificate."""
    authority = trustme.CA()
    cert = authority.issue_cert("localhost", "127.0.0.1")
    chain = b"".join(part.bytes() for part in cert.cert_chain_pems)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(cert.private_key_pem.bytes(), chain)]))
    server.start()
    yield port
    server.stop(None).wait()


@pytest.fixture
def http_port():
    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    with HttpThread(Quiet) as server:
        server.handle_error = lambda request, address: None  # gRPC breaks its connection
        yield server.server_port


def test_tls_on_a_plaintext_port():
    with FakeGateway() as gateway:
        assert "the server does not use TLS; remove --tls" in connect_error(gateway.target, tls=True)


def test_plaintext_on_a_tls_port(tls_server):
    assert "the server requires TLS; set --tls, QUIRE_TLS=1 or tls=True" in connect_error(f"127.0.0.1:{tls_server}")


def test_tls_with_an_unknown_ca(tls_server):
    """gRPC reports it after a handshake, for which a busy machine needs some time."""
    target = f"127.0.0.1:{tls_server}"
    assert "the CA of the server's certificate is unknown" in connect_error(target, tls=True, timeout_s=3.0)
    assert "the CA of the server's certificate" in connect_error(target, tls=Tls(), timeout_s=3.0)


def test_an_http_port(http_port):
    assert "use the gateway's gRPC port" in connect_error(f"127.0.0.1:{http_port}")


def test_a_port_where_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "connection refused: nothing listens there; start a gateway" in connect_error(f"127.0.0.1:{port}")
    with pytest.raises(ConnectionFailed, match="connection refused"):
        asyncio.run(AsyncClient.connect(f"127.0.0.1:{port}", connect_timeout_s=0.5))


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("http://localhost:50051", "is a URL; write localhost:50051$"),
        ("https://llm.example.com:443/v1", r"is a URL; write llm.example.com:443 with --tls \(tls=True\)"),
        ("localhost:8000/v1", "is a URL; write localhost:8000$"),
        ("http://localhost", "is a URL; write localhost:50051$"),
        ("grpc://localhost:50051", "is a URL; write localhost:50051$"),
        ("localhost", "has no port; write host:port, e.g. localhost:50051"),
        ("localhost:", "has no port"),
        ("::1", r"e.g. \[::1\]:50051"),
        ("localhost:abc", "the port must be a number from 1 to 65535"),
        ("localhost:99999", "the port must be a number from 1 to 65535"),
        ("localhost:0", "the port must be a number"),
    ],
)
def test_addresses_that_cannot_work(target, complaint):
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        Client.connect(target)
    assert caught.value.field_violations[0].field == "target"


def test_the_command_prints_no_log_of_grpc():
    with FakeGateway() as gateway:
        command = [sys.executable, "-m", "quire_cli", "models", "--target", gateway.target, "--tls"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
