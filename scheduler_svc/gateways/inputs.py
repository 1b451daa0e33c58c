"""Checks of the inputs of a Submit that are not tokens. A bad input refuses its request and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from quire.internal.v1 import inputs_pb2 as pb
from quire.v1 import types_pb2

from prefix_index.content_ids import DIGEST_BYTES, content_ids
from request_fields.inputs import (
    AUDIO_DTYPES,
    EMBEDDING_DTYPES,
    INPUT_DTYPE_BYTES,
    MAX_INPUT_BYTES,
    MAX_INPUTS,
    ImageShape,
)
from step_protocol.columns import U32
from svc_common.errors import InvalidRequestError

# Bytes per element, by number of the dtype.
DTYPE_BYTES = {pb.InputDtype.Value(f"INPUT_DTYPE_{name.upper()}"): size for name, size in INPUT_DTYPE_BYTES.items()}
DTYPES_OF_EMBEDDINGS, DTYPES_OF_AUDIO = (
    tuple(pb.InputDtype.Value(f"INPUT_DTYPE_{name.upper()}") for name in names)
    for names in (EMBEDDING_DTYPES, AUDIO_DTYPES)
)


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a prompt."""

    spans: bytes = b""  # u32[3 x N]: start, height and width in positions, for workers
    work: tuple[tuple[int, int], ...] = ()  # per image: its start, and its work as a number of tokens


NO_IMAGES = Images()


