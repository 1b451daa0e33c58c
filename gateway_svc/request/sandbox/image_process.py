"""The process that decodes and prepares the images of requests, under limits: it may be killed at any time.

    python -m gateway_svc.request.sandbox.image_process

Messages (`to_frame` of child.py); `error` is empty if the message succeeded:

    {"key": ..., "preprocessor": {...}}                      -> {"error": ...}
    {"key": ..., "max_pixels": ..., "data": encoded image}   -> {"error": ..., "height": ..., "width": ..., "data": ...}

`data` of an answer: the patches u8[height * width, channels * patch_size^2], in the order of the model's image
processor, then the normalized value of each value of a channel, f32[channels, 256]. The patches are the result of the
processor before it normalizes, and the table is what it makes of the values from 0 to 255. Together they are exactly
its result, in a fraction of the bytes.
"""

from __future__ import annotations

import io
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any

from gateway_svc.request.sandbox.child import answer_messages

if TYPE_CHECKING:
    from PIL import Image

# The processors need numpy and Pillow only. Importing torch, where it is installed, takes seconds and much memory.
for _name in ("torch", "torchvision", "tensorflow", "jax"):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]

MAX_MEMORY_BYTES = 3 << 30  # limit of the address space; more is a MemoryError
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
LEVELS = 256
MAX_RATIO = 200  # of the sides; the processors refuse more, but only after decoding
MAX_SCANS = 64  # of a JPEG; each takes the time of a whole image, and encoders make about 10
JPEG, SCAN, END = b"\xff\xd8", b"\xda", b"\xd9"  # the first bytes, and codes of markers
MARKER = re.compile(rb"\xff([^\x00\x01\xff\xd0-\xd8])")  # begins a segment; compressed data has none


class BadImageError(ValueError):
    """The image cannot be used; the message says why."""


class Preparer:
    """The image processors of the models of one gateway."""

    def __init__(self) -> None:
        self._processors: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one message."""
        try:
            if "preprocessor" in request:
                self._processors[request["key"]] = _processor_of(request["preprocessor"])
                return {"error": ""}
            return _prepared(self._processors[request["key"]], request["data"], request["max_pixels"])
        except BadImageError as error:
            return {"error": str(error)}
        except MemoryError:
            return {"error": "needs more memory than is allowed; send a smaller image"}


def _processor_of(settings: dict[str, Any]) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    name = settings.get("image_processor_type")
    if name not in PROCESSORS:
        raise BadImageError(f"preprocessor_config.json has image_processor_type {name!r}; {PROCESSORS[0]} is supported")
    fields = {
        name: value for name, value in settings.items() if name not in ("image_processor_type", "processor_class")
    }
    try:
        return Qwen2VLImageProcessorPil(**fields)
    except (TypeError, ValueError) as error:
        raise BadImageError(f"preprocessor_config.json cannot be used: {error}") from None


def _prepared(processor: Any, data: bytes, max_pixels: int) -> dict[str, Any]:
    import numpy as np

    image = _decoded(data, max_pixels)
    try:
        found = processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")
    except ValueError as error:  # e.g. the ratio of its sides
        raise BadImageError(f"cannot be prepared: {error}") from None
    _, height, width = found["image_grid_thw"][0].tolist()
    frames = found["pixel_values"].reshape(height * width, -1, processor.temporal_patch_size, processor.patch_size**2)
    patches = frames[:, :, 0].astype(np.uint8)
    data = patches.tobytes() + _levels(processor, patches.shape[1]).astype("<f4").tobytes()
    return {"error": "", "height": height, "width": width, "data": data}


def _levels(processor: Any, channels: int) -> Any:
    """The processor's results for the values 0 to 255 of each channel, f32[channels, 1, 256]."""
    import numpy as np

    levels = np.tile(np.arange(LEVELS, dtype=np.uint8), (channels, 1, 1))
    if processor.do_rescale:
        levels = processor.rescale(levels, processor.rescale_factor)
    if processor.do_normalize:
        levels = processor.normalize(levels, processor.image_mean, processor.image_std)
    return levels.astype(np.float32)


def _decoded(data: bytes, max_pixels: int) -> Image.Image:
    """The first frame of an encoded image, upright, as RGB. Its size is checked before its pixels are decoded."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # checked below
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > max_pixels:
                raise BadImageError(
                    f"has {width} x {height} pixels; at most {max_pixels} are allowed (--max-image-pixels of the "
                    "gateway); send a smaller image"
                )
            if max(width, height) > MAX_RATIO * min(width, height):
                raise BadImageError(f"has {width} x {height} pixels; one side may be {MAX_RATIO} times the other")
            if data.startswith(JPEG) and (num_scans := _num_scans(data)) > MAX_SCANS:
                raise BadImageError(f"has {num_scans} scans; at most {MAX_SCANS} are allowed: send a baseline JPEG")
            image.load()
            return _opaque(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        raise BadImageError(f"is not an image in one of the formats {', '.join(FORMATS)}") from None
    except BadImageError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, OverflowError) as error:  # Pillow's errors
        raise BadImageError(f"is damaged: {type(error).__name__}: {error}") from None


def _num_scans(data: bytes) -> int:
    """Number of scans of a JPEG: of its first image if it has several, without previews and what phones append."""
    count, found = 0, MARKER.search(data)
    while found is not None and found[1] != END:
        count += found[1] == SCAN
        found = MARKER.search(data, found.end() + int.from_bytes(data[found.end() : found.end() + 2]))
    return count


def _opaque(image: Image.Image) -> Image.Image:
    """The image as RGB: on white where it is transparent, as browsers show it, and 16 bits of grey scaled to 8."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):
        grey = (np.asarray(image).astype(np.uint32) + 128) // 257
        return Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _load_modules() -> None:
    """Import what the libraries import late, because later the process cannot open files."""
    from PIL import Image

    processor = _processor_of({"image_processor_type": PROCESSORS[0], "min_pixels": 56**2, "max_pixels": 112**2})
    for name in FORMATS:
        encoded = io.BytesIO()
        Image.new("RGB", (64, 64)).save(encoded, name)
        _prepared(processor, encoded.getvalue(), 64**2)


if __name__ == "__main__":
    _load_modules()
    answer_messages(Preparer().answer, MAX_MEMORY_BYTES)
