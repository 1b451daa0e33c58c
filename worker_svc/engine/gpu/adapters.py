"""The adapters of a device: those of the worker, those of open rows, and those in slots.

    packed    this rank's matrices, in the layout of a slot, in pinned memory     the thread that swaps adapters
    placed    copied to a slot                                                    the thread that launches steps

With several ranks, rank 0 reads the folders. Before a step it tells the other ranks which adapters its rows may open
with, and sends the content of those that no slot has (messages.py). So all ranks open the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from step_protocol.columns import I32, I64
from step_protocol.messages import RowOpen
from worker_svc.engine.adapters.adapter import make_store
from worker_svc.engine.adapters.rows import RowAdapters
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.backend import Adapter
from worker_svc.engine.checkpoint.architecture import Names
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.layers.adapter_shapes import DeviceAdapter
from worker_svc.engine.gpu.layers.device_slots import NO_ADAPTER, DeviceSlots
from worker_svc.engine.gpu.layers.weights import ShardLoader
from worker_svc.engine.gpu.messages import adapter_from_bytes, adapter_pieces, adapters_to_bytes


class DeviceAdapters:
    """Owns the slots and the store. Only the thread that launches steps may use it, except for the store."""

    def __init__(self, config: EngineConfig, loader: ShardLoader, names: Names, device: torch.device) -> None:
        self._shapes = loader.adapter_shapes(config.max_adapter_rank)
        self._is_pinned = device.type == "cuda"
        self.slots = DeviceSlots(self._shapes, config.max_adapters, device, is_exact=config.determinism == "exact")
        self.store: AdapterStore[Adapter, DeviceAdapter] = make_store(
            config, loader.modules(), names, self._shapes.dtype, self._pack
        )
        self._known: dict[bytes, DeviceAdapter] = {}  # that rows of the next step may open with
        self._has_opens = False  # some row of the next step opens with an adapter
        self._pieces: dict[bytes, bytearray] = {}  # content from rank 0
        self.rows = RowAdapters(config.max_num_seqs, self._known_as, config.max_adapters)

    def _pack(self, adapter: Adapter) -> DeviceAdapter:
        return self._shapes.pack(adapter, is_pinned=self._is_pinned)

    def _known_as(self, digest: bytes) -> DeviceAdapter | None:
        return self._known.get(digest)

    def find(self, opens: Sequence[RowOpen]) -> None:
        """Looks up the adapters of rows that will be opened."""
        digests = dict.fromkeys(item.adapter for item in opens if item.adapter)
        self._has_opens = bool(digests)
        found = ((digest, self.store.find(digest)) for digest in digests)
        self._known = {digest: adapter for digest, adapter in found if adapter is not None}

    def know(self, adapter: Adapter) -> None:
        """Lets rows of the next step open with this adapter."""
        self._known = {adapter.digest: self._pack(adapter)}

    def place(self) -> None:
        """Copies the adapters of open rows that are in no slot."""
        self.slots.place(self.rows.in_use.values())

    def of_tokens(self, token_rows: I64) -> I32 | None:
        """The slot of each token's adapter, or NO_ADAPTER. None: no token has an adapter."""
        if not self.rows.in_use:
            return None
        slots = np.full(len(self.rows.numbers), NO_ADAPTER, np.int32)
        for number, adapter in self.rows.in_use.items():
            slots[self.rows.numbers == number] = self.slots.slot_of(adapter.digest)
        found: I32 = slots[token_rows]
        return found if bool((found != NO_ADAPTER).any()) else None

    # Between ranks

    def messages(self) -> Iterator[bytes]:
        """What the other ranks need before the step: the adapters that were found."""
        if not self._has_opens:
            return
        for digest, adapter in self._known.items():
            if not self.slots.has(digest) and adapter.source is not None:
                yield from adapter_pieces(adapter.source)
        yield adapters_to_bytes(list(self._known))

    def receive_piece(self, digest: bytes, piece: bytes) -> None:
        """Rank 0 sends the pieces of an adapter in order."""
        self._pieces.setdefault(digest, bytearray()).extend(piece)

    def receive_known(self, digests: Sequence[bytes]) -> None:
        """Rank 0 has found these. Those that came without content are in slots."""
        self._known = {digest: self._received(digest) for digest in digests}

    def _received(self, digest: bytes) -> DeviceAdapter:
        pieces = self._pieces.pop(digest, None)
        if pieces is None:
            return DeviceAdapter(digest, torch.empty(0), torch.empty(0))
        return self._pack(adapter_from_bytes(digest, bytes(pieces)))
