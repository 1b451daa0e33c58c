"""Prompts with images: each placeholder becomes the positions of its image. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from quire.internal.v1 import inputs_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request.chat_request import images_size
from gateway_svc.request.models import ServedModel
from gateway_svc.request.parameters import invalid
from gateway_svc.request.prompt_input import PromptInput
from gateway_svc.request.sandbox.image_preparer import GivenImage, PreparedImage
from prefix_index.content_ids import FIRST_CONTENT_ID, content_ids, input_digest
from request_fields.inputs import MAX_INPUT_BYTES
from svc_common.errors import InvalidRequestError


def images_of(prompt: pb.Prompt, media: Sequence[bytes]) -> list[GivenImage]:
    """The images of a request in order: those of its chat, or `media`."""
    given = [GivenImage(data, f"media[{i}]") for i, data in enumerate(media)]
    return given or list(_chat_images(prompt.chat))


def has_images(chat: pb.Chat) -> bool:
    """Whether a message of a chat has an image."""
    return any(part.HasField("image") for message in chat.messages for part in message.parts)


def text_size(prompt: pb.Prompt) -> int:
    """Bytes of a prompt without its images."""
    return prompt.ByteSize() - (images_size(prompt.chat) if prompt.HasField("chat") else 0)


def _chat_images(chat: pb.Chat) -> Iterator[GivenImage]:
    for i, message in enumerate(chat.messages):
        for j, part in enumerate(message.parts):
            if part.HasField("image"):
                yield GivenImage(part.image, f"prompt.chat.messages[{i}].parts[{j}].image")


def check_placeholders(ids: Sequence[int], num_images: int, model: ServedModel) -> None:
    """Check that the prompt has one placeholder per image. Raises InvalidRequestError."""
    token_id = model.info.images.token_id
    found = sum(1 for id_ in ids if id_ == token_id)
    if found == num_images:
        return
    tokenizer = model.text.tokenizer
    name = "" if tokenizer is None else f" {tokenizer.token_strings([token_id])[0]!r}"
    raise invalid(
        "prompt",
        f"has {found} placeholders for images (token {token_id}{name}) and {num_images} images; must have one "
        "placeholder per image",
    )


def with_images(ids: Sequence[int], images: Sequence[PreparedImage], model: ServedModel) -> PromptInput:
    """The prompt with the positions of the images in place of their placeholders."""
    info = model.info.images
    expanded: list[int] = []
    inputs: list[inputs_pb2.CarriedInput] = []
    remaining = iter(images)
    for id_ in ids:
        if id_ != info.token_id:
            expanded.append(id_)
            continue
        inputs.append(_carried(next(remaining), len(expanded), info))
        expanded += _ids_of(inputs[-1])
    return PromptInput(expanded, _checked(inputs))


def with_images_again(ids: Sequence[int], images: Sequence[PreparedImage], model: ServedModel) -> PromptInput:
    """The prompt of a record, whose ids have the positions of the images already. Raises InvalidRequestError."""
    inputs: list[inputs_pb2.CarriedInput] = []
    start = 0
    for image in images:
        start = next((i for i in range(start, len(ids)) if ids[i] >= FIRST_CONTENT_ID), len(ids))
        inputs.append(_carried(image, start, model.info.images))
        if list(ids[start : start + inputs[-1].length]) != _ids_of(inputs[-1]):
            words = "of the record cannot be used: its images are prepared differently now; send the request again"
            raise invalid("prompt", words)
        start += inputs[-1].length
    return PromptInput(ids, _checked(inputs))


def _ids_of(carried: inputs_pb2.CarriedInput) -> list[int]:
    return [id_ for (id_,) in struct.iter_unpack("<I", content_ids(carried.digest, carried.length))]


def _carried(image: PreparedImage, start: int, info: types.ImageInfo) -> inputs_pb2.CarriedInput:
    shape = (image.height, image.width, info.patch_values)
    return inputs_pb2.CarriedInput(
        kind=inputs_pb2.INPUT_KIND_IMAGE,
        digest=input_digest("image", "uint8", shape, image.data),
        start=start,
        length=image.num_tokens(info),
        dtype=inputs_pb2.INPUT_DTYPE_UINT8,
        shape=shape,
        data=image.data,
    )


def _checked(inputs: list[inputs_pb2.CarriedInput]) -> tuple[inputs_pb2.CarriedInput, ...]:
    num_bytes = sum(len(carried.data) for carried in inputs)
    if num_bytes > MAX_INPUT_BYTES:
        raise InvalidRequestError(
            f"the images of the prompt have {num_bytes} bytes after they are prepared; at most {MAX_INPUT_BYTES} are "
            "allowed in one request: send smaller or fewer images",
            field="prompt",
        )
    return tuple(inputs)
