"""What gateways must know about an encoder-decoder model: its limits, and how its decoder starts and ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.config import AudioInfo, EncoderInfo
from worker_svc.engine.encoder_decoder.config import EncoderDecoderConfig
from worker_svc.engine.encoder_decoder.log_mel import AudioSettings


def encoder_info(
    model: EncoderDecoderConfig,
    settings: AudioSettings | None,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    max_tokens: int,
    max_decoder_tokens: int,
) -> EncoderInfo:
    """Reads generation_config.json, and config.json where it says nothing. Raises CheckpointError."""
    given = {**config, **generation_config}
    start = _ids(given, "decoder_start_token_id", model.vocab_size)
    if not start:
        raise CheckpointError("decoder_start_token_id: neither generation_config.json nor config.json has it")
    return EncoderInfo(
        max_tokens=max_tokens,
        max_decoder_tokens=max_decoder_tokens,
        decoder_start_ids=start,
        forced_bos_token_id=next(iter(_ids(given, "forced_bos_token_id", model.vocab_size)), None),
        forced_eos_token_id=next(iter(_ids(given, "forced_eos_token_id", model.vocab_size)), None),
        suppress_ids=_ids(given, "suppress_tokens", model.vocab_size),
        begin_suppress_ids=_ids(given, "begin_suppress_tokens", model.vocab_size),
        audio=None if settings is None else _audio_info(settings, generation_config, model.vocab_size),
    )


def _audio_info(settings: AudioSettings, given: Mapping[str, Any], vocab_size: int) -> AudioInfo:
    languages = _id_map(given, "lang_to_id", vocab_size)
    return AudioInfo(
        sampling_rate=settings.sampling_rate,
        max_samples=settings.num_samples,
        language_ids={name.removeprefix("<|").removesuffix("|>"): id_ for name, id_ in languages.items()},
        task_ids=_id_map(given, "task_to_id", vocab_size),
        no_timestamps_id=next(iter(_ids(given, "no_timestamps_token_id", vocab_size)), None),
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