def images_of(inputs: Sequence[pb.CarriedInput], info: types_pb2.ModelInfo) -> Images:
    """The images among inputs that passed `check_inputs`."""
    images = [carried for carried in inputs if carried.kind == pb.INPUT_KIND_IMAGE]
    if not images:
        return NO_IMAGES
    merge = info.images.merge_size
    spans = [(carried.start, carried.shape[0] // merge, carried.shape[1] // merge) for carried in images]
    work = tuple((carried.start, _work_of(carried, info.images)) for carried in images)
    return Images(np.array(spans, "<u4").tobytes(), work)


def _work_of(carried: pb.CarriedInput, info: types_pb2.ImageInfo) -> int:
    num_patches = carried.length * info.merge_size**2
    return max(1, math.ceil(carried.length * (info.token_cost + info.attention_cost * num_patches)))


def check_inputs(inputs: Sequence[pb.CarriedInput], prompt: U32, info: types_pb2.ModelInfo) -> int:
    """Check the inputs, and that all other ids of the prompt are below vocab_size. Returns the bytes of their data.

    Raises InvalidRequestError with field, value and limit.
    """
    if not inputs:
        check_vocab(prompt, info.vocab_size, "prompt_token_ids")
        return 0
    if len(inputs) > MAX_INPUTS:
        raise _invalid("", f"has {len(inputs)} inputs; at most {MAX_INPUTS} are allowed")
    if not (info.hidden_size or info.encoder.HasField("audio")):
        raise _invalid("", f"has {len(inputs)} inputs, but the workers of model {info.model!r} take tokens only")
    is_token = np.ones(len(prompt), np.bool_)
    first = num_bytes = 0
    for i, carried in enumerate(inputs):
        num_bytes += _check_input(f"[{i}]", carried, first, prompt, info)
        first = carried.start + carried.length
        is_token[carried.start : first] = False
    if num_bytes > MAX_INPUT_BYTES:
        raise _invalid("", f"have {num_bytes} bytes of data; at most {MAX_INPUT_BYTES} are allowed in one request")
    check_vocab(prompt[is_token], info.vocab_size, "prompt_token_ids")
    return num_bytes


def check_vocab(token_ids: U32, vocab_size: int, field: str) -> None:
    """Check that all ids are tokens of the vocabulary."""
    highest = int(token_ids[token_ids.argmax()]) if len(token_ids) else 0  # faster than max()
    if highest >= vocab_size:
        raise InvalidRequestError(f"{field} contains {highest}; ids must be below vocab_size {vocab_size}", field=field)


def _check_input(index: str, carried: pb.CarriedInput, first: int, prompt: U32, info: types_pb2.ModelInfo) -> int:
    """Check one input, which must not start before position `first`. Returns the bytes of its data."""
    end = carried.start + carried.length
    if not first <= carried.start < end <= len(prompt):
        raise _invalid(
            index,
            f"has start {carried.start} and length {carried.length}; its positions must be after those of the inputs "
            f"before it, which end at {first}, and in the prompt of {len(prompt)} positions",
        )
    if carried.kind == pb.INPUT_KIND_IMAGE:
        _check_image(index, carried, info)
    else:
        _check_numbers(index, carried, info)
    if len(carried.digest) != DIGEST_BYTES:
        raise _invalid(index, f"has a digest of {len(carried.digest)} bytes; must have {DIGEST_BYTES}")
    if prompt[carried.start : end].astype("<u4").tobytes() != content_ids(carried.digest, carried.length):
        raise _invalid(index, "has positions in prompt_token_ids that are not the content ids of its digest")
    return len(carried.data)


def _check_image(index: str, carried: pb.CarriedInput, info: types_pb2.ModelInfo) -> None:
    if not info.HasField("images"):
        raise _invalid(index, f"is an image, but model {info.model!r} takes none")
    if carried.dtype != pb.INPUT_DTYPE_UINT8:
        raise _invalid(index, f"has dtype {carried.dtype}; an image has {pb.INPUT_DTYPE_UINT8} (uint8)")
    images = info.images
    shape = ImageShape(images.token_id, images.merge_size, images.patch_values, images.channels)
    refusal = shape.refusal(carried.shape, carried.length, len(carried.data))
    if refusal is not None:
        raise _invalid(index, f"has {refusal}")


def _check_numbers(index: str, carried: pb.CarriedInput, info: types_pb2.ModelInfo) -> None:
    """Check embeddings or audio."""
    if carried.dtype not in DTYPE_BYTES:
        raise _invalid(index, f"has dtype {carried.dtype}; must be one of {', '.join(map(str, DTYPE_BYTES))}")
    if info.encoder.HasField("audio"):
        _check_audio(index, carried, info.encoder)
    else:
        _check_embeddings(index, carried, info)
    num_bytes = math.prod(carried.shape) * DTYPE_BYTES[carried.dtype]
    if len(carried.data) != num_bytes:
        raise _invalid(index, f"has {len(carried.data)} bytes of data; its shape and dtype need {num_bytes}")


def _check_embeddings(index: str, carried: pb.CarriedInput, info: types_pb2.ModelInfo) -> None:
    if carried.kind != pb.INPUT_KIND_EMBEDDINGS:
        raise _invalid(index, f"has kind {carried.kind}; this scheduler knows {pb.INPUT_KIND_EMBEDDINGS} (embeddings)")
    if carried.dtype not in DTYPES_OF_EMBEDDINGS:
        raise _invalid(index, f"has dtype {carried.dtype}; embeddings are one of {', '.join(EMBEDDING_DTYPES)}")
    expected = [carried.length, info.hidden_size]
    if list(carried.shape) != expected:
        raise _invalid(index, f"has shape {list(carried.shape)}; must be {expected} (length and hidden_size)")


def _check_audio(index: str, carried: pb.CarriedInput, info: types_pb2.EncoderInfo) -> None:
    if carried.kind != pb.INPUT_KIND_AUDIO or carried.dtype not in DTYPES_OF_AUDIO:
        raise _invalid(
            index,
            f"has kind {carried.kind} and dtype {carried.dtype}; the model takes kind {pb.INPUT_KIND_AUDIO} (audio) "
            f"with dtype {' or '.join(map(str, DTYPES_OF_AUDIO))} ({' or '.join(AUDIO_DTYPES)})",
        )
    if (carried.start, carried.length) != (0, info.max_tokens):
        raise _invalid(
            index,
            f"has start {carried.start} and length {carried.length}; audio has positions 0 to {info.max_tokens - 1}",
        )
    most = info.audio.max_samples
    if len(carried.shape) != 1 or not 1 <= carried.shape[0] <= most:
        raise _invalid(index, f"has shape {list(carried.shape)}; must be [samples], with 1 to {most} samples")


def _invalid(index: str, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"inputs{index} {words}", field=f"inputs{index}")
