"""The text side of a checkpoint, as one message with a digest: tokenizer, chat template, generation defaults.

A gateway gets the bundle from a worker through the scheduler, so it needs no model folder. Weights are not included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash
from quire.v1 import types_pb2

from worker_svc.engine.checkpoint.model_folder import bundle_files


class ModelFolderError(Exception):
    """The model folder cannot be used; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A serialized ModelBundle. The digest is xxh3_128 of the bytes, 16 bytes; equal files give equal digests."""

    data: bytes
    digest: bytes
    names: tuple[str, ...]

    @property
    def has_tokenizer(self) -> bool:
        """Whether the worker can serve text. Without a tokenizer it serves token ids only."""
        return "tokenizer.json" in self.names


def read_bundle(model_dir: Path) -> Bundle:
    """Reads the `bundle_files` of a Hugging Face model folder. Raises ModelFolderError."""
    if not model_dir.is_dir():
        problem = "is not a folder" if model_dir.exists() else "does not exist"
        raise ModelFolderError(f"--model {model_dir} {problem}; give a folder with config.json and *.safetensors")
    if not (model_dir / "config.json").is_file():
        raise ModelFolderError(f"--model {model_dir} has no config.json; give a Hugging Face checkpoint folder")
    names = bundle_files(model_dir)
    try:
        files = [types_pb2.BundleFile(name=name, data=(model_dir / name).read_bytes()) for name in names]
    except OSError as error:
        raise ModelFolderError(f"--model {model_dir}: cannot read {error.filename}: {error.strerror}") from error
    data = types_pb2.ModelBundle(files=files).SerializeToString(deterministic=True)
    return Bundle(data=data, digest=xxhash.xxh3_128_digest(data), names=names)
