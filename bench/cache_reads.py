"""Bytes that a decoding token reads of its cache of latents (MLA), counted, in bfloat16.

    python bench/cache_reads.py        # half a minute, mostly the compiler's (g++)

The attention kernels are compiled with a call for each load and store. Each thread has a simulated second-level cache,
and all share a third level, so the figures do not depend on the machine. `bytes_per_token`: from memory, per token of
context and layer; `of_cache`: that / what the cache holds; `own_caches`: what all second-level caches fetch / that.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from worker_svc.engine.backend import LatentShape
from worker_svc.engine.cpu.fused import latent_struct
from worker_svc.engine.kernels.build import SOURCES, STRICT_FLAGS

SHAPES = {  # heads of all layers
    "GLM-4.7-Flash": LatentShape(20, 512, 64, 192, 256, is_interleaved=True),
    "DeepSeek V3": LatentShape(128, 512, 64, 128, 128, is_interleaved=True),
}
CONTEXT, BLOCK = 8192, 16
L2_BYTES, L3_BYTES = 512 << 10, 4 << 20
COUNTED = ("attention", "attention_plan")
COUNT_FLAGS = ["-fsanitize=kernel-address", "-march=native"]
COUNT_FLAGS += [f"--param=asan-{name}=0" for name in ("instrumentation-with-call-threshold", "stack", "globals")]


def main() -> None:
    """Each count has a process of its own, whose caches are empty."""
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        for name in SHAPES:
            for threads in (1, 2):
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    found = pool.submit(count, library, name, threads).result()
                print(json.dumps({"model": name, "threads": threads} | found), flush=True)


def build(folder: Path) -> Path:
    """The kernels of attention, with counters."""
    wanted = [source for source in SOURCES if source.stem in (*COUNTED, "cpu", "team")]
    objects = []
    for source in (*wanted, Path(__file__).with_suffix(".cpp")):
        objects.append(folder / f"{source.stem}.o")
        flags = COUNT_FLAGS if source.stem in COUNTED else ["-march=native"]
        subprocess.run(["g++", *STRICT_FLAGS, *flags, "-c", source, "-o", objects[-1]], check=True)
    library = folder / "counted.so"
    subprocess.run(["g++", "-shared", "-pthread", *objects, "-o", library], check=True)
    return library


def count(library: Path, name: str, threads: int) -> dict[str, float]:
    """One row that decodes after CONTEXT - 1 tokens."""
    kernels, shape = ctypes.CDLL(str(library)), SHAPES[name]
    num_blocks = CONTEXT // BLOCK
    q = torch.randn(1, shape.num_heads, shape.width).bfloat16()
    cache = torch.randn(num_blocks, BLOCK, shape.width).bfloat16()
    out = torch.empty(1, shape.num_heads, shape.rank, dtype=torch.bfloat16)
    table = np.arange(num_blocks, dtype=np.int32)
    rows, starts, contexts = (np.array(values, np.int32) for values in ([0], [0, 1], [CONTEXT - 1]))
    bytes_of_cache = cache.numel() * cache.element_size()
    kernels.reads_begin(*map(ctypes.c_uint64, (cache.data_ptr(), bytes_of_cache, L2_BYTES, L3_BYTES)))
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in (table, rows, starts, contexts)]
    kernels.quire_latent_attention(
        1, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (q, cache, out)), addresses[0],
        ctypes.c_int64(num_blocks), *addresses[1:], ctypes.c_int64(1), ctypes.c_int64(BLOCK),
        ctypes.byref(latent_struct(shape)), ctypes.c_float(shape.query_dim**-0.5), threads,
    )  # fmt: skip
    from_memory, from_shared = kernels.reads_from_memory(), kernels.reads_from_shared()
    return {
        "bytes_per_token": round(from_memory / CONTEXT, 1),
        "of_cache": round(from_memory / bytes_of_cache, 3),
        "own_caches": round(from_shared / bytes_of_cache, 3),
    }


if __name__ == "__main__":
    main()
