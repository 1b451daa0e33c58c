"""The tokenizer of a bundle: special tokens, post-processors, invalid files, unsupported settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import transformers
import xxhash
from quire.v1 import inference_pb2 as pb
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from gateway_svc.request.models import read_bundle
from gateway_svc.text.bundle import BundleError, Tokenizer, TooManyTokensError, model_text_from_files
from tests.unit.gateway.fakes import TestGateway, make_bundle
from tests.unit.gateway.tokenizer_kinds import bundle_files, byte_fallback, byte_level


def test_begin_of_text_is_added_if_the_tokenizer_adds_it() -> None:
    tokenizer = Tokenizer.from_files(bundle_files(byte_fallback()))
    assert tokenizer.encode("Hello", add_special_tokens=True)[0] == 1
    assert tokenizer.encode("Hello", add_special_tokens=False)[0] != 1


FLAGS = [{f"add_{side}_token": value for side, value in zip(("bos", "eos"), values, strict=True)}
         for values in ((True, False), (False, True), (False, False), (True, True))]  # fmt: skip


@pytest.mark.parametrize("flags", [{}, *FLAGS])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_ids_are_those_of_transformers_without_eos_behind_the_text(
    tmp_path: Path, flags: dict[str, bool], name: str
) -> None:
    """transformers 5 reads no `add_bos_token` and `add_eos_token` where there is a tokenizer.json."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": name, **flags}
    backend = byte_fallback()
    for single in ("<s> $A", "$A", "<s> $A </s>"):
        backend.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
        files = bundle_files(backend, config)
        for file, data in files.items():
            (tmp_path / file).write_bytes(data)
        expected = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)("Hello").input_ids
        found = Tokenizer.from_files(files)
        assert found.encode("Hello", add_special_tokens=True) == [id_ for id_ in expected if id_ != 2]
        assert found.encode("Hello</s>", add_special_tokens=True)[-1] == 2, "the caller's own"
        assert found.encode_cut("Hello", None) == expected, "an embedding"
        encoder = Tokenizer.from_files(files | {"config.json": b'{"is_encoder_decoder": true}'})
        assert encoder.encode("Hello", add_special_tokens=True) == expected


def test_special_tokens_of_the_configuration_are_added() -> None:
    backend = byte_level()
    files = bundle_files(backend, {"eos_token": {"content": "<|end|>"}, "extra_special_tokens": ["<|pad|>"]})
    tokenizer = Tokenizer.from_files(files)
    ids = tokenizer.encode("a<|end|><|pad|>", add_special_tokens=False)
    assert ids[-2:] == [backend.get_vocab_size(), backend.get_vocab_size() + 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    ids = Tokenizer.from_files(bundle_files(backend)).encode("Hello world, how are you", add_special_tokens=True)
    assert 2 < len(ids) < 50


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"[]", "must hold an object"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
        ("generation_config.json", b"[]", "generation_config.json holds a JSON list"),
    ],
)
def test_an_invalid_file_is_named(name: str, data: bytes, words: str) -> None:
    files = bundle_files(byte_level()) | {name: data}
    with pytest.raises(BundleError, match=words):
        model_text_from_files(files)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"chat_template": [{"template": "x"}]}, "KeyError: 'name'"),
        ({"extra_special_tokens": 5}, "TypeError"),
        ({"added_tokens_decoder": [1]}, "AttributeError"),
    ],
)
def test_a_setting_of_an_unexpected_type_is_named(config: dict[str, Any], words: str) -> None:
    data = make_bundle(bundle_files(byte_level(), config))
    with pytest.raises(BundleError, match=f"its files cannot be read: {words}"):
        read_bundle(data, xxhash.xxh3_128_digest(data))


def test_a_checkpoint_without_tokenizer_has_no_text() -> None:
    assert model_text_from_files({}).tokenizer is None


def test_unsupported_settings_are_listed() -> None:
    config = {"temperature": 0.6, "repetition_penalty": 1.05, "presence_penalty": 0, "num_beams": 4}
    text = model_text_from_files({"generation_config.json": json.dumps(config).encode()})
    assert text.unserved == ("num_beams=4",)


def test_the_longest_token_bounds_the_bytes_per_token() -> None:
    backend: Backend = byte_level()
    backend.add_tokens(["x" * 77])
    assert Tokenizer.from_files(bundle_files(backend)).max_token_bytes == 77


class CountingBackend:
    """Counts the characters that are tokenized."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.num_chars = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)


def test_a_text_that_is_far_too_long_is_not_tokenized_as_a_whole() -> None:
    tokenizer = Tokenizer.from_files(bundle_files(byte_level()))
    counting = tokenizer._backend = CountingBackend(tokenizer._backend)
    with pytest.raises(TooManyTokensError, match="has more than 100 tokens"):
        tokenizer.encode("x1" * 1_000_000, add_special_tokens=False, most=100)
    assert counting.num_chars <= 1000
    text = "<tool call>" * 90  # long, and of few tokens
    assert len(tokenizer.encode(text, add_special_tokens=False, most=100)) == 90
    assert len(tokenizer.encode(text * 2, add_special_tokens=False)) == 180


async def test_the_error_of_a_text_that_is_far_too_long(gateway: TestGateway) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"prompt\.text has more than 256 tokens, the limit") as caught:
        await gateway.collect(prompt=pb.Prompt(text="x1" * 1500))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
