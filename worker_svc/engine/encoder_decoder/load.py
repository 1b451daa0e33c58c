"""Loads an encoder-decoder model: its limits, its weights, what gateways must know, and the features of audio."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from step_protocol.columns import F32, I64
from step_protocol.messages import CarriedInput
from worker_svc.engine.backend import EncoderColumns, LayerBackend
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import AudioInfo, EncoderInfo, EngineConfig
from worker_svc.engine.encoder_decoder.config import EncoderDecoderConfig
from worker_svc.engine.encoder_decoder.log_mel import AudioSettings, LogMel, read_audio_settings
from worker_svc.engine.encoder_decoder.model import EncoderDecoderModel
from worker_svc.engine.encoder_decoder.weights import EncoderDecoderLoader
from worker_svc.engine.rows.embedder import StepInputs
from worker_svc.engine.rows.inputs import InputSpan
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.step_checker import CheckedStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncoderDecoder:
    """A loaded model and its limits; the StepInputReader of its rows."""

    model: EncoderDecoderModel
    info: EncoderInfo
    max_model_len: int
    max_num_batched_tokens: int
    log_mel: LogMel | None

    @property
    def max_samples(self) -> int:
        """The longest audio input; 0: the encoder reads tokens."""
        return 0 if self.info.audio is None else self.info.audio.max_samples

    @property
    def num_encoder_runs(self) -> int:
        return self.model.num_encoder_runs

    def of_step(self, rows: OpenRows, plan: CheckedStep, spans: list[InputSpan]) -> StepInputs:
        """The encoder positions of the rows of a step, with the features of the audio that it computes."""
        features: dict[int, torch.Tensor] = {}
        if self.log_mel is not None:
            for span in spans:
                waveform = waveform_of(span.item)
                features[_row_of(span.token, plan.rows, plan.starts)] = torch.from_numpy(self.log_mel(waveform))
        return StepInputs(encoders=EncoderColumns(*rows.encoders.columns(plan.rows), features))


def waveform_of(item: CarriedInput) -> F32:
    """The samples of an audio input, from -1 to 1."""
    if item.dtype == "int16":
        return np.frombuffer(item.data, "<i2").astype(np.float32) / np.float32(32768)
    return np.frombuffer(item.data, "<f4").astype(np.float32)


def _row_of(token: int, rows: I64, starts: I64) -> int:
    """The row of a token of a step."""
    return int(rows[np.searchsorted(starts, token, side="right") - 1])


def load_encoder_decoder(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: EncoderDecoderConfig,
    backend: LayerBackend,
    dtype: torch.dtype,
    progress: Callable[[float], None] | None,
) -> EncoderDecoder:
    """Raises CheckpointError for a checkpoint that cannot be served, ValueError for settings that contradict it."""
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
    loader = EncoderDecoderLoader(checkpoint, model, backend, dtype)
    checkpoint.start_digest(config.threads or 1)
    loaded = EncoderDecoderModel(loader, model, backend, max_encoder, max_decoder, progress)
    info = _encoder_info(model, audio, checkpoint, max_encoder, max_decoder)
    return EncoderDecoder(loaded, info, padded + max_decoder, budget, None if audio is None else LogMel(audio))


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
