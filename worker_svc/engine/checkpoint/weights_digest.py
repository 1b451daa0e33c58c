"""A digest of the weights themselves, computed while the model loads.

It distinguishes checkpoints that have equal configurations and shapes. It is computed from the tensors on every load
and stored nowhere, so it cannot be out of date.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

CHUNK_BYTES = 2 << 20  # digested by one thread at a time


class WeightsDigest:
    """xxh3_128 over name, dtype, shape and content of every tensor, in the order of names.

    A tensor is added when it is loaded, so its pages are read only once. The distribution of tensors over files does
    not matter.
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
