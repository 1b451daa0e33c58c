"""Checkpoints with a vision tower, a tokenizer of words and an image processor, and their reference in transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.unit.engine.vision_models import (
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    VOCAB,
    load_vision_reference,
    make_vision_model,
)

SPECIAL = {
    IMAGE: "<|image_pad|>",
    VIDEO: "<|video_pad|>",
    VISION_START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
}
PROCESSOR = {
    "size": {"shortest_edge": 24 * 24, "longest_edge": 120 * 120},
    "patch_size": 6,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.48, 0.45, 0.4],
    "image_std": [0.27, 0.26, 0.28],
}
TEMPLATE = (
    "{% for m in messages %}w10 {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %} w11 {% endfor %}{% if add_generation_prompt %}w12{% endif %}"
)
# Parts of a message: texts of words `w20 w21`, and encoded images.
Parts = tuple[str | bytes, ...]


def make_folder(folder: Path, architecture: str) -> Path:
    """A whole model folder."""
    make_vision_model(folder, architecture, eos_token_id=2)
    words = {SPECIAL.get(i, f"w{i}"): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<eos>"}))
    settings = PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


class VisionReference:
    """The same checkpoint in transformers, one chat at a time, in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = load_vision_reference(folder)
        self._processor = Qwen2VLImageProcessorPil(**PROCESSOR)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def prompt(self, *turns: Parts) -> list[int]:
        """The prompt of messages with these parts, with image tokens at all positions of images."""
        ids: list[int] = []
        for turn in turns:
            ids.append(10)
            for part in turn:
                ids += self._words(part) if isinstance(part, str) else self._image(part)
            ids.append(11)
        return [*ids, 12]

    def greedy_after(self, output: list[int], *turns: Parts) -> list[int]:
        """The greedy token after each prefix of `output`."""
        prompt = self.prompt(*turns)
        ids = torch.tensor([prompt + output])
        images = [Image.open(io.BytesIO(part)) for turn in turns for part in turn if isinstance(part, bytes)]
        given: dict[str, Any] = {}
        if images:
            prepared = self._processor(images=images, return_tensors="np")
            given = {name: torch.from_numpy(prepared[name]) for name in ("pixel_values", "image_grid_thw")}
        with torch.no_grad():
            logits = self._model(ids, mm_token_type_ids=(ids == IMAGE).int(), **given).logits[0]
        found: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        return found

    def _words(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def _image(self, data: bytes) -> list[int]:
        grid = self._processor(images=[Image.open(io.BytesIO(data))], return_tensors="np")["image_grid_thw"][0]
        return [VISION_START, *[IMAGE] * int(grid[1] * grid[2] // 4), VISION_END]
