"""Small random checkpoints with a vision tower, as transformers writes them, and images for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from prefix_index.hashing import input_digest
from step_protocol.messages import ImageSpan
from step_protocol.types import CarriedInput
from tests.carried import with_content_ids
from tests.unit.engine.models import DEFAULTS, FIELDS, qwen3_5, randomize
from worker_svc.engine.vision.tower import Pixels

VOCAB = 211
WEIGHTS = "model.safetensors"
IMAGE, VIDEO, VISION_START, VISION_END = 200, 201, 202, 203
MEAN, DEVIATION = (0.48, 0.45, 0.4), (0.27, 0.26, 0.28)

CLASSES = {
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
}
# Heads of 24 dimensions, windows of 2 x 2 tokens and a grid of 5 x 5 learned positions: no size divides another one.
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 3, "embed_dim": 72, "hidden_size": 64, "num_heads": 3, "mlp_ratio": 2, "patch_size": 6},
    "qwen2_5_vl": {"depth": 4, "hidden_size": 72, "out_hidden_size": 64, "num_heads": 3, "intermediate_size": 100,
                   "patch_size": 6, "window_size": 24, "fullatt_block_indexes": [1, 3]},
    "qwen3_vl": {"depth": 4, "hidden_size": 72, "out_hidden_size": 64, "num_heads": 3, "intermediate_size": 100,
                 "patch_size": 6, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
    "qwen3_5": {"depth": 3, "hidden_size": 72, "out_hidden_size": 64, "num_heads": 3, "intermediate_size": 100,
                "patch_size": 6, "num_position_embeddings": 25},
}  # fmt: skip
# Sections of 8 frequencies; of 5 in Qwen3.5, which rotates a part of each head.
SECTIONS = {"qwen2_vl": [2, 3, 3], "qwen2_5_vl": [2, 3, 3], "qwen3_vl": [4, 2, 2], "qwen3_5": [2, 2, 1]}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"head_dim": 16},
    "qwen3_5": FIELDS["qwen3_5"] | {"head_dim": 40, "layer_types": ["linear_attention", "full_attention"] * 2},
}


def make_vision_model(
    folder: Path, architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Path:
    """Writes a checkpoint to `folder` and returns it. `overrides` are fields of its decoder."""
    config_class, model_class = CLASSES[architecture]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS[architecture]}
    fields = DEFAULTS | {"vocab_size": VOCAB, "num_hidden_layers": 3} | TEXTS.get(architecture, {}) | overrides
    fields["rope_parameters"] = fields.get("rope_parameters", {}) | rope
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START,
           "vision_end_token_id": VISION_END}  # fmt: skip
    torch.manual_seed(seed)
    model = model_class(config_class(text_config=fields, vision_config=TOWERS[architecture], **ids))
    randomize(model, torch.Generator().manual_seed(seed))
    model.to(dtype).save_pretrained(folder)
    if architecture == "qwen3_5":  # the models of the Hub have layers that predict further tokens
        stored = load_file(folder / WEIGHTS) | {"mtp.fc.weight": torch.zeros(2, 2)}
        save_file(stored, folder / WEIGHTS, {"format": "pt"})
    return folder


def load_vision_reference(folder: Path) -> Any:
    """The checkpoint as transformers runs it, in float32; states token by token (`load_reference`)."""
    qwen3_5.torch_chunk_gated_delta_rule = qwen3_5.torch_recurrent_gated_delta_rule
    found = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return found.eval()


def make_image(height: int, width: int, seed: int, patch_size: int = 6) -> Pixels:
    """A random image of height x width patches."""
    rng = np.random.default_rng(seed)
    patches = rng.integers(0, 256, (height * width, 3 * patch_size**2), np.uint8)
    levels = np.arange(256, dtype=np.float32)[None] / np.float32(255)
    values = (levels - np.float32(MEAN)[:, None]) / np.float32(DEVIATION)[:, None]
    return Pixels(patches, values.astype(np.float32), height, width)


def pixel_values(image: Pixels, frames: int = 2) -> torch.Tensor:
    """The image as transformers takes it."""
    patches = image.patches.reshape(len(image.patches), 3, 1, -1)
    values = image.values[np.arange(3)[:, None, None], patches].repeat(frames, axis=2)
    return torch.from_numpy(values.reshape(len(values), -1))


def grid_of(image: Pixels) -> torch.Tensor:
    return torch.tensor([[1, image.height, image.width]])


@dataclass(frozen=True)
class Picture:
    """An image at a place of a prompt."""

    start: int
    pixels: Pixels

    @property
    def carried(self) -> CarriedInput:
        """The image as workers get it."""
        pixels = self.pixels
        shape = (pixels.height, pixels.width, pixels.patches.shape[1])
        data = pixels.patches.tobytes() + pixels.values.astype("<f4").tobytes()
        length = pixels.height * pixels.width // 4
        return CarriedInput(
            "image", input_digest("image", "uint8", shape, data), self.start, length, "uint8", shape, data
        )

    @property
    def span(self) -> ImageSpan:
        return ImageSpan(self.start, self.pixels.height // 2, self.pixels.width // 2)


@dataclass(frozen=True)
class Scene:
    """A prompt with images, as workers and as transformers take it."""

    tokens: list[int]  # with image tokens
    pictures: tuple[Picture, ...]

    @property
    def prompt(self) -> list[int]:
        """With content ids."""
        return with_content_ids(self.tokens, *self.inputs)

    @property
    def inputs(self) -> tuple[CarriedInput, ...]:
        return tuple(picture.carried for picture in self.pictures)

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        return tuple(picture.span for picture in self.pictures)

    def logits(self, reference: Any, output: list[int]) -> torch.Tensor:
        """The logits of transformers for the prompt and this output."""
        ids = torch.tensor([self.tokens + output])
        images: dict[str, torch.Tensor] = {}
        if self.pictures:
            images["pixel_values"] = torch.cat([pixel_values(picture.pixels) for picture in self.pictures])
            images["image_grid_thw"] = torch.cat([grid_of(picture.pixels) for picture in self.pictures])
        with torch.no_grad():
            found: torch.Tensor = reference(ids, mm_token_type_ids=(ids == IMAGE).int(), **images).logits[0]
        return found


def scene(*pieces: int | tuple[int, int] | Pixels, seed: int = 0) -> Scene:
    """A prompt of random text of these lengths and images of these sizes in tokens (or given), between markers."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    pictures: list[Picture] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            tokens += rng.integers(3, 199, piece).tolist()
            continue
        pixels = make_image(2 * piece[0], 2 * piece[1], 1000 * seed + index) if isinstance(piece, tuple) else piece
        tokens.append(VISION_START)
        pictures.append(Picture(len(tokens), pixels))
        tokens += [IMAGE] * pictures[-1].span.length
        tokens.append(VISION_END)
    return Scene(tokens, tuple(pictures))
