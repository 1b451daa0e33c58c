"""JSON web tokens of clients: which are accepted, why others are refused, and the keys of their issuer."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from quire.v1 import inference_pb2 as pb

from gateway_svc.callers.authenticator import ApiKeys, Authenticator, make_authenticator
from gateway_svc.callers.caller import Caller, CallersError
from gateway_svc.callers.tokens import MAX_TOKEN_CHARS, Expected, JsonWebTokens, Jwks, JwksError, read_keys
from gateway_svc.flags import make_parser
from gateway_svc.limits.buckets import LimitsFile, LocalBuckets
from gateway_svc.limits.key_limits import KeyLimits
from svc_common.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from svc_common.memory import Intake
from svc_common.tasks import cancel
from tests.unit.gateway.fakes import FakeScheduler, TestGateway, refused
from tests.unit.gateway.jwt_issuer import AUDIENCE, ISSUER, Issuer, JwksServer, make_key
from tests.unit.gateway.test_http import HttpGateway

EXPECTED = Expected(ISSUER, (AUDIENCE, "other"))
STRANGER = make_key("ES256")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def jwks_file(issuer: Issuer, tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    path.write_bytes(issuer.jwks())
    return path


@pytest.fixture
def tokens(jwks_file: Path) -> JsonWebTokens:
    return JsonWebTokens(EXPECTED, Jwks(str(jwks_file)))


@pytest.mark.parametrize("algorithm", ["RS256", "PS512", "ES256", "ES384", "ES512", "EdDSA"])
async def test_asymmetric_signatures_are_accepted(algorithm: str, tmp_path: Path) -> None:
    issuer = Issuer(algorithm)
    (tmp_path / "jwks").write_bytes(issuer.jwks())
    tokens = JsonWebTokens(EXPECTED, Jwks(str(tmp_path / "jwks")))
    assert await tokens.check(issuer.token(tenant="team-a")) == Caller("team-a", "jwt:alice")


def unsigned(issuer: Issuer, **header: Any) -> str:
    """A token with this header and the claims of a valid one, without a signature."""
    _, claims, _ = issuer.token().split(".")
    return f"{base64.urlsafe_b64encode(json.dumps(header).encode()).decode().rstrip('=')}.{claims}."


def deep() -> str:
    return f"{base64.urlsafe_b64encode(b'[' * 9000).decode().rstrip('=')}.e30.e30"


REFUSED = [
    ("expired", lambda i: i.token(exp=time.time() - 60), "the token has expired"),
    ("early", lambda i: i.token(nbf=time.time() + 600), "is not valid yet"),
    ("no expiry", lambda i: i.token(without="exp"), "the token has no claim exp"),
    ("no issuer", lambda i: i.token(without="iss"), "the token has no claim iss"),
    ("no audience", lambda i: i.token(without="aud"), "the token has no claim aud"),
    ("issuer", lambda i: i.token(iss="https://evil.example.com/"), f"another issuer (iss) than {ISSUER}"),
    ("audience", lambda i: i.token(aud="else"), "another audience (aud) than quire or other"),
    ("unknown key", lambda i: i.token(header={"kid": "second"}), "its key id (kid) is not in the JWKS"),
    ("signature", lambda i: i.token()[:-8] + "AAAAAAAA", "signature is wrong"),
    ("signer", lambda i: jwt.encode({"sub": "x"}, STRANGER, "ES256", {"kid": "first"}), "signature is wrong"),
    ("algorithm", lambda i: jwt.encode({}, "s" * 64, "HS256", {"kid": "first"}), "does not fit its key: ES256"),
    ("no algorithm", lambda i: unsigned(i, alg="none", kid="first"), "does not fit its key: ES256"),
    ("critical header", lambda i: unsigned(i, alg="ES256", kid="first", crit=["x"]), "not a JSON web token"),
    ("no subject", lambda i: i.token(without="sub"), "neither a claim tenant nor a claim sub"),
    ("tenant", lambda i: i.token(tenant=["a"]), "claim tenant is not the name of a tenant"),
    ("tenant of a subject", lambda i: i.token(tenant="sub:bob"), "claim tenant is not the name of a tenant"),
    ("text", lambda i: "a.b.c", "not a JSON web token"),
    ("deep header", lambda i: deep(), "not a JSON web token"),
    ("far expiry", lambda i: i.token(exp=10**1000), "malformed"),
    ("half a surrogate as tenant", lambda i: i.token(tenant="\ud800"), "malformed"),
    ("half a surrogate as subject", lambda i: i.token(sub="\udfff"), "malformed"),
    ("long", lambda i: "e" * (MAX_TOKEN_CHARS + 1), f"at most {MAX_TOKEN_CHARS} are accepted"),
]


@pytest.mark.parametrize(("make", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
async def test_refused_tokens(tokens: JsonWebTokens, issuer: Issuer, make: Any, words: str) -> None:
    token = make(issuer)
    with pytest.raises(UnauthenticatedError) as caught:
        await tokens.check(token)
    assert words in str(caught.value)
    assert not [part for part in token.split(".") if len(part) > 3 and part in str(caught.value)]


async def test_clocks_may_differ_a_little(tokens: JsonWebTokens, issuer: Issuer) -> None:
    assert await tokens.check(issuer.token(exp=time.time() - 20))
    assert await tokens.check(issuer.token(nbf=time.time() + 20))


async def test_tokens_without_a_subject_do_not_share_places(tokens: JsonWebTokens, issuer: Issuer) -> None:
    """One tenant's bodies that never end must not keep another tenant's body waiting."""
    senders = [(await tokens.check(issuer.token(tenant=name, without="sub"))).sender for name in ("team-a", "team-b")]
    intake, never, holds = Intake(max_receiving=8), asyncio.Event(), asyncio.Semaphore(0)

    async def hold() -> None:
        holds.release()
        await never.wait()

    async def read() -> bytes:
        return b"body"

    held = [asyncio.create_task(intake.receive(senders[0], hold)) for _ in range(8)]
    async with asyncio.timeout(20.0):
        for _ in range(2):  # all places of one sender
            await holds.acquire()
        assert await intake.receive(senders[1], read) == b"body"
    await cancel(*held)


async def test_owners_of_tokens(tokens: JsonWebTokens, issuer: Issuer) -> None:
    assert (await tokens.check(issuer.token(aud=["x", "other"]))).owner == "sub:alice"
    odd = await tokens.check(issuer.token(sub="auth0|5f7c/x"))
    assert (len(odd.owner), odd.credential) == (32, "jwt:auth0|5f7c/x")
    assert (await tokens.check(issuer.token(tenant="team-a", without="sub"))) == Caller("team-a", "jwt:")


@pytest.mark.parametrize(
    ("claims", "is_accepted"),
    [
        ({"scope": "read quire.use"}, True),
        ({"scp": ["quire.use"]}, True),
        ({"scope": "quire.user"}, False),
        ({"scope": 5}, False),
        ({}, False),
    ],
)
async def test_a_scope_may_be_required(jwks_file: Path, issuer: Issuer, claims: Any, is_accepted: bool) -> None:
    tokens = JsonWebTokens(Expected(ISSUER, (AUDIENCE,), scope="quire.use"), Jwks(str(jwks_file)))
    if is_accepted:
        assert await tokens.check(issuer.token(**claims))
        return
    with pytest.raises(PermissionDeniedError, match=r"the token has no scope quire\.use"):
        await tokens.check(issuer.token(**claims))


async def test_an_accepted_token_is_refused_after_it_expired(jwks_file: Path, issuer: Issuer) -> None:
    clock = Clock()
    clock.now = time.time()
    tokens = JsonWebTokens(EXPECTED, Jwks(str(jwks_file)), clock)
    token = issuer.token(exp=clock.now - 29)  # 1 s of the leeway is left
    assert await tokens.check(token)
    assert tokens._known(tokens_digest(token)) is not None
    clock.now += 1.5
    assert tokens._known(tokens_digest(token)) is None


def tokens_digest(token: str) -> bytes:
    import hashlib

    return hashlib.sha256(token.encode()).digest()


# -- keys of the issuer ------------------------------------------------------------------------------------------------


@pytest.fixture
def server(issuer: Issuer) -> Iterator[JwksServer]:
    with JwksServer(issuer.jwks()).serving() as server:
        yield server


async def test_an_unknown_key_is_fetched_at_most_every_ten_seconds(server: JwksServer) -> None:
    issuer, clock = Issuer(), Clock()
    server.data = issuer.jwks()
    jwks = Jwks(server.url, clock)
    tokens = JsonWebTokens(EXPECTED, jwks)
    await jwks.refresh()
    issuer.add("second", "RS256")
    token, server.data = issuer.token("second"), issuer.jwks()
    for _ in range(3):
        with pytest.raises(UnauthenticatedError, match="unknown key"):
            await tokens.check(token)
    assert server.num_requests == 1
    clock.now = 10.0
    assert await tokens.check(token)
    assert await tokens.check(issuer.token("first"))
    for number in range(20):
        with pytest.raises(UnauthenticatedError, match="unknown key"):
            await tokens.check(issuer.token(header={"kid": f"guess-{number}"}))
    assert server.num_requests == 2


async def test_a_removed_key_is_not_accepted_any_more(server: JwksServer) -> None:
    issuer, clock = Issuer(), Clock()
    server.data = issuer.jwks()
    jwks = Jwks(server.url, clock)
    tokens, token = JsonWebTokens(EXPECTED, jwks), issuer.token()
    await jwks.refresh()
    assert await tokens.check(token)
    issuer.add("second")
    del issuer.keys["first"]
    clock.now, server.data = 300.0, issuer.jwks()
    await jwks.refresh()
    with pytest.raises(UnauthenticatedError, match="unknown key"):
        await tokens.check(token)


async def test_a_changed_file_is_read_again(jwks_file: Path, issuer: Issuer) -> None:
    clock, other = Clock(), Issuer()
    jwks = Jwks(str(jwks_file), clock)
    tokens = JsonWebTokens(EXPECTED, jwks)
    jwks_file.write_bytes(other.jwks())  # noqa: ASYNC240  (a small file)
    clock.now = 4.9
    await jwks.refresh()
    clock.now = 5.0
    assert await tokens.check(issuer.token())
    await jwks.refresh()
    assert await tokens.check(other.token())
    with pytest.raises(UnauthenticatedError, match="signature is wrong"):
        await tokens.check(issuer.token())


@pytest.mark.parametrize("data", [b"", b"{}", b'{"keys": []}', b'{"keys": [5]}', b"x" * (2 << 20)])
async def test_a_failed_refresh_keeps_the_keys(
    server: JwksServer, issuer: Issuer, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    jwks = Jwks(server.url, clock)
    await jwks.refresh()
    clock.now, server.data = 300.0, data
    await jwks.refresh()
    assert server.num_requests == 2
    assert "keeping the previous keys of tokens: --jwt-jwks" in caplog.text or "Server Error" in caplog.text
    assert await JsonWebTokens(EXPECTED, jwks).check(issuer.token(tenant="after"))


async def test_a_gateway_starts_without_the_issuer(
    server: JwksServer, issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    clock, whole, server.data = Clock(), server.data, b""
    jwks = Jwks(server.url, clock)
    tokens = JsonWebTokens(EXPECTED, jwks)
    await tokens.start()
    with pytest.raises(UnavailableError, match="has not loaded the keys"):
        await tokens.check(issuer.token())
    assert "no keys of tokens" in caplog.text
    clock.now, server.data = 10.0, whole
    assert await tokens.check(issuer.token())
    await tokens.close()


def test_unusable_keys_are_skipped() -> None:
    issuer = Issuer()
    issuer.add("short", "RS256", make_key("RS256", 1024))
    listed = json.loads(issuer.jwks())["keys"]
    listed += [
        {"kty": "oct", "kid": "secret", "k": "c2VjcmV0"},
        {**listed[0], "kid": "encryption", "use": "enc"},
        {**listed[0], "kid": "other algorithm", "alg": "HS256"},
        {"kty": "EC", "crv": "secp256k1", "kid": "curve"},
    ]
    keys = read_keys(json.dumps({"keys": listed}).encode(), "here")
    assert list(keys) == ["first"]
    assert keys["first"].algorithms == ("ES256",)


async def test_a_token_without_a_key_id_needs_a_single_key(tmp_path: Path) -> None:
    issuer, path = Issuer(), tmp_path / "jwks"
    path.write_bytes(issuer.jwks())
    tokens = JsonWebTokens(EXPECTED, Jwks(str(path)))
    assert await tokens.check(issuer.token(header={"kid": None}))
    issuer.add("second")
    path.write_bytes(issuer.jwks())
    with pytest.raises(UnauthenticatedError, match="unknown key"):
        await JsonWebTokens(EXPECTED, Jwks(str(path))).check(issuer.token(header={"kid": None}))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("http://issuer.example.com/jwks", "must be an https:// URL"),
        ("ftp://127.0.0.1/jwks", "must be an https:// URL"),
        ("https://user:pw@issuer.example.com/jwks", "without credentials"),
        ("/no/such/file", "No such file"),
    ],
)
def test_unsafe_or_missing_sources_stop_the_start(source: str, words: str) -> None:
    with pytest.raises(JwksError, match=words) as caught:
        Jwks(source)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("flag", ["--jwt-issuer=i", "--jwt-audience=a", "--jwt-jwks=f"])
def test_the_flags_are_set_together(flag: str) -> None:
    with pytest.raises(CallersError, match="tokens of clients need --jwt-issuer, --jwt-audience, --jwt-jwks; set"):
        make_authenticator(make_parser().parse_args(["--scheduler=a:1", flag]))


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_limits_apply_to_the_owner_of_a_token(
    scheduler: FakeScheduler, tokens: JsonWebTokens, issuer: Issuer, tmp_path: Path
) -> None:
    (tmp_path / "limits.toml").write_text("[owners.team-t]\nmodels = []\n[owners.'sub:alice']\ntokens_per_min = 6\n")
    limits = KeyLimits(LimitsFile(tmp_path / "limits.toml"), LocalBuckets())
    scheduler.play([5])
    admit = Authenticator(None, tokens).admit
    async with TestGateway([scheduler.address], admit=admit, limits=limits) as gateway:
        await gateway.ready()

        async def code_of(token: str) -> str:
            request = pb.GenerateRequest(prompt={"tokens": {"ids": [5, 6]}}, stop={"max_tokens": 9})
            call = gateway.stub.Generate(request, metadata=(("authorization", f"Bearer {token}"),), timeout=60)
            try:
                return "OK" if [event async for event in call] else ""
            except grpc.aio.AioRpcError as error:
                return error.code().name

        assert await code_of(issuer.token(tenant="team-t")) == "PERMISSION_DENIED"
        assert [await code_of(issuer.token()) for _ in range(2)] == ["OK", "RESOURCE_EXHAUSTED"]
        assert await code_of(issuer.token(tenant="team-u")) == "OK"


async def test_keys_and_tokens_are_accepted_beside_each_other(
    scheduler: FakeScheduler, tokens: JsonWebTokens, issuer: Issuer, tmp_path: Path
) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "team-k").write_text("key.with.dots")
    authenticator = Authenticator(ApiKeys(tmp_path / "keys"), tokens)
    scheduler.play([5])
    async with (
        TestGateway([scheduler.address], admit=authenticator.admit) as gateway,
        HttpGateway(gateway, authenticator) as http,
    ):
        await gateway.ready()
        request = pb.GenerateRequest(prompt={"tokens": {"ids": [5, 6]}}, request_id="r")
        for credential in ("key.with.dots", issuer.token(tenant="team-t")):
            metadata = (("authorization", f"Bearer {credential}"),)
            async for _ in gateway.stub.Generate(request, metadata=metadata, timeout=60):
                pass
        headers = {"authorization": f"Bearer {issuer.token()}"}
        assert (await http.post("/v1/completions", {"prompt": "hi"}, headers=headers))[0] == 200
        expired = issuer.token(exp=time.time() - 60)
        error = await refused(gateway.stub.Generate(request, metadata=(("authorization", f"Bearer {expired}"),)))
        assert (error.code().name, error.details()) == ("UNAUTHENTICATED", "the token has expired; get a new one")
        status, _, answer = await http.get("/v1/models", headers={"authorization": f"Bearer {expired}"})
        assert (status, answer["error"]["message"]) == (401, "the token has expired; get a new one")
        status, _, answer = await http.get("/v1/models")
        assert (status, answer["error"]["message"][:50]) == (401, "an API key or a token (JWT) is required; set QUIRE")
    assert [submit.tenant_id for submit in scheduler.submits] == ["team-k", "team-t", "sub:alice"]
    assert [submit.request_id for submit in scheduler.submits][:2] == ["team-k/r", "team-t/r"]
