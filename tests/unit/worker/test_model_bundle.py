"""The bundle of a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from quire.v1 import types_pb2

from worker_svc.bundle import ModelFolderError, read_bundle


def make_folder(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f"content of {name}")
    return folder


def test_text_files_and_no_weights(tmp_path: Path) -> None:
    names = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "README.md")
    bundle = read_bundle(make_folder(tmp_path / "m", *names))
    files = types_pb2.ModelBundle.FromString(bundle.data).files
    assert [file.name for file in files] == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert files[1].data == b"content of config.json"
    assert bundle.has_tokenizer
    assert bundle.digest == xxhash.xxh3_128_digest(bundle.data)


def test_all_chat_templates(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "chat_template.json")
    make_folder(folder / "additional_chat_templates", "tool_use.jinja", "notes.txt")
    assert read_bundle(folder).names == (
        "additional_chat_templates/tool_use.jinja",
        "chat_template.json",
        "config.json",
    )


def test_equal_files_give_equal_digests(tmp_path: Path) -> None:
    first = make_folder(tmp_path / "a", "config.json", "tokenizer.json")
    second = make_folder(tmp_path / "b", "tokenizer.json", "config.json")
    assert read_bundle(first) == read_bundle(second)
    (second / "tokenizer.json").write_text("other")
    assert read_bundle(first).digest != read_bundle(second).digest


def test_paths_that_are_not_model_folders(tmp_path: Path) -> None:
    make_folder(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    for name, says in (("missing", "does not exist"), ("file", "is not a folder"), ("empty", "has no config.json")):
        with pytest.raises(ModelFolderError, match=says):
            read_bundle(tmp_path / name)
