"""A Hugging Face model folder: its configuration and its tensors, read from memory-mapped safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from worker_svc.engine.checkpoint.model_folder import (
    INDEX_FILE,
    WEIGHT_DTYPES,
    CheckpointError,
    decoder_config,
    open_regular,
    read_config,
    read_header,
    read_object,
    read_weight_map,
    tensor_name,
    weight_files,
)
from worker_svc.engine.kernels.memory import release_files

GENERATION_FILE = "generation_config.json"
CHUNK_BYTES = 2 << 20  # digested by one thread at a time
View: TypeAlias = tuple[str, tuple[int | slice, ...]]  # a tensor, and the index of a part of it; empty: all
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """One model folder. Tensors stay on disk until they are read. Those of `updates` replace tensors of the folder, the
    last file first.

    Raises CheckpointError when the folder, a file or the index is missing or broken, or an update does not fit.
    """

    def __init__(self, folder: Path, updates: Sequence[Path] = ()) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give the folder that holds config.json")
        self.folder = folder
        self.config = decoder_config(read_config(folder))
        self.has_generation_config = (folder / GENERATION_FILE).exists()
        self.generation_config = read_object(folder / GENERATION_FILE) if self.has_generation_config else {}
        self._weight_map = read_weight_map(folder)
        self._files = {name: _open(folder / name) for name in weight_files(self._weight_map)}
        stored = [(name, file) for file in self._files.values() for name in file.keys()]  # noqa: SIM118
        self._file_of = {tensor_name(name): file for name, file in stored}
        self._stored_name = {tensor_name(name): name for name, _ in stored}
        self._digest: WeightsDigest | None = None
        self._update_of: dict[str, Path] = {}  # the update of each tensor that is not the folder's
        self._views: dict[str, View] = {}
        self._check_index()
        self._rename_scales()
        for path in updates:
            self._replace(path)

    def _rename_scales(self) -> None:
        """transformers names the scale of a whole tensor like those of blocks."""
        for name in [name for name in self._file_of if name.endswith(".weight_scale_inv")]:
            if self.shape(name) in ((), (1,)):
                present = name.removesuffix("_inv")
                self._file_of[present], self._stored_name[present] = (
                    self._file_of.pop(name),
                    self._stored_name.pop(name),
                )

    def add_views(self, views: Mapping[str, View]) -> None:
        """Parts of tensors, or tensors, by the names under which they are read from now on."""
        self._views.update(views)

    def _replace(self, path: Path) -> None:
        """Take the tensors of this file from now on. Raises CheckpointError naming the tensor that does not fit."""
        file = _open(path, max_tensors=len(self._file_of))
        names = file.keys()
        if not names:
            raise CheckpointError(f"{path.name} has no tensors")
        for stored in names:
            self._check_replacement(path, file.get_slice(stored), stored)
        for stored in names:
            name = tensor_name(stored)
            self._file_of[name], self._stored_name[name], self._update_of[name] = file, stored, path

    def _check_replacement(self, path: Path, found: Any, stored: str) -> None:
        name = tensor_name(stored)
        if name not in self._file_of:
            raise CheckpointError(f"tensor {stored} of {path.name} is not a tensor of the model; leave it out")
        if tuple(found.get_shape()) != self.shape(name):
            raise CheckpointError(
                f"tensor {stored} of {path.name} has shape {found.get_shape()}, but the model's has "
                f"{list(self.shape(name))}"
            )
        mine = self._file_of[name].get_slice(self._stored_name[name]).get_dtype()
        theirs = found.get_dtype()
        if theirs != mine and not (theirs in WEIGHT_DTYPES and mine in WEIGHT_DTYPES):
            raise CheckpointError(f"tensor {stored} of {path.name} has type {theirs}, but the model's has {mine}")

    def used_updates(self) -> set[Path]:
        """The updates from which some tensor is read: no later one replaces all of theirs."""
        return set(self._update_of.values())

    @property
    def tensor_names(self) -> list[str]:
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; raises CheckpointError if it is missing."""
        stored, part = self._views.get(name, (name, ()))
        self._require(stored)
        shape = tuple(self._file_of[stored].get_slice(self._stored_name[stored]).get_shape())
        return tuple(torch.empty(shape, device="meta")[part].shape) if part else shape

    def has(self, name: str) -> bool:
        return name in self._file_of or name in self._views

    def has_float(self, name: str) -> bool:
        """Whether there is such a tensor, in a float type."""
        stored, _ = self._views.get(name, (name, ()))
        return (
            self.has(name) and self._file_of[stored].get_slice(self._stored_name[stored]).get_dtype() in WEIGHT_DTYPES
        )

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        stored: tuple[torch.dtype, ...] = SUPPORTED_DTYPES,
    ) -> torch.Tensor:
        """The tensor in `dtype`; None: in its stored dtype, still memory-mapped. Raises CheckpointError if its shape is
        not `shape`, or its stored dtype not one of `stored`."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(found)}, but config.json requires {list(shape)}; "
                "the weights and config.json belong to different models"
            )
        view, part = self._views.get(name, (name, ()))
        tensor: torch.Tensor = self._file_of[view].get_tensor(self._stored_name[view])[part]
        if tensor.dtype not in stored:
            raise CheckpointError(
                f"tensor {name} is stored as {_dtype_name(tensor.dtype)}, but config.json requires "
                f"{' or '.join(map(_dtype_name, stored))}; the weights and config.json belong to different models"
            )
        if self._digest is not None and view == name:
            self._digest.add(name, tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def check_names(self, expected: Iterable[str], ignored: Iterable[str], unread: Iterable[str] = ()) -> None:
        """Raises CheckpointError unless the tensors are exactly `expected`; names that end in one of `ignored` or begin
        with one of `unread` are allowed."""
        wanted, endings, starts = set(expected), tuple(ignored), tuple(unread)
        found = self._file_of.keys() - {stored for stored, _ in self._views.values()} | self._views.keys()
        missing = sorted(wanted - found)
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors are missing, first {missing[0]}; "
                f"the download of {self.folder} is incomplete or config.json belongs to another model"
            )
        others = found - wanted
        unexpected = sorted(name for name in others if not (name.endswith(endings) or name.startswith(starts)))
        if unexpected:
            shape = list(self.shape(unexpected[0]))
            raise CheckpointError(
                f"{len(unexpected)} tensors are unexpected, first {unexpected[0]} {shape}; "
                "this architecture does not support them, and without them the output would be wrong"
            )

    def start_digest(self, threads: int) -> None:
        """Adds each tensor that is read from now on to the digest of the weights."""
        self._digest = WeightsDigest(threads)

    def add_to_digest(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor of another file of the folder to the digest of the weights."""
        if self._digest is not None:
            self._digest.add(name, tensor)

    def weights_digest(self) -> str:
        """The digest of all tensors in hex, including tensors that were not read since `start_digest`. Empty if
        `start_digest` was not called. Ends a load: pages of the files are mapped again when a tensor is read again."""
        if self._digest is None:
            return ""
        for name, file in self._file_of.items():
            self._digest.add(name, file.get_tensor(self._stored_name[name]))
        release_files([*map(self.folder.joinpath, self._files), *self.used_updates()])
        return self._digest.result()

    def revision(
        self,
        weights_digest: str,
        dtype: torch.dtype,
        quantize: str | None = None,
        numerics: str | None = None,
        kv_cache_dtype: str = "auto",
        *others: str,
    ) -> str:
        """Hex digest of everything that KV content and tokens depend on: configuration, weights, the dtypes in use, the
        quantization and, if given, the kind of worker, and `others`."""
        parts = [self.config, weights_digest, _dtype_name(dtype), quantize, numerics, kv_cache_dtype, *others]
        text = json.dumps(parts, sort_keys=True)
        return xxhash.xxh3_128_hexdigest(text.encode())

    def stored_dtype(self) -> torch.dtype:
        """The dtype of the first tensor."""
        name = self.tensor_names[0]
        dtype: torch.dtype = self._file_of[name].get_slice(self._stored_name[name])[:0].dtype
        return dtype

    def _require(self, name: str) -> None:
        if name not in self._file_of:
            raise CheckpointError(f"tensor {name} is missing from {self.folder}; download the model again")

    def _check_index(self) -> None:
        for tensor, file in self._weight_map.items():
            if tensor not in self._file_of:
                raise CheckpointError(f"tensor {tensor} is not in {file}, although {INDEX_FILE} lists it there")


