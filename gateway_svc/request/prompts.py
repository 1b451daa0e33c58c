"""Converts prompts to token ids and ids to text: small inputs on the event loop, large ones in threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from quire.v1 import inference_pb2 as pb

from gateway_svc.request.chat_request import chat_frame
from gateway_svc.request.image_prompt import check_placeholders, images_of, text_size, with_images, with_images_again
from gateway_svc.request.models import ServedModel
from gateway_svc.request.parameters import check_token_ids
from gateway_svc.request.prompt_input import PromptInput
from gateway_svc.request.sandbox.image_preparer import ImageLimits, ImagePreparer, PreparedImage
from gateway_svc.request.sandbox.template_renderer import TemplateRenderer, rendered_text
from svc_common.errors import InvalidRequestError, OverloadedError

P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 1024  # tokenizing this much text takes less than a millisecond
RETRY_FULL_S = 1.0
INLINE_CHAT_BYTES = 16 << 10  # converting a chat of this size to JSON costs no more than using a thread
INLINE_ID_BYTES = 16 << 10  # copying this many bytes of token ids costs no more than using a thread


class PromptReader:
    """Owns the threads that convert large inputs. The tokenizer releases the GIL.

    Tokenize and Detokenize calls have separate threads and at most `max_call_bytes` of input in progress, so that they
    never delay the prompt of a generation.
    """

    def __init__(
        self, templates: TemplateRenderer, max_call_bytes: int = 16 << 20, images: ImagePreparer | None = None
    ) -> None:
        num_cores = os.cpu_count() or 2
        self._templates = templates
        self._images = images or ImagePreparer(ImageLimits())
        self._threads = ThreadPoolExecutor(min(8, max(2, num_cores)), thread_name_prefix="tokenize")
        self._call_threads = ThreadPoolExecutor(min(4, max(1, num_cores // 4)), thread_name_prefix="tokenize-call")
        self._max_call_bytes = max_call_bytes
        self._num_call_bytes = 0

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function directly if its input is small (`size` in bytes), else in a thread."""
        return await _run_in(self._threads, size, function, *args, **kwargs)

    async def run_call(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`run` for Tokenize and Detokenize calls. Raises OverloadedError if their total input would be too large."""
        with self._call(size):
            return await _run_in(self._call_threads, size, function, *args, **kwargs)

    async def read(self, prompt: pb.Prompt, model: ServedModel, media: Sequence[bytes] = ()) -> PromptInput:
        """The prompt of a generation with its images, `media` or those of its chat. Raises InvalidRequestError."""
        kind = prompt.WhichOneof("kind")
        if kind == "embeddings":
            return await self.run(len(prompt.embeddings), _read_embeddings, prompt, model)
        if kind == "audio":
            return await self.run(len(prompt.audio.data), _read_audio, prompt, model)
        given = images_of(prompt, media) if media or kind == "chat" else ()
        if given:
            self._images.check(given, model)
        ids = await self._token_ids(prompt, model, is_call=False)
        if model.info.HasField("images"):
            check_placeholders(ids, len(given), model)
        if not given:
            return PromptInput(ids)
        images = await self._images.prepare(given, model)
        return await _run_in(self._threads, _size_of(images), lambda: with_images(ids, images, model))

    async def reread(
        self, prompt: pb.Prompt, ids: Sequence[int], model: ServedModel, media: Sequence[bytes] = ()
    ) -> PromptInput:
        """The prompt of a generation whose ids are known from its record."""
        if prompt.WhichOneof("kind") in ("embeddings", "audio"):
            return await self.read(prompt, model)
        given = images_of(prompt, media)
        if not given:
            return PromptInput(ids)
        images = await self._images.prepare(given, model)
        return await _run_in(self._threads, _size_of(images), lambda: with_images_again(ids, images, model))

    async def tokenize(self, request: pb.TokenizeRequest, model: ServedModel) -> pb.TokenizeResponse:
        """Token ids of a prompt. Raises InvalidRequestError, or OverloadedError as `run_call`."""
        size = request.ByteSize()
        adds_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        with self._call(size):
            ids = await self._token_ids(request.prompt, model, is_call=True, add_special_tokens=adds_special)
            return await _run_in(self._call_threads, size, lambda: _tokenize_response(request, model, ids))

    def close(self) -> None:
        """Stop the threads."""
        for threads in (self._threads, self._call_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _call(self, size: int) -> Iterator[None]:
        """Count the input of a call while it is in progress. Small inputs are not counted."""
        if size <= INLINE_BYTES:
            yield
            return
        if self._num_call_bytes and self._num_call_bytes + size > self._max_call_bytes:
            raise OverloadedError(
                f"Tokenize and Detokenize calls in progress hold {self._num_call_bytes} bytes and this one has {size}; "
                f"the limit is {self._max_call_bytes} (--max-tokenize-bytes); retry later",
                retry_after_s=RETRY_FULL_S,
            )
        self._num_call_bytes += size
        try:
            yield
        finally:
            self._num_call_bytes -= size

    async def _token_ids(
        self, prompt: pb.Prompt, model: ServedModel, *, is_call: bool, add_special_tokens: bool = True
    ) -> Sequence[int]:
        kind, size = prompt.WhichOneof("kind"), text_size(prompt)
        threads = self._call_threads if is_call else self._threads
        if kind == "tokens":
            if size <= INLINE_ID_BYTES:
                return list(prompt.tokens.ids)
            return await _run_in(threads, size, lambda: list(prompt.tokens.ids))
        tokenizer = model.require_tokenizer(f"prompt.{kind}")
        if kind == "text":
            ids = await _run_in(
                threads, size, lambda: tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens)
            )
        else:
            frame = await _run_in(
                threads, 0 if size <= INLINE_CHAT_BYTES else size, lambda: chat_frame(prompt.chat, model)
            )
            answer = await self._templates.render(frame, model, is_call=is_call)
            ids = await _run_in(
                threads, len(answer), lambda: tokenizer.encode(rendered_text(answer), add_special_tokens=False)
            )
        if not ids:
            raise InvalidRequestError(f"prompt.{kind} gives no tokens; send more text", field=f"prompt.{kind}")
        return ids


def _size_of(images: Sequence[PreparedImage]) -> int:
    return sum(len(image.data) for image in images)


def _read_embeddings(prompt: pb.Prompt, model: ServedModel) -> PromptInput:
    from gateway_svc.request.prompt_embeddings import (
        read_embeddings,  # safetensors is loaded for the first such prompt only
    )

    return read_embeddings(prompt.embeddings, model)


def _read_audio(prompt: pb.Prompt, model: ServedModel) -> PromptInput:
    from gateway_svc.request.audio import read_audio  # it imports this module's callers

    return read_audio(prompt.audio, model)


async def _run_in(
    threads: ThreadPoolExecutor, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    if size <= INLINE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *args, **kwargs))


def _tokenize_response(request: pb.TokenizeRequest, model: ServedModel, ids: Sequence[int]) -> pb.TokenizeResponse:
    check_token_ids("prompt", ids, model)
    strings = model.require_tokenizer("token_strings").token_strings(ids) if request.token_strings else ()
    return pb.TokenizeResponse(ids=ids, max_model_len=model.info.max_model_len, token_strings=strings)


def detokenize(request: pb.DetokenizeRequest, model: ServedModel) -> pb.DetokenizeResponse:
    """Text of token ids. Raises InvalidRequestError."""
    tokenizer = model.require_tokenizer("ids")
    check_token_ids("ids", request.ids, model)
    return pb.DetokenizeResponse(text=tokenizer.decode(request.ids, skip_special_tokens=request.skip_special_tokens))
