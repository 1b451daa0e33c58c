"""Encoded images, and a model that takes them."""

from __future__ import annotations

import io
import json
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image
from quire.v1 import types_pb2 as types

from gateway_svc.request.models import ServedModel, read_bundle
from tests.unit.gateway.fakes import make_bundle, make_info
from tests.unit.gateway.tokenizer_kinds import bundle_files, byte_level

PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen2VLProcessor",
    "size": {"shortest_edge": 24 * 24, "longest_edge": 120 * 120}, "patch_size": 6, "merge_size": 2,
    "temporal_patch_size": 2, "image_mean": [0.48, 0.45, 0.4], "image_std": [0.27, 0.26, 0.28],
}  # fmt: skip
IMAGE_INFO = types.ImageInfo(token_id=3, merge_size=2, patch_values=108, channels=3, token_cost=1.0)


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth random image, so that lossy formats change little."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    small = np.random.default_rng(seed).integers(0, 256, (5, 4, bands), np.uint8)
    found = Image.fromarray(small[:, :, 0] if bands == 1 else small, mode)
    return found.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises width x height pixels of one colour, in few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(1 + (width + 7) // 8) * height, 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def image_model(preprocessor: dict[str, Any] | None = None, *, takes_images: bool = True) -> ServedModel:
    files = bundle_files(byte_level())
    if preprocessor is not None:
        files["preprocessor_config.json"] = json.dumps(preprocessor).encode()
    bundle = make_bundle(files)
    info = make_info(bundle)
    if takes_images:
        info.images.CopyFrom(IMAGE_INFO)
    return ServedModel(info, read_bundle(bundle, info.bundle_digest))
