"""Prepares the images of requests for a model, in processes that are killed when they exceed a limit.

An encoded image may be hostile to its decoder, and a few bytes may hold millions of pixels.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from quire.v1 import types_pb2 as types

from gateway_svc.request.models import ServedModel
from gateway_svc.request.sandbox.child import parse_frame, to_frame
from gateway_svc.request.sandbox.pool import Job, ModelSetup, SandboxPool
from svc_common.errors import InvalidRequestError, UnimplementedError

JOB = Job("image_process", "prepare images", "send a smaller image", 10.0, 30.0, 30.0, 256 << 20)
PACKAGES = ("transformers", "PIL", "numpy")


@dataclass(frozen=True)
class ImageLimits:
    """Limits of the images of one request."""

    max_images: int = 16
    max_bytes: int = 10 << 20  # limit for one encoded image
    max_pixels: int = 64 << 20  # limit for one decoded image


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """The data of one image for workers; see image_process.py."""

    height: int  # in patches
    width: int
    data: bytes

    def num_tokens(self, info: types.ImageInfo) -> int:
        """Number of positions in the prompt."""
        return self.height * self.width // info.merge_size**2


@dataclass(frozen=True, slots=True)
class RequestImage:
    """An encoded image, and the field of the request that has it."""

    data: bytes
    field: str


class ImagePreparer(SandboxPool):
    """The processes. They start with the first image."""

    def __init__(self, limits: ImageLimits) -> None:
        super().__init__(JOB.new_process, 2)
        self._limits = limits

    async def prepare(self, images: Sequence[RequestImage], model: ServedModel) -> list[PreparedImage]:
        """The images, which are checked, as the model's image processor prepares them. Raises InvalidRequestError, or
        OverloadedError if the processes are busy.
        """
        return [await self._prepare(image, model) for image in images]

    def check(self, images: Sequence[RequestImage], model: ServedModel) -> None:
        """The checks that do not decode the images. Raises InvalidRequestError, or UnimplementedError if this gateway
        cannot prepare images.
        """
        first, limits = images[0], self._limits
        if not model.info.HasField("images"):
            words = "has an image, but model {name!r} takes none; use another model, or send text only"
            raise _refused(first, words.format(name=model.name))
        if len(images) > limits.max_images:
            raise _refused(
                images[limits.max_images],
                f"is one of {len(images)} images; at most {limits.max_images} are allowed in one request (--max-images "
                "of the gateway)",
            )
        for image in images:
            if len(image.data) > limits.max_bytes:
                raise _refused(
                    image,
                    f"has {len(image.data)} bytes; at most {limits.max_bytes} are allowed (--max-image-bytes of the "
                    "gateway); send a smaller image",
                )
        if not model.text.preprocessor:
            raise _refused(
                first, f"cannot be prepared: the folder of model {model.name!r} has no preprocessor_config.json"
            )
        if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
            raise UnimplementedError(
                f"{first.field}: this gateway has no {' and '.join(missing)}, which images need; install it with "
                "pip install 'quire-server[images]'",
                field=first.field,
            )

    async def _prepare(self, image: RequestImage, model: ServedModel) -> PreparedImage:
        key = model.info.bundle_digest.hex()
        setup = ModelSetup(key, partial(_setup_frame, key, model), "cannot be prepared")
        content = {"key": key, "max_pixels": self._limits.max_pixels, "cpu_s": JOB.cpu_s}
        refused = partial(_refused, image)
        answer = parse_frame(await JOB.ask(self, partial(to_frame, content, image.data), refused, setup))
        if answer["error"]:
            raise refused(f"of {len(image.data)} bytes {answer['error']}")
        return PreparedImage(answer["height"], answer["width"], answer["data"])


def _setup_frame(key: str, model: ServedModel) -> bytes:
    return to_frame({"key": key, "preprocessor": json.loads(model.text.preprocessor), "cpu_s": JOB.cpu_s})


def _refused(image: RequestImage, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"{image.field} {words}", field=image.field)
