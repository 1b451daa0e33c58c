"""An issuer of JSON web tokens for tests: its keys, its JWKS, and an HTTP server that serves the JWKS."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from tests.http_thread import HttpThread

ISSUER, AUDIENCE = "https://issuer.example.com/", "quire"
CONVERTERS = {"RS": RSAAlgorithm, "PS": RSAAlgorithm, "ES": ECAlgorithm, "Ed": OKPAlgorithm}
CURVES = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}


def make_key(algorithm: str, bits: int = 2048) -> Any:
    if algorithm in CURVES:
        return ec.generate_private_key(CURVES[algorithm])
    return ed25519.Ed25519PrivateKey.generate() if algorithm == "EdDSA" else rsa.generate_private_key(65537, bits)


class Issuer:
    """Signs tokens. `keys`: private key by key id."""

    def __init__(self, algorithm: str = "ES256") -> None:
        self.keys = {"first": (algorithm, make_key(algorithm))}

    def add(self, key_id: str, algorithm: str = "ES256", key: Any = None) -> None:
        self.keys[key_id] = algorithm, key or make_key(algorithm)

    def jwks(self) -> bytes:
        return json.dumps({"keys": [self._jwk(*item) for item in self.keys.items()]}).encode()

    def _jwk(self, key_id: str, pair: tuple[str, Any]) -> dict[str, Any]:
        algorithm, key = pair
        public: Any = CONVERTERS[algorithm[:2]].to_jwk(key.public_key(), as_dict=True)
        return {**public, "kid": key_id, "use": "sig"}

    def token(self, key_id: str = "first", *, without: str = "", header: Any = None, **claims: Any) -> str:
        """A valid token, apart from the given claims."""
        algorithm, key = self.keys[key_id]
        now = time.time()
        whole = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": now + 600, "nbf": now - 5, **claims}
        whole.pop(without, None)
        headers = {name: value for name, value in {"kid": key_id, **(header or {})}.items() if value is not None}
        return jwt.encode(whole, key, algorithm, headers)


class JwksServer:
    """Serves `data` over HTTP, and counts requests. Status 500 without data."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.num_requests = 0
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[JwksServer]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.num_requests += 1
                self.send_response(200 if outer.data else 500)
                self.end_headers()
                self.wfile.write(outer.data)

            def log_message(self, *args: Any) -> None:
                pass

        with HttpThread(Handler) as server:
            self.url = f"{server.url}/jwks.json"
            yield self
