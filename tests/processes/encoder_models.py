"""Encoder-decoder checkpoints with random weights, and their reference outputs from transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    GenerationMixin,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from tests.processes.models import EOS_ID, VOCAB_SIZE, randomize, write_tokenizer

MAX_LEN = 256
START_ID, BOS_ID = 3, 5


@dataclass(frozen=True)
class TextShape:
    """The family and settings of one checkpoint whose encoder reads tokens."""

    name: str
    model_type: str
    extra: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)


_BART = {
    "d_model": 64, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": MAX_LEN,
}  # fmt: skip
_T5 = {
    "d_model": 64,
    "d_kv": 24,  # not d_model / heads
    "d_ff": 96,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "n_positions": MAX_LEN,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 40,
}
TEXT_SHAPES = (
    TextShape("t5", "t5", _T5 | {"feed_forward_proj": "relu"}),
    TextShape("t5-gated", "t5", _T5 | {"feed_forward_proj": "gated-gelu"}, {"suppress_tokens": [7, 9]}),
    TextShape("bart", "bart", _BART, {"forced_bos_token_id": BOS_ID, "forced_eos_token_id": EOS_ID}),
    TextShape("mbart", "mbart", _BART | {"scale_embedding": True}, {"begin_suppress_tokens": [4, 8]}),
)


def make_text_checkpoint(folder: Path, shape: TextShape, *, seed: int = 0) -> Path:
    """Write a Hugging Face folder of float32 weights."""
    config = AutoConfig.for_model(
        shape.model_type,
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS_ID,
        pad_token_id=0,
        bos_token_id=None,
        decoder_start_token_id=START_ID,
        forced_eos_token_id=None,
        **shape.extra,
    )
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    randomize(model)
    given = {"eos_token_id": EOS_ID, "pad_token_id": 0, "decoder_start_token_id": START_ID} | shape.generation
    model.generation_config = GenerationConfig(**given)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": settings["tokenizer_class"]}))
    return folder


class TextReference:
    """The same checkpoint in transformers, one input at a time, in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, prompt: list[int], max_tokens: int, **settings: Any) -> list[list[int]]:
        """The outputs of `generate` with these settings, without the decoder's start id."""
        ids = torch.tensor([prompt])
        with torch.no_grad():
            found = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, **settings
            )
        return [_trimmed(output[1:].tolist()) for output in found]

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The greedy output, which does not end early."""
        ends = {"min_new_tokens": max_tokens, "eos_token_id": None}
        return self.generate(prompt, max_tokens, **ends)[0][:max_tokens]


def _trimmed(output: list[int]) -> list[int]:
    """An output without the padding after its end."""
    while output and output[-1] == 0:
        output = output[:-1]
    return output


RATE = 16_000
CHUNK_S = 2
AUDIO_LEN = 60  # decoder prompt and output
LANGUAGES, TASKS, NO_TIMESTAMPS_ID = {"en": 20, "de": 21}, {"transcribe": 22, "translate": 23}, 24
PREVIOUS_ID = 25
SPEECH_SUPPRESSED, SPEECH_FIRST_SUPPRESSED = [30, 31], [40, 41]


def make_speech_checkpoint(folder: Path, *, seed: int = 0) -> Path:
    """Write a Hugging Face folder of a tiny Whisper model for up to CHUNK_S seconds of audio."""
    config = WhisperConfig(
        vocab_size=VOCAB_SIZE,
        d_model=64,
        encoder_layers=3,
        decoder_layers=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_source_positions=50 * CHUNK_S,
        max_target_positions=AUDIO_LEN,
        num_mel_bins=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS_ID,
        decoder_start_token_id=START_ID,
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config)
    randomize(model)
    _vary_outputs(model)
    model.generation_config = GenerationConfig(
        eos_token_id=EOS_ID,
        pad_token_id=0,
        decoder_start_token_id=START_ID,
        lang_to_id={f"<|{name}|>": id_ for name, id_ in LANGUAGES.items()},
        task_to_id=TASKS,
        no_timestamps_token_id=NO_TIMESTAMPS_ID,
        prev_sot_token_id=PREVIOUS_ID,
        suppress_tokens=SPEECH_SUPPRESSED,
        begin_suppress_tokens=SPEECH_FIRST_SUPPRESSED,
    )
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=CHUNK_S).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def _vary_outputs(model: torch.nn.Module) -> None:
    """Make outputs depend on audio and position: large biases of norms would hide both."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "embed_positions" in name or "encoder_attn.v_proj.weight" in name or "conv" in name:
                parameter.mul_(4)


class SpeechReference:
    """The same checkpoint in transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._features = WhisperFeatureExtractor.from_pretrained(folder)

    def generate(
        self,
        waveform: npt.NDArray[np.float32],
        language: str,
        task: str,
        max_tokens: int,
        before: Sequence[int] = (),
        **settings: Any,
    ) -> list[list[int]]:
        """The outputs of `generate` after language, task and no timestamps; `before` them the ids of earlier text."""
        start = [*before, START_ID, LANGUAGES[language], TASKS[task], NO_TIMESTAMPS_ID]
        with torch.no_grad():
            found = GenerationMixin.generate(
                self._model,
                self._input(waveform),
                decoder_input_ids=torch.tensor([start]),
                max_new_tokens=max_tokens,
                do_sample=False,
                **settings,
            )
        return [_trimmed(output[len(start) :].tolist()) for output in found]

    def detected_language(self, waveform: npt.NDArray[np.float32]) -> str:
        """The language with the highest logit."""
        with torch.no_grad():
            logits = self._model(self._input(waveform), decoder_input_ids=torch.tensor([[START_ID]])).logits[0, -1]
        return max(LANGUAGES, key=lambda name: float(logits[LANGUAGES[name]]))

    def _input(self, waveform: npt.NDArray[np.float32]) -> torch.Tensor:
        features: torch.Tensor = self._features(waveform, sampling_rate=RATE, return_tensors="pt").input_features
        return features


def tone(seed: int, seconds: float) -> npt.NDArray[np.float32]:
    """A sum of tones and noise."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    waves = sum(np.sin(2 * np.pi * hz * times) for hz in rng.uniform(80, 3000, 4))
    return ((waves + rng.normal(0, 0.3, len(times))) * 0.1).astype(np.float32)


def wav(samples: npt.NDArray[np.float32], *, rate: int = RATE, channels: int = 1, is_float: bool = True) -> bytes:
    """A WAV file of float32 or 16-bit integer samples."""
    data = samples.astype("<f4") if is_float else (samples * 32767).astype("<i2")
    size = data.dtype.itemsize
    form = struct.pack(
        "<HHIIHH", 3 if is_float else 1, channels, rate, rate * size * channels, size * channels, 8 * size
    )
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    body += b"data" + struct.pack("<I", data.nbytes) + data.tobytes()
    return b"RIFF" + struct.pack("<I", len(body)) + body
