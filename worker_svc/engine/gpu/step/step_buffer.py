"""The upload of a step, in one pinned buffer and one copy: its columns, padded to a bucket, and deltas of row records.

    header (number of rows) | rows | starts | contexts | sampling rows, tokens, numbers, positions | tokens | deltas |
    adapters

Columns are at fixed offsets, as CUDA graphs require. The deltas follow the tokens of this step. The adapters of tokens
are a second copy, of steps that have some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from request_fields.fields import MAX_BANNED_IDS
from step_protocol.columns import I32, I64
from worker_svc.engine.backend import DeepRows, Embedded, RotaryTable, SnapshotColumns
from worker_svc.engine.gpu.kernels.attention import Queries
from worker_svc.engine.gpu.layers.device_slots import NO_ADAPTER, TokenAdapters
from worker_svc.engine.gpu.step.device_rows import HEAD_WORDS
from worker_svc.engine.gpu.uploads import to_device
from worker_svc.engine.step import CheckedStep

HEADER_WORDS = 4
NO_ROW = -1
NO_IDS: I64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes that a step is padded to. All steps of a bucket share one graph."""

    tokens: int
    rows: int
    samples: int
    is_decode: bool  # every row has one query
    is_filtered: bool  # some row has a filter or banned token ids
    ends_at_logits: bool = False  # processing and sampling are launched separately, behind the graph
    has_adapters: bool = False  # some token has an adapter
    has_drafts: bool = False  # some row computes drafts behind its newest token
    is_verify: bool = False  # every token is sampled, and the queries of a row fit a tile of decoding rows

    @property
    def has_prompts(self) -> bool:
        return not (self.is_decode or self.is_verify)


@dataclass(frozen=True, slots=True)
class PlacedInputs:
    """Embeddings of tokens of a step, on the device, or what is added to tokens after each of the first layers."""

    tokens: torch.Tensor  # int64 [n]
    rows: torch.Tensor  # [n, hidden_size], or [layers, n, hidden_size]

    @classmethod
    def of(cls, given: Embedded | DeepRows | None, device: torch.device) -> PlacedInputs | None:
        return None if given is None else cls(to_device(given.tokens, device), to_device(given.rows, device))


NO_SNAPSHOTS = SnapshotColumns(*np.zeros((3, 1), np.int32))