def _open(path: Path, *, max_tensors: int | None = None) -> Any:
    """Opens a file. The library's own reader holds Python's lock for as long as the file makes it wait, so a limit of
    tensors is checked before."""
    try:
        if max_tensors is not None:
            with open_regular(path) as file:
                read_header(file, path, max_tensors)
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; download the model again") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); download it again") from error


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class WeightsDigest:
    """xxh3_128 over name, dtype, shape and content of every tensor, in the order of names.

    It distinguishes checkpoints that have equal configurations and shapes. A tensor is added when it is loaded, so its
    pages are read only once, and the digest is stored nowhere, so it cannot be out of date. The distribution of tensors
    over files does not matter.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights-digest")
        self._digests: dict[str, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Digests a tensor, unless it was added before."""
        if name in self._digests:
            return
        content = tensor.reshape(-1).view(torch.uint8).numpy()
        chunks = [content[start : start + CHUNK_BYTES].data for start in range(0, len(content), CHUNK_BYTES)]
        total = xxhash.xxh3_128(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        for digest in self._pool.map(xxhash.xxh3_128_digest, chunks):
            total.update(digest)
        self._digests[name] = total.digest()

    def result(self) -> str:
        """The digest of all tensors, in hex. None can be added after this."""
        self._pool.shutdown()
        return xxhash.xxh3_128_hexdigest(b"".join(digest for _, digest in sorted(self._digests.items())))
