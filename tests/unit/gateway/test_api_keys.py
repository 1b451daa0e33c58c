"""API keys: accepted and refused clients, and changes of the key files."""

import hashlib

import grpc
import pytest
from quire.v1 import inference_pb2 as pb

from gateway_svc.callers.authenticator import ApiKeys, ApiKeysError, Authenticator, min_priority
from gateway_svc.callers.caller import Caller
from gateway_svc.flags import make_parser
from svc_common.security.tls import REREAD_S
from tests.unit.gateway.fakes import ABORTED, TestGateway, refused

NO_MESSAGE = b"\xff\xff\xff"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "team-a").write_text("key-a\n")
    (tmp_path / "team-b").write_text("key-b")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "..data").mkdir()
    (tmp_path / "..hidden").write_text("key-hidden")
    return tmp_path


def owner_of(keys, key):
    caller = keys.find(key)
    return caller and caller.owner


def hashed(key):
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def test_a_key_may_be_stored_as_its_digest(tmp_path, caplog):
    (tmp_path / "team-a").write_text(f"{hashed('new').upper().replace('SHA', 'sha')}\n")
    keys = ApiKeys(tmp_path)
    assert keys.find("new") == Caller("team-a", f"key:{hashed('new')[7:19]}")
    assert [owner_of(keys, key) for key in ("", hashed("new"), hashed("new")[7:], "new ")] == [None] * 4
    assert "plaintext" not in caplog.text
    (tmp_path / "team-b").write_text("old")
    ApiKeys(tmp_path)
    assert "1 of 2 keys are stored in plaintext; `quire key hash` prints the line to store" in caplog.text


def test_no_key_is_kept_in_memory(folder):
    """A comparison with a key, whose time would reveal its first characters, needs the key."""
    keys = ApiKeys(folder)
    assert owner_of(keys, "key-a") == "team-a"
    assert "key-a" not in repr(keys._keys())


@pytest.mark.parametrize("line", ["sha256:", "sha256:12", "sha256:" + "g" * 64, hashed("x") + "0"])
def test_an_invalid_digest_stops_the_start_and_is_not_shown(folder, line):
    (folder / "team-b").write_text(f"key-b\n\n{line}\n")
    with pytest.raises(ApiKeysError, match="team-b, line 3: not sha256: and 64 hexadecimal digits") as caught:
        ApiKeys(folder)
    assert line not in str(caught.value) or line == "sha256:"


def test_an_invalid_digest_leaves_the_previous_keys_in_force(folder, caplog):
    now = 0.0
    keys = ApiKeys(folder, clock=lambda: now)
    (folder / "team-b").write_text("sha256:12")
    now = REREAD_S
    assert [owner_of(keys, key) for key in ("key-a", "key-b")] == ["team-a", "team-b"]
    assert "keeping the previous API keys: --api-keys" in caplog.text


def test_the_last_key_can_be_revoked(folder):
    now = 0.0
    keys = ApiKeys(folder, clock=lambda: now)
    for name in ("team-a", "team-b"):
        (folder / name).unlink()
    now = REREAD_S
    assert owner_of(keys, "key-a") is None


async def test_a_request_is_aborted_and_resumed_only_with_a_key_of_its_owner(scheduler, folder):
    def bearer(key):
        return {"metadata": (("authorization", f"Bearer {key}"),), "timeout": 60}

    async with TestGateway([scheduler.address], admit=Authenticator(ApiKeys(folder)).admit) as gateway:
        await gateway.ready()
        request = pb.GenerateRequest(request_id="mine", prompt={"tokens": {"ids": [5, 6]}})
        own = gateway.stub.Generate(request, **bearer("key-a"))
        assert (await own.read()).accepted.request_id == "mine"

        aborted = await gateway.stub.Abort(pb.AbortRequest(request_ids=["mine"]), **bearer("key-b"))
        assert (list(aborted.aborted_ids), list(aborted.unknown_ids)) == ([], ["mine"])
        request.continuation.SetInParent()
        other = gateway.stub.Generate(request, **bearer("key-b"))
        assert (await other.read()).accepted.request_id == "mine"
        assert [submit.request_id for submit in scheduler.submits] == ["team-a/mine", "team-b/mine"]
        assert scheduler.asked_to_abort == ["team-b/mine"]

        scheduler.send(scheduler.submits[0].handle, [7, 8])
        assert list((await own.read()).chunk.token_ids) == [7, 8]
        aborted = await gateway.stub.Abort(pb.AbortRequest(request_ids=["mine"]), **bearer("key-a"))
        assert list(aborted.aborted_ids) == ["mine"]
        assert (await own.read()).finished.reason == ABORTED
        other.cancel()


def test_keys_stay_valid_when_the_folder_is_gone(folder, caplog):
    now = 0.0
    keys = ApiKeys(folder, clock=lambda: now)
    folder.rename(folder.with_name("elsewhere"))
    now = REREAD_S
    assert owner_of(keys, "key-a") == "team-a"
    assert "keeping the previous API keys: --api-keys" in caplog.text


@pytest.mark.parametrize(("name", "words"), [("none", "No such file"), ("", "the folder holds no key")])
def test_a_folder_without_keys_fails_the_start(tmp_path, name, words):
    with pytest.raises(ApiKeysError, match=words):
        ApiKeys(tmp_path / name)


@pytest.mark.parametrize(("key", "code"), [("key-x", "UNAUTHENTICATED"), ("key-a", "INVALID_ARGUMENT")])
async def test_a_body_is_decoded_only_with_a_key(scheduler, folder, key, code):
    """The body is undecodable, so the status code shows whether the gateway tried to decode it."""
    metadata = (("authorization", f"Bearer {key}"),)
    async with TestGateway([scheduler.address], admit=Authenticator(ApiKeys(folder)).admit) as gateway:
        stream = gateway.channel.unary_stream("/quire.v1.InferenceService/Generate")
        assert (await refused(stream(NO_MESSAGE, metadata=metadata))).code().name == code
        call = gateway.channel.unary_unary("/quire.v1.InferenceService/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(NO_MESSAGE, metadata=metadata)
        assert caught.value.code().name == code


@pytest.mark.parametrize(
    ("flags", "limit"), [([], -1000), (["--api-keys=k"], 0), (["--api-keys=k", "--min-priority=-7"], -7)]
)
async def test_priorities_are_limited_with_api_keys(scheduler, flags, limit):
    args = make_parser().parse_args(["--scheduler=a:1", *flags])
    assert min_priority(args) == limit
    scheduler.play([5])
    async with TestGateway([scheduler.address], min_priority=limit) as gateway:
        await gateway.ready()
        assert (await gateway.collect(prompt={"tokens": {"ids": [5]}}, scheduling={"priority": limit})).ids() == [5]
        error = await refused(gateway.generate(prompt={"tokens": {"ids": [5]}}, scheduling={"priority": limit - 1}))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        if limit > -1000:
            assert f"scheduling.priority is {limit - 1}; must be at least {limit} on this gateway" in error.details()
