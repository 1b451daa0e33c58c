"""Reads files of a Hugging Face model folder without torch, to reject unusable folders before torch is imported."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash

from step_protocol.types import TensorChecksum

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
_Choice = TypeVar("_Choice")
LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header, little endian
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
MAX_TENSORS = 20_000  # in a file that is compared with no model
MAX_METADATA_BYTES, MAX_ENTRY_BYTES = 1 << 20, 512  # bounds of a header, where tensors are counted
CHUNK_BYTES = 1 << 20
WEIGHT_DTYPES = ("F32", "BF16", "F16")
QUANTIZED_DTYPES = ("I8", "F8_E4M3")

BUNDLE_FILES = (
    "chat_template.jinja", "chat_template.json", "config.json", "config_sentence_transformers.json",
    "generation_config.json", "modules.json", "preprocessor_config.json", "processor_config.json",
    "sentence_bert_config.json", "special_tokens_map.json", TOKENIZER, "tokenizer_config.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates/*.jinja"  # named chat templates
# A model with a tower nests the tensors of its decoder.
NESTED = {
    "model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
    "model.visual.": "visual.", "model.vision_tower.": "vision_tower.", "model.vision_model.": "vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.", "model.embed_vision.": "embed_vision.",
    "model.audio_tower.": "audio_tower.", "model.embed_audio.": "embed_audio.",
}  # fmt: skip

RENAMED = {  # endings of names in older files, and in transformers' own fp8 files
    ".LayerNorm.gamma": ".LayerNorm.weight",
    ".LayerNorm.beta": ".LayerNorm.bias",
    ".activation_scale": ".input_scale",
}


class CheckpointError(ValueError):
    """A model folder that cannot be served. The message names the file, field or tensor and says what to do."""


def bundle_files(folder: Path) -> tuple[str, ...]:
    """The files that say which tokens a text has and how requests are sampled, in order."""
    named = (path.relative_to(folder).as_posix() for path in folder.glob(TEMPLATES))
    return tuple(name for name in sorted([*BUNDLE_FILES, *named]) if (folder / name).is_file())


def bundle_digest(folder: Path) -> str:
    """The digest of these files in hex."""
    files = {name: xxhash.xxh3_128_hexdigest((folder / name).read_bytes()) for name in bundle_files(folder)}
    return xxhash.xxh3_128_hexdigest(json.dumps(files).encode())


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; give a Hugging Face model folder") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must contain a JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model. Raises CheckpointError, also for `architectures` that are not names."""
    config = read_object(folder / "config.json")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"architectures: config.json must hold a list of names, found {names!r}")
    return config


def read_objects(path: Path) -> list[dict[str, Any]]:
    """A JSON file with a list of objects. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise CheckpointError(f"{path} must contain a JSON list of objects")
    return content


def size_of(config: Mapping[str, Any], field: str, default: int | None = None, *, within: str = "") -> int:
    """A positive integer; `default` if it is missing or null. Raises CheckpointError naming the field."""
    value = default if config.get(field) is None else config[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{within}{field}: config.json must hold a positive integer, found {value!r}")
    return value


def choice_of(name: object, supported: Mapping[str, _Choice], field: str) -> _Choice:
    """What a name in config.json stands for. Raises CheckpointError naming the field."""
    if not isinstance(name, str) or name not in supported:
        raise CheckpointError(f"{field}: {name!r} is not supported; use one of {', '.join(supported)}")
    return supported[name]


def decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the fields of `text_config`, where models with a tower have those of their decoder."""
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, dict) else config


def tensor_name(stored: str) -> str:
    """The name of a tensor without the nesting of models with a tower, in its present spelling."""
    for ending, present in RENAMED.items():
        if stored.endswith(ending):
            stored = stored.removesuffix(ending) + present
    for prefix, short in NESTED.items():
        if stored.startswith(prefix):
            return short + stored.removeprefix(prefix)
    return stored


def read_weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor of a sharded checkpoint; empty for a single file. Raises CheckpointError."""
    if (folder / SINGLE_FILE).exists():
        return {}  # the single file has precedence over an index, as in transformers
    if (folder / INDEX_FILE).exists():
        weight_map = read_object(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map; download it again")
        return {tensor_name(str(tensor)): str(file) for tensor, file in weight_map.items()}
    raise CheckpointError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
        "only safetensors checkpoints are supported; convert the model with save_pretrained"
    )


def weight_files(weight_map: dict[str, str]) -> list[str]:
    """The names of the weight files."""
    return sorted(set(weight_map.values())) or [SINGLE_FILE]


def check_weight_files(folder: Path, *, is_quantized: bool) -> None:
    """Compares the size of every weight file with its header. Raises CheckpointError. Reads no weights."""
    dtypes = WEIGHT_DTYPES + (QUANTIZED_DTYPES if is_quantized else ())
    for name in weight_files(read_weight_map(folder)):
        try:
            _check_file(folder / name, dtypes)
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder / name} is missing; download the model again") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {folder / name}: {error.strerror}") from error


def open_regular(path: Path) -> BinaryIO:
    """A file to read. Raises CheckpointError for what may let its reader wait, such as a FIFO or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise CheckpointError(f"{path} is damaged (it is not a regular file); put a file there")


