"""An adapter in host memory: its tensors, checked against the decoder, and the digest of its content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from worker_svc.engine.adapters.config import WEIGHTS_FILE, AdapterError, read_adapter_config
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.adapters.targets import AdaptedModule, find_targets
from worker_svc.engine.backend import Adapter, AdapterPart, Module
from worker_svc.engine.checkpoint.architecture import Names
from worker_svc.engine.checkpoint.model_folder import MAX_TENSORS, CheckpointError, open_regular, read_header
from worker_svc.engine.config import EngineConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

P = TypeVar("P")  # an adapter in the form of a backend


def make_store(
    config: EngineConfig,
    modules: Mapping[str, Module],
    names: Names,
    dtype: torch.dtype,
    pack: Callable[[Adapter], P],
) -> AdapterStore[Adapter, P]:
    """The adapters of a decoder, none of them loaded. `pack` prepares one for a backend; any thread may call it."""
    return AdapterStore(
        lambda folder: load_adapter(folder, modules, names, dtype, config.max_adapter_rank),
        pack,
        max_resident=config.max_adapters,
        max_loaded=config.max_loaded_adapters if config.max_adapters else 0,
    )


def load_adapter(
    folder: Path, modules: Mapping[str, Module], names: Names, dtype: torch.dtype, max_rank: int
) -> Adapter:
    """Reads a PEFT folder. Raises AdapterError unless all of it can be computed."""
    config = read_adapter_config(folder)
    with _open(folder / WEIGHTS_FILE) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        targets = find_targets(config, shapes, modules, names)
        rank = max(target.rank for target in targets)
        if rank > max_rank:
            raise AdapterError(
                f"rank: {folder} has rank {rank}, but this worker allows at most {max_rank}; raise --max-adapter-rank"
            )
        digest = xxhash.xxh3_128()
        parts = tuple(_part(file, target, dtype, digest) for target in targets)
    return Adapter(digest.digest(), rank, parts)


def _open(path: Path) -> Any:
    try:
        with open_regular(path) as file:
            read_header(file, path, MAX_TENSORS)
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise AdapterError(
            f"{path} is missing; only adapters in safetensors are read: save it with save_pretrained of PEFT"
        ) from None
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} is damaged ({error}); copy it again") from None


def _part(file: Any, target: AdaptedModule, dtype: torch.dtype, digest: xxhash.xxh3_128) -> AdapterPart:
    """Reads the tensors of a target and adds them to the digest."""
    digest.update(repr((target.module, target.scale)).encode())
    a, b = (_tensor(file, name, digest) for name in (target.a, target.b))
    return AdapterPart(target.module, a.to(dtype), (b.float() * target.scale).to(dtype))


def _tensor(file: Any, name: str, digest: xxhash.xxh3_128) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(name)
    if tensor.dtype not in DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise AdapterError(f"tensor {name} is stored as {kind}; use float32, bfloat16 or float16")
    if not bool(tensor.isfinite().all()):
        raise AdapterError(f"tensor {name} contains NaN or infinity; the adapter is damaged")
    content = tensor.contiguous()
    digest.update(f"{content.dtype}|".encode())
    digest.update(content.reshape(-1).view(torch.uint8).numpy().data)
    return content.clone()  # not memory-mapped: the file may change
