"""Images in prompts of text, tokens or chats: each placeholder becomes the positions of its image."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from quire.internal.v1 import inputs_pb2
from quire.v1 import inference_pb2 as pb

from gateway_svc.request.field_errors import invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.reader import PromptInput, ReadContext, carried_input
from gateway_svc.request.sandbox.image_preparer import PreparedImage, RequestImage
from prefix_index.hashing import FIRST_CONTENT_ID, content_ids
from request_fields.sizes import MAX_INPUT_BYTES
from svc_common.errors import InvalidRequestError


async def with_images(
    prompt: PromptInput, given: Sequence[RequestImage], model: ServedModel, context: ReadContext, *, is_expanded: bool
) -> PromptInput:
    """The prompt with the positions of its images in place of their placeholders. `is_expanded`: it is that of a
    record, which has the positions already. The images are prepared in sandbox processes.
    """
    if not is_expanded and model.info.HasField("images"):
        _check_placeholders(prompt.ids, len(given), model)
    if not given:
        return prompt
    images = await context.images.prepare(given, model)
    put = _with_images_again if is_expanded else _with_images
    return await context.lane.run(sum(len(image.data) for image in images), put, prompt, images, model)


def images_of(request: pb.GenerateRequest) -> list[RequestImage]:
    """The images of a request in order: `media`, or those of its chat."""
    if request.media:
        return [RequestImage(data, f"media[{i}]") for i, data in enumerate(request.media)]
    return list(_chat_images(request.prompt.chat))


def _chat_images(chat: pb.Chat) -> Iterator[RequestImage]:
    for i, message in enumerate(chat.messages):
        for j, part in enumerate(message.parts):
            if part.HasField("image"):
                yield RequestImage(part.image, f"prompt.chat.messages[{i}].parts[{j}].image")


def _check_placeholders(ids: Sequence[int], num_images: int, model: ServedModel) -> None:
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


def _with_images(prompt: PromptInput, images: Sequence[PreparedImage], model: ServedModel) -> PromptInput:
    """The prompt with the positions of the images in place of their placeholders."""
    expanded: list[int] = []
    inputs: list[inputs_pb2.CarriedInput] = []
    remaining = iter(images)
    for id_ in prompt.ids:
        if id_ != model.info.images.token_id:
            expanded.append(id_)
            continue
        inputs.append(_carried(next(remaining), len(expanded), model))
        expanded += _ids_of(inputs[-1])
    return PromptInput(expanded, _checked(inputs), prompt.tools)


def _with_images_again(prompt: PromptInput, images: Sequence[PreparedImage], model: ServedModel) -> PromptInput:
    """The prompt of a record, whose ids have the positions of the images already. Raises InvalidRequestError."""
    inputs: list[inputs_pb2.CarriedInput] = []
    ids, start = prompt.ids, 0
    for image in images:
        start = next((i for i in range(start, len(ids)) if ids[i] >= FIRST_CONTENT_ID), len(ids))
        inputs.append(_carried(image, start, model))
        if list(ids[start : start + inputs[-1].length]) != _ids_of(inputs[-1]):
            words = "of the record cannot be used: its images are prepared differently now; send the request again"
            raise invalid("prompt", words)
        start += inputs[-1].length
    return PromptInput(ids, _checked(inputs), prompt.tools)


def _ids_of(carried: inputs_pb2.CarriedInput) -> list[int]:
    return [id_ for (id_,) in struct.iter_unpack("<I", content_ids(carried.digest, carried.length))]


def _carried(image: PreparedImage, start: int, model: ServedModel) -> inputs_pb2.CarriedInput:
    info = model.info.images
    shape = (image.height, image.width, info.patch_values)
    length = image.num_tokens(info)
    return carried_input(inputs_pb2.INPUT_KIND_IMAGE, "uint8", shape, image.data, start=start, length=length)


def _checked(inputs: list[inputs_pb2.CarriedInput]) -> tuple[inputs_pb2.CarriedInput, ...]:
    num_bytes = sum(len(carried.data) for carried in inputs)
    if num_bytes > MAX_INPUT_BYTES:
        raise InvalidRequestError(
            f"the images of the prompt have {num_bytes} bytes after they are prepared; at most {MAX_INPUT_BYTES} are "
            "allowed in one request: send smaller or fewer images",
            field="prompt",
        )
    return tuple(inputs)