def read_header(file: BinaryIO, path: Path, max_tensors: int | None = None) -> dict[str, Any]:
    """The entries of the tensors; the file is read up to their data. Raises CheckpointError. `max_tensors` bounds the
    time that other threads wait for the parser."""
    size = os.fstat(file.fileno()).st_size
    most = MAX_HEADER_BYTES if max_tensors is None else MAX_METADATA_BYTES + max_tensors * MAX_ENTRY_BYTES
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path} is damaged (it has no safetensors header); download it again")
    if LENGTH_BYTES + length > size:
        raise CheckpointError(f"{path} is damaged (its header is truncated at {size} bytes); download it again")
    if length > most:
        raise CheckpointError(f"{path} has a header of {length} bytes; it may have {most}; write fewer tensors")
    header = _header(path, file.read(length))
    if max_tensors is not None and len(header) > max_tensors:
        raise CheckpointError(f"{path} has {len(header)} tensors; it may have {max_tensors}; write fewer tensors")
    return header


def _check_file(path: Path, dtypes: tuple[str, ...]) -> None:
    with open_regular(path) as file:
        header = read_header(file, path)
        size, start = os.fstat(file.fileno()).st_size, file.tell()
    ends = [entry["data_offsets"][1] for entry in header.values()]
    expected = start + max(ends, default=0)
    if size != expected:
        problem = "truncated" if size < expected else "too long"
        raise CheckpointError(
            f"{path} is damaged ({problem}: it has {size} bytes, its header requires {expected}); download it again"
        )
    for tensor, entry in header.items():
        if tensor.endswith(".weight") and entry["dtype"] not in dtypes:
            raise CheckpointError(
                f"tensor {tensor} is stored as {entry['dtype']}; with the quantization_config of config.json, if any, "
                f"weights are stored as {', '.join(dtypes)}; download the model again"
            )


def tensor_sums(path: Path, max_tensors: int = MAX_TENSORS) -> list[TensorChecksum]:
    """The tensors of a safetensors file, by name. Raises CheckpointError."""
    found, end = [], 0
    try:
        with open_regular(path) as file:
            header, data = read_header(file, path, max_tensors), file.tell()
            size = os.fstat(file.fileno()).st_size - data
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                start, after = entry["data_offsets"]
                if start != end or not start <= after <= size:
                    raise ValueError(f"tensor {name} has bytes {start} to {after}; begin at {end}, end by {size}")
                end = after
                found.append(
                    TensorChecksum(name, entry["dtype"], tuple(entry["shape"]), _checksum(file, data, start, end))
                )
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; write it below --weights-dir of every worker") from error
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); write it again") from error
    return sorted(found, key=lambda one: one.name)


def _checksum(file: BinaryIO, data: int, start: int, end: int) -> str:
    digest = xxhash.xxh3_64()
    file.seek(data + start)
    for at in range(start, end, CHUNK_BYTES):
        digest.update(file.read(min(CHUNK_BYTES, end - at)))
    return digest.hexdigest()


def _header(path: Path, data: bytes) -> dict[str, Any]:
    """The entries of the tensors. Raises CheckpointError if they are not valid."""
    try:
        entries = {name: entry for name, entry in json.loads(data).items() if name != "__metadata__"}
        if all(isinstance(e["dtype"], str) and isinstance(e["data_offsets"][1], int) for e in entries.values()):
            return entries
    except (ValueError, AttributeError, KeyError, IndexError, TypeError):
        pass
    raise CheckpointError(f"{path} is damaged (its header is not valid JSON of safetensors); download it again")


def eos_token_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a sequence, from generation_config.json or else config.json. Raises ValueError."""
    ids = generation_config.get("eos_token_id", config.get("eos_token_id"))
    found = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 1 << 32 for token in found):
        raise ValueError(f"eos_token_id must be a token id or a list of them, found {ids!r}")
    return tuple(found)


def check_same_vocabulary(folder: Path, other: Path, size: int, other_size: int) -> None:
    """Raises ValueError unless equal ids are equal tokens. Configurations may pad the vocabulary differently."""
    files = [path for path in (folder / TOKENIZER, other / TOKENIZER) if path.exists()]
    if not files and size == other_size:
        return
    if not files:
        raise ValueError(f"{other} has {other_size} token ids and no {TOKENIZER}, but {folder} has {size} ids")
    if len(files) == 1:
        raise ValueError(f"only {files[0]} exists: {other} and {folder} must have the same tokenizer")
    first, second = (_ids(read_object(path)) for path in files)
    differing = first.items() ^ second.items()
    if differing:
        token, id_ = min(differing, key=lambda pair: (pair[1], pair[0]))
        raise ValueError(
            f"the tokenizers of {other} and {folder} differ, first in token {token!r} with id {id_}; drafts need the "
            "same vocabulary"
        )


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """The id of each token."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    pairs = vocabulary if isinstance(vocabulary, dict) else {piece[0]: id_ for id_, piece in enumerate(vocabulary)}
    return pairs | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
