"""The features that rows of an engine may have: the one place that lists their tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from step_protocol.messages import RowOpen
from step_protocol.types import CacheGroup, EncoderInfo, ImageInfo
from worker_svc.engine.adapters.rows import RowAdapters
from worker_svc.engine.pooling.pooling import PoolingTable
from worker_svc.engine.row_part import RowPart
from worker_svc.engine.rows.beams import BeamTable
from worker_svc.engine.rows.encoder_rows import EncoderTable
from worker_svc.engine.rows.group_tables import GroupTables
from worker_svc.engine.rows.inputs import InputTable
from worker_svc.engine.rows.logprobs import LogprobTable
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.positions import RowPositions
from worker_svc.engine.rows.states import RowStates
from worker_svc.engine.sampling.grammars import CompiledGrammars, RowGrammars

if TYPE_CHECKING:
    from worker_svc.engine.pooling.weights import PoolingWeights
    from worker_svc.engine.recurrent import StatePool


class Unsupported(RowPart):
    """A feature that the engine or its model does not have."""

    def __init__(self, asks: Callable[[RowOpen], Any], message: str) -> None:
        self.asks, self._message = asks, message

    def refusal(self, item: RowOpen) -> str | None:
        return self._message


@dataclass(frozen=True, slots=True)
class RowTables:
    """The state of open rows that features keep. None: no row can have the feature."""

    inputs: InputTable
    positions: RowPositions
    logprobs: LogprobTable
    beams: BeamTable
    pooling: PoolingTable
    grammars: RowGrammars | None
    adapters: RowAdapters[Any] | None
    encoders: EncoderTable | None
    groups: GroupTables | None
    states: RowStates | None


def add_tables(
    rows: OpenRows,
    *,
    grammars: CompiledGrammars | None = None,
    pooling: PoolingWeights | None = None,
    hidden_size: int = 0,
    images: ImageInfo | None = None,
    adapters: RowAdapters[Any] | None = None,
    encoder: EncoderInfo | None = None,
    states: StatePool | None = None,
    groups: Sequence[CacheGroup] = (),
    are_logprobs_raw: bool = False,
) -> RowTables:
    """Lets rows have the features of an engine. Rows that ask for others are refused: without `grammars`, rows with a
    grammar; without `hidden_size`, rows with inputs; with `are_logprobs_raw`, rows that ask for processed log
    probabilities."""
    tables = RowTables(
        inputs=InputTable(rows.vocab_size, hidden_size, _max_samples(encoder), images),
        positions=RowPositions(rows.max_num_seqs),
        logprobs=LogprobTable(rows, are_raw_only=are_logprobs_raw),
        beams=BeamTable(rows),
        pooling=PoolingTable(pooling),
        grammars=None if grammars is None else RowGrammars(grammars, rows.tokens, rows.vocab_size),
        adapters=adapters,
        encoders=None if encoder is None else EncoderTable(rows, encoder),
        groups=GroupTables(groups, rows) if groups else None,
        states=None if states is None else RowStates(states, rows, sum(group.num_blocks for group in groups)),
    )
    generates = pooling is None or pooling.generates
    tables.inputs.asks = lambda item: item.inputs or item.images or item.token_ids.max(initial=0) >= rows.vocab_size
    tables.positions.asks = lambda item: item.images
    tables.logprobs.asks = lambda item: item.logprobs is not None or item.prompt_logprobs is not None
    tables.beams.asks = lambda item: item.num_candidates
    tables.pooling.asks = lambda item: item.pooling is not None or not generates
    if tables.grammars is not None:
        tables.grammars.asks = lambda item: item.grammar is not None or item.thinking is not None
    if tables.adapters is not None:
        tables.adapters.asks = lambda item: item.adapter
    if tables.encoders is not None:
        rows.processing.start_of = tables.encoders.start_of
    rows.add_parts(
        tables.inputs,
        tables.positions,
        tables.logprobs,
        tables.beams,
        tables.pooling,
        tables.grammars or NO_GRAMMARS,
        tables.adapters or NO_ADAPTERS,
        tables.encoders or NO_ENCODER,
        tables.groups or NO_GROUPS,
        tables.states or NO_STATES,
    )
    return tables


def _max_samples(encoder: EncoderInfo | None) -> int:
    return 0 if encoder is None or encoder.audio is None else encoder.audio.max_samples


NO_GRAMMARS = Unsupported(
    lambda item: item.grammar is not None or item.thinking is not None,
    "this worker's model folder has no tokenizer.json, so it cannot apply a grammar or a thinking budget",
)
NO_ADAPTERS = Unsupported(lambda item: item.adapter, "this worker computes no adapters")
NO_ENCODER = Unsupported(
    lambda item: item.encoder is not None, "the row has an encoder input, but the model has no encoder"
)
NO_GROUPS = Unsupported(lambda item: item.group_tables, "the row has group_tables, but the pool has one cache group")
NO_STATES = Unsupported(
    lambda item: item.snapshot is not None, "the row has a snapshot, but the model has no recurrent layers"
)
