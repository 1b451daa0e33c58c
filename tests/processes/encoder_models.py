"""Encoder-decoder checkpoints with random weights, and their reference outputs from transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig

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
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
}
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
