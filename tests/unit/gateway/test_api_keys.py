"""API keys: accepted and refused clients, and changes of the key files."""

import grpc
import pytest

from gateway_svc.api_keys import REREAD_S, ApiKeyInterceptor, ApiKeys, ApiKeysError
from tests.unit.gateway.fakes import TestGateway, refused

NO_MESSAGE = b"\xff\xff\xff"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "team-a").write_text("key-a\n")
    (tmp_path / "team-b").write_text("key-b")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "..data").mkdir()
    (tmp_path / "..hidden").write_text("key-hidden")
    return tmp_path


def test_each_file_is_a_key(folder):
    keys = ApiKeys(folder)
    assert [keys.owner_of(key) for key in ("key-a", "key-b")] == ["team-a", "team-b"]
    assert [keys.owner_of(key) for key in ("", "key-", "KEY-A", "team-a", "key-hidden")] == [None] * 5


def test_added_and_removed_files_take_effect(folder):
    now = 0.0
    keys = ApiKeys(folder, clock=lambda: now)
    (folder / "team-a").unlink()
    (folder / "team-c").write_text("key-c")
    assert [keys.owner_of(key) for key in ("key-a", "key-c")] == ["team-a", None]
    now = REREAD_S
    assert [keys.owner_of(key) for key in ("key-a", "key-c")] == [None, "team-c"]


def test_keys_stay_valid_when_the_folder_is_gone(folder, caplog):
    now = 0.0
    keys = ApiKeys(folder, clock=lambda: now)
    folder.rename(folder.with_name("elsewhere"))
    now = REREAD_S
    assert keys.owner_of("key-a") == "team-a"
    assert "cannot read API keys, keeping the previous ones" in caplog.text


@pytest.mark.parametrize(("name", "words"), [("none", "No such file"), ("", "the folder holds no key")])
def test_a_folder_without_keys_fails_the_start(tmp_path, name, words):
    with pytest.raises(ApiKeysError, match=words):
        ApiKeys(tmp_path / name)


@pytest.mark.parametrize(("key", "code"), [("key-x", "UNAUTHENTICATED"), ("key-a", "INVALID_ARGUMENT")])
async def test_a_body_is_decoded_only_with_a_key(scheduler, folder, key, code):
    """An undecodable body shows whether it was decoded."""
    metadata = (("authorization", f"Bearer {key}"),)
    async with TestGateway([scheduler.address], interceptors=[ApiKeyInterceptor(ApiKeys(folder))]) as gateway:
        stream = gateway.channel.unary_stream("/quire.v1.InferenceService/Generate")
        assert (await refused(stream(NO_MESSAGE, metadata=metadata))).code().name == code
        call = gateway.channel.unary_unary("/quire.v1.InferenceService/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(NO_MESSAGE, metadata=metadata)
        assert caught.value.code().name == code
