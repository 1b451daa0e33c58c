"""Loads an encoder-decoder model: its limits, its weights, what gateways must know, and the features of audio."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from step_protocol.columns import F32, I64
from step_protocol.types import AudioInfo, CarriedInput, EncoderInfo
from worker_svc.engine.backend import EncoderColumns
from worker_svc.engine.checkpoint.features import check_features
from worker_svc.engine.checkpoint.model_folder import CheckpointError, eos_token_ids
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.encoder_decoder.config import EncoderDecoderConfig, parse_encoder_decoder
from worker_svc.engine.encoder_decoder.log_mel import AudioSettings, LogMel, read_audio_settings
from worker_svc.engine.encoder_decoder.model import EncoderDecoderModel
from worker_svc.engine.encoder_decoder.weights import EncoderDecoderLoader
from worker_svc.engine.loading import Loaded, ModelSource, fitting_blocks
from worker_svc.engine.rows.tables import RowTables
from worker_svc.engine.sampling.grammars import compiled_grammars
from worker_svc.engine.step import Step, StepPart

logger = logging.getLogger(__name__)


class EncoderInputs(StepPart):
    """Gives a step the encoder positions of its rows, with the features of the audio that it computes."""

    def __init__(self, tables: RowTables, log_mel: LogMel | None) -> None:
        if tables.encoders is None:
            raise TypeError("the rows have no encoder positions: a bug in the loader")
        self._encoders, self._inputs, self._log_mel = tables.encoders, tables.inputs, log_mel

    def before(self, step: Step) -> None:
        plan, features = step.plan, dict[int, torch.Tensor]()
        for span in self._inputs.spans(plan.rows, plan.context_lens, plan.ends, plan.starts):
            if self._log_mel is not None:
                found = self._log_mel(waveform_of(span.item))
                features[_row_of(span.token, plan.rows, plan.starts)] = torch.from_numpy(found)
        step.forward.encoders = EncoderColumns(*self._encoders.columns(plan.rows), features)


def waveform_of(item: CarriedInput) -> F32:
    """The samples of an audio input, from -1 to 1."""
    if item.dtype == "int16":
        return np.frombuffer(item.data, "<i2").astype(np.float32) / np.float32(32768)
    return np.frombuffer(item.data, "<f4").astype(np.float32)


def _row_of(token: int, rows: I64, starts: I64) -> int:
    """The row of a token of a step."""
    return int(rows[np.searchsorted(starts, token, side="right") - 1])


def load_encoder_decoder(source: ModelSource) -> Loaded:
    """Raises CheckpointError for a checkpoint that cannot be served, ValueError for settings that contradict it."""
    checkpoint, config, layers = source.checkpoint, source.config, source.layers
    model = parse_encoder_decoder(checkpoint.config)
    num_blocks = config.num_blocks or fitting_blocks(config, model.kv_layouts(), source.dtype, 0)
    check_features(model.features(), layers.name)
    if config.max_adapters:
        raise ValueError(
            f"max_adapters is {config.max_adapters}, but encoder-decoder models take no adapters; leave it at 0"
        )
    audio = read_audio_settings(config.model_dir, model.num_mel_bins) if model.family.is_audio else None
    max_encoder, max_decoder = _lengths(config, model)
    if audio is not None and audio.num_frames != 2 * max_encoder:
        raise CheckpointError(
            f"max_source_positions: {max_encoder} positions need {2 * max_encoder} frames of audio, but the feature "
            f"extractor makes {audio.num_frames}; the files belong to different models"
        )
    padded = -(-max_encoder // config.block_size) * config.block_size
    budget = config.max_num_batched_tokens
    if audio is not None and budget < padded + config.max_num_seqs - 1:  # each input takes all positions
        budget = padded + config.max_num_seqs - 1
        logger.warning("max_num_batched_tokens is raised to %d, so that a step holds one audio input", budget)
    loader = EncoderDecoderLoader(checkpoint, model, layers, source.dtype)
    checkpoint.start_digest(source.threads)
    info = _encoder_info(model, audio, checkpoint, max_encoder, max_decoder)
    eos_ids = eos_token_ids(checkpoint.generation_config, checkpoint.config)
    return Loaded(
        EncoderDecoderModel(loader, model, layers, max_encoder, max_decoder, source.progress),
        KVCachePool(model.kv_layouts(), num_blocks, config.block_size, source.dtype, device=layers.device),
        facts={
            "num_blocks": num_blocks,
            "max_model_len": padded + max_decoder,
            "vocab_size": model.vocab_size,
            "max_num_batched_tokens": budget,
            "attention_window": model.attention_window,
            "encoder": info,
        },
        features=lambda: {
            "grammars": compiled_grammars(config.model_dir, model.vocab_size, eos_ids),
            "hidden_size": 0 if audio is None else model.hidden_size,
            "encoder": info,
        },
        inputs=lambda tables: EncoderInputs(tables, None if audio is None else LogMel(audio)),
    )


def _lengths(config: EngineConfig, model: EncoderDecoderConfig) -> tuple[int, int]:
    """The longest encoder input, and the longest decoder prompt with its output. max_model_len limits each of them.
    Only a model with relative positions may exceed the lengths that its config.json names.
    """
    encoder, decoder = model.encoder.num_positions, model.decoder.num_positions
    given = config.max_model_len
    if given is None:
        return encoder, decoder
    if model.relative is not None:
        return given, given
    if given > decoder:
        raise ValueError(
            f"max_model_len {given} is above the model's {decoder}, which limits decoder prompt and output"
        )
    return encoder if model.family.is_audio else min(encoder, given), min(decoder, given)


def _encoder_info(
    model: EncoderDecoderConfig,
    settings: AudioSettings | None,
    checkpoint: Checkpoint,
    max_tokens: int,
    max_decoder_tokens: int,
) -> EncoderInfo:
    """Reads generation_config.json, or else config.json, as transformers. Raises CheckpointError."""
    given = checkpoint.generation_config if checkpoint.has_generation_config else checkpoint.config
    places = (given, "decoder_start_token_id"), (given, "bos_token_id"), (checkpoint.config, "decoder_start_token_id")
    start = next(filter(None, (_ids(place, field, model.vocab_size) for place, field in places)), None)
    if start is None:
        raise CheckpointError("decoder_start_token_id: neither generation_config.json nor config.json has it")
    return EncoderInfo(
        max_tokens=max_tokens,
        max_decoder_tokens=max_decoder_tokens,
        decoder_start_ids=start,
        forced_bos_token_id=next(iter(_ids(given, "forced_bos_token_id", model.vocab_size)), None),
        forced_eos_token_id=next(iter(_ids(given, "forced_eos_token_id", model.vocab_size)), None),
        suppress_ids=_ids(given, "suppress_tokens", model.vocab_size),
        begin_suppress_ids=_ids(given, "begin_suppress_tokens", model.vocab_size),
        audio=None if settings is None else _audio_info(settings, given, model.vocab_size),
    )


def _audio_info(settings: AudioSettings, given: Mapping[str, Any], vocab_size: int) -> AudioInfo:
    languages = _id_map(given, "lang_to_id", vocab_size)
    return AudioInfo(
        sampling_rate=settings.sampling_rate,
        max_samples=settings.num_samples,
        language_ids={name.removeprefix("<|").removesuffix("|>"): id_ for name, id_ in languages.items()},
        task_ids=_id_map(given, "task_to_id", vocab_size),
        no_timestamps_id=next(iter(_ids(given, "no_timestamps_token_id", vocab_size)), None),
        previous_id=next(iter(_ids(given, "prev_sot_token_id", vocab_size)), None),
    )


def _ids(given: Mapping[str, Any], field: str, vocab_size: int) -> tuple[int, ...]:
    """A token id or a list of them; ids beyond the vocabulary can never be sampled and are left out."""
    value = given.get(field)
    found = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in found):
        raise CheckpointError(f"{field}: must be a token id or a list of them, found {value!r}")
    return tuple(id_ for id_ in found if 0 <= id_ < vocab_size)


def _id_map(given: Mapping[str, Any], field: str, vocab_size: int) -> dict[str, int]:
    value = given.get(field) or {}
    if not isinstance(value, dict) or not all(isinstance(id_, int) for id_ in value.values()):
        raise CheckpointError(f"{field}: must map names to token ids, found {value!r}")
    return {str(name): id_ for name, id_ in value.items() if 0 <= id_ < vocab_size}
