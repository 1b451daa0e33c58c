"""The text side of a checkpoint, as one message with a digest: tokenizer, chat template, generation defaults.

A gateway gets the bundle from a worker through the scheduler, so it needs no model folder. Weights are not included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash
from quire.v1 import types_pb2

BUNDLE_FILES = (
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "modules.json",
    "preprocessor_config.json",
    "processor_config.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
TEMPLATES = "additional_chat_templates/*.jinja"  # named chat templates


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
    """Reads those BUNDLE_FILES and TEMPLATES that a Hugging Face model folder has. Raises ModelFolderError."""
    if not model_dir.is_dir():
        problem = "is not a folder" if model_dir.exists() else "does not exist"
        raise ModelFolderError(f"--model {model_dir} {problem}; give a folder with config.json and *.safetensors")
    if not (model_dir / "config.json").is_file():
        raise ModelFolderError(f"--model {model_dir} has no config.json; give a Hugging Face checkpoint folder")
    named = (path.relative_to(model_dir).as_posix() for path in model_dir.glob(TEMPLATES))
    names = tuple(name for name in sorted([*BUNDLE_FILES, *named]) if (model_dir / name).is_file())
    try:
        files = [types_pb2.BundleFile(name=name, data=(model_dir / name).read_bytes()) for name in names]
    except OSError as error:
        raise ModelFolderError(f"--model {model_dir}: cannot read {error.filename}: {error.strerror}") from error
    data = types_pb2.ModelBundle(files=files).SerializeToString(deterministic=True)
    return Bundle(data=data, digest=xxhash.xxh3_128_digest(data), names=names)