@dataclass(frozen=True, slots=True)
class HostStep:
    """What a step has beside its columns: its lengths on the host, for attention that needs them, and what its inputs
    add. Not available in graphs."""

    starts: I64  # [B + 1]
    contexts: I64  # [B]
    inputs: PlacedInputs | None = None  # None: all tokens are of the vocabulary
    deep: PlacedInputs | None = None
    rotary: RotaryTable | None = None  # with a row for each token, in place of that of the layers
    rows: Sequence[int] = ()  # [B]
    snapshots: SnapshotColumns = NO_SNAPSHOTS  # states that recurrent layers keep

    @property
    def fits_graph(self) -> bool:
        """Whether a graph computes the step."""
        return self.inputs is None and self.rotary is None


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A step on the device, int32. Padding: rows without queries, tokens without slots, sample rows of -1."""

    bucket: Bucket
    num_rows: torch.Tensor  # [1]
    queries: Queries
    sample_rows: torch.Tensor  # [S]
    sample_tokens: torch.Tensor  # [S]
    nth: torch.Tensor  # [S] of the samples of a row with drafts; 0 for other rows
    output_positions: torch.Tensor  # [S]
    known: torch.Tensor  # [T] token ids; negative: the row's last token
    token_ids: torch.Tensor  # [T] this and the next two are written by the prepare kernel
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T]
    host: HostStep | None = None
    adapters: TokenAdapters | None = None  # None: no token has one


@dataclass(slots=True)
class Staging:
    """Pinned host memory of one step: its upload, its download, and the event at the end of the download."""

    up: torch.Tensor
    down: torch.Tensor
    event: Any  # torch.cuda.Event; None without a GPU


class StepBuffer:
    """Device memory of uploads, and their layout on both sides. A row with drafts has several samples."""

    def __init__(
        self, max_rows: int, max_samples: int, max_tokens: int, state: torch.Tensor, device: torch.device
    ) -> None:
        self._state = state
        self._tables = state[:, HEAD_WORDS : state.shape[1] - MAX_BANNED_IDS]
        self._places: dict[str, int] = {}
        place = HEADER_WORDS
        sizes = {"rows": max_rows, "starts": max_rows + 1, "contexts": max_rows}
        sizes |= {
            "sample_rows": max_samples,
            "sample_tokens": max_samples,
            "nth": max_samples,
            "output_positions": max_samples,
            "tokens": max_tokens,
        }
        for name, size in sizes.items():
            self._places[name] = place
            place += _aligned(size)
        self._places["adapters"] = place + _aligned(2 * state.numel())
        self._size = self._places["adapters"] + _aligned(max_tokens)
        self._device = torch.zeros(self._size, dtype=torch.int32, device=device)
        self._prepared = torch.zeros(3, _aligned(max_tokens), dtype=torch.int32, device=device)
        self._is_cuda = device.type == "cuda"
        self.max_samples = max_samples
        self._free: list[Staging] = []
        self.clear()

    def clear(self) -> None:
        """Makes it hold a step without rows, in every bucket."""
        self._device.zero_()
        self._device[self._places["adapters"] :] = NO_ADAPTER
        place = self._places["sample_rows"]
        self._device[place : place + self.max_samples] = NO_ROW

    def take_staging(self) -> Staging:
        """Memory for one step. Give it back when the step has finished."""
        if self._free:
            return self._free.pop()
        event: Any = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        up, down = (
            torch.zeros(n, dtype=torch.int32, pin_memory=self._is_cuda) for n in (self._size, 2 * self.max_samples)
        )
        return Staging(up, down, event)

    def give_back(self, staging: Staging) -> None:
        self._free.append(staging)

    def upload(
        self, staging: Staging, plan: CheckedStep, contexts: I64, known: I64, output_positions: I64, bucket: Bucket,
        deltas: I32,
    ) -> torch.Tensor:  # fmt: skip
        """Writes a step to `staging` and starts its copy. Returns its deltas on the device. `contexts` and `known` are
        those that `prepare` reads."""
        place, host = self._places, staging.up.numpy()
        num_rows, num_samples = len(plan.rows), len(plan.sampling_rows)
        host[0] = num_rows

        def write(name: str, column: I64, size: int, fill: int = 0) -> None:
            begin = place[name]
            host[begin : begin + len(column)] = column
            host[begin + len(column) : begin + size] = fill

        write("rows", plan.rows, bucket.rows)
        write("starts", plan.starts, bucket.rows + 1, int(plan.starts[-1]))
        write("contexts", contexts, bucket.rows)
        write("sample_rows", plan.sampling_rows, bucket.samples, NO_ROW)
        write("sample_tokens", plan.sampled_tokens if num_samples else plan.sources, bucket.samples)
        write("nth", NO_IDS if plan.num_after is None else plan.nth, bucket.samples)
        write("output_positions", output_positions, bucket.samples)
        write("tokens", known, bucket.tokens)
        begin = place["tokens"] + _aligned(bucket.tokens)
        end = begin + deltas.size
        host[begin:end] = deltas.reshape(-1)
        self._device[:end].copy_(staging.up[:end], non_blocking=True)
        return self._device[begin:end].view(-1, 2)

    def upload_adapters(self, staging: Staging, slots: I32, bucket: Bucket) -> None:
        """Writes the adapter slots of a step's tokens to `staging` and starts their copy."""
        begin = self._places["adapters"]
        end = begin + bucket.tokens
        host = staging.up.numpy()
        host[begin : begin + len(slots)] = slots
        host[begin + len(slots) : end] = NO_ADAPTER
        self._device[begin:end].copy_(staging.up[begin:end], non_blocking=True)

    def adapter_slots(self, bucket: Bucket) -> torch.Tensor:
        """The adapter slots [T] of a bucket's tokens on the device."""
        begin = self._places["adapters"]
        return self._device[begin : begin + bucket.tokens]

    def columns(self, bucket: Bucket, host: HostStep | None = None) -> StepColumns:
        """The columns of a bucket on the device."""

        def read(name: str, size: int) -> torch.Tensor:
            return self._device[self._places[name] : self._places[name] + size]

        token_ids, positions, slots = (column[: bucket.tokens] for column in self._prepared)
        return StepColumns(
            bucket=bucket,
            num_rows=self._device[:1],
            queries=Queries(
                read("rows", bucket.rows), read("starts", bucket.rows + 1), read("contexts", bucket.rows), self._tables
            ),
            sample_rows=read("sample_rows", bucket.samples),
            sample_tokens=read("sample_tokens", bucket.samples),
            nth=read("nth", bucket.samples),
            output_positions=read("output_positions", bucket.samples),
            known=read("tokens", bucket.tokens),
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            host=host,
        )


def _aligned(size: int) -> int:
    """Rounds up to 4 words (16 bytes): kernels are compiled for aligned columns."""
    return -(-size // 4) * 4
