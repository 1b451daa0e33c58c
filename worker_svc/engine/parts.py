"""The features of the engine, in the order in which a step calls them: the one place that lists them."""

from __future__ import annotations

from collections.abc import Callable

from worker_svc.engine.adapters.packed import rows_of_step
from worker_svc.engine.adapters.rows import RowAdapters
from worker_svc.engine.backend import PackedAdapter
from worker_svc.engine.config import EngineInfo
from worker_svc.engine.encoder.families import encoder_of
from worker_svc.engine.encoder_decoder.config import is_encoder_decoder
from worker_svc.engine.encoder_decoder.load import load_encoder_decoder
from worker_svc.engine.loaders.decoders import load_decoder, load_draft_model
from worker_svc.engine.loaders.encoders import load_encoder
from worker_svc.engine.loading import Loaded, ModelSource
from worker_svc.engine.pooling.pooling import Pooler
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.scoring import PromptScores, SampledScores
from worker_svc.engine.rows.tables import RowTables
from worker_svc.engine.sampling.masking import GrammarMasks
from worker_svc.engine.speculation.drafts import Proposer, SuffixProposer
from worker_svc.engine.speculation.head_drafts import HeadDrafts
from worker_svc.engine.step import Step, StepPart


def load_model(source: ModelSource) -> Loaded:
    """Raises CheckpointError for a folder that cannot be served, ValueError for settings that contradict the model."""
    if is_encoder_decoder(source.checkpoint.config):
        return load_encoder_decoder(source)
    return load_decoder(source) if encoder_of(source.checkpoint.config) is None else load_encoder(source)


def step_parts(rows: OpenRows, tables: RowTables, loaded: Loaded, heads: HeadDrafts | None) -> list[StepPart]:
    """The parts of the steps of a loaded model."""
    masks = None if tables.grammars is None else GrammarMasks(tables.grammars)
    forced = [part for part in (rows.processing, masks) if part is not None]
    changing = [part for part in (tables.beams, *forced, tables.encoders) if part is not None]
    parts = (
        tables.groups,
        loaded.inputs(tables),  # behind `groups`, which keep content ids
        tables.positions,
        heads,
        tables.states,
        Pooler(tables.pooling, rows.prompt_lens),
        SampledScores(tables.logprobs, changing),
        *changing,
        PromptScores(tables.logprobs, rows, forced),
        StepAdapters(tables.adapters) if tables.adapters is not None else None,
    )
    return [part for part in parts if part is not None]


def make_proposer(
    source: ModelSource, loaded: Loaded, info: EngineInfo, rows: OpenRows
) -> tuple[Callable[[OpenRows], Proposer], HeadDrafts | None]:
    """What proposes drafts, if the settings name something, and the part of a step that it needs."""
    config = source.config
    if config.proposer == "draft" and config.draft_dir is not None:
        return load_draft_model(config, config.draft_dir, info, source.threads), None
    head = None if loaded.weights is None else loaded.weights.head
    if head is None:
        return SuffixProposer, None
    heads = HeadDrafts(
        str(config.proposer), head, source.backend, rows, loaded.pool, dtype=source.dtype, max_len=info.max_model_len
    )
    return lambda rows: heads, heads


class StepAdapters(StepPart):
    """Gives a step the adapters of its rows. The last part: it reads the head tokens of all."""

    def __init__(self, rows: RowAdapters[PackedAdapter]) -> None:
        self._rows, self.in_use = rows, rows.in_use

    def before(self, step: Step) -> None:
        numbers, heads = self._rows.numbers[step.plan.token_rows], step.forward.merged_heads()[0]
        step.forward.adapters = rows_of_step(self.in_use, numbers, heads)
