"""Converts prompts to token ids and ids to text: small inputs on the event loop, large ones in threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from quire.v1 import inference_pb2 as pb

from gateway_svc.chat_request import chat_token_ids
from gateway_svc.models import ServedModel
from gateway_svc.parameters import check_token_ids
from svc_common.errors import InvalidRequestError, OverloadedError

P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 1024  # tokenizing this much text takes less than a millisecond
RETRY_FULL_S = 1.0
INLINE_ID_BYTES = 16 << 10  # copying this many bytes of token ids costs no more than using a thread


class PromptReader:
    """Owns the threads that convert large inputs. The tokenizer releases the GIL.

    Tokenize and Detokenize calls have separate threads and at most `max_call_bytes` of input in progress, so that they
    never delay the prompt of a generation.
    """

    def __init__(self, max_call_bytes: int = 16 << 20) -> None:
        num_cores = os.cpu_count() or 2
        self._threads = ThreadPoolExecutor(min(8, max(2, num_cores)), thread_name_prefix="tokenize")
        self._call_threads = ThreadPoolExecutor(min(4, max(1, num_cores // 4)), thread_name_prefix="tokenize-call")
        self._max_call_bytes = max_call_bytes
        self._num_call_bytes = 0

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function directly if its input is small (`size` in bytes), else in a thread."""
        if size <= INLINE_BYTES:
            return function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def run_call(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`run` for Tokenize and Detokenize calls. Raises OverloadedError if their total input would be too large."""
        if size <= INLINE_BYTES:
            return function(*args, **kwargs)
        if self._num_call_bytes and self._num_call_bytes + size > self._max_call_bytes:
            raise OverloadedError(
                f"Tokenize and Detokenize calls in progress hold {self._num_call_bytes} bytes and this one has {size}; "
                f"the limit is {self._max_call_bytes} (--max-tokenize-bytes); retry later",
                retry_after_s=RETRY_FULL_S,
            )
        self._num_call_bytes += size
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._call_threads, lambda: function(*args, **kwargs))
        finally:
            self._num_call_bytes -= size

    async def token_ids(self, prompt: pb.Prompt, model: ServedModel) -> Sequence[int]:
        """The token ids of a generation's prompt. Raises InvalidRequestError."""
        size = prompt.ByteSize()
        if prompt.HasField("tokens") and size <= INLINE_ID_BYTES:
            return prompt_token_ids(prompt, model)
        return await self.run(size, prompt_token_ids, prompt, model)

    def close(self) -> None:
        """Stop the threads."""
        for threads in (self._threads, self._call_threads):
            threads.shutdown(wait=False, cancel_futures=True)


def tokenize(request: pb.TokenizeRequest, model: ServedModel) -> pb.TokenizeResponse:
    """Token ids of a prompt. Raises InvalidRequestError."""
    adds_special = not request.HasField("add_special_tokens") or request.add_special_tokens
    ids = prompt_token_ids(request.prompt, model, add_special_tokens=adds_special)
    check_token_ids("prompt", ids, model)
    strings = model.require_tokenizer("token_strings").token_strings(ids) if request.token_strings else ()
    return pb.TokenizeResponse(ids=ids, max_model_len=model.info.max_model_len, token_strings=strings)


def detokenize(request: pb.DetokenizeRequest, model: ServedModel) -> pb.DetokenizeResponse:
    """Text of token ids. Raises InvalidRequestError."""
    tokenizer = model.require_tokenizer("ids")
    check_token_ids("ids", request.ids, model)
    return pb.DetokenizeResponse(text=tokenizer.decode(request.ids, skip_special_tokens=request.skip_special_tokens))


def prompt_token_ids(prompt: pb.Prompt, model: ServedModel, *, add_special_tokens: bool = True) -> Sequence[int]:
    """Token ids of a prompt of any kind. Raises InvalidRequestError with the field at fault."""
    kind = prompt.WhichOneof("kind")
    if kind == "tokens":
        return list(prompt.tokens.ids)
    if kind == "text":
        ids = model.require_tokenizer("prompt.text").encode(prompt.text, add_special_tokens=add_special_tokens)
    else:
        ids = chat_token_ids(prompt.chat, model)
    if not ids:
        raise InvalidRequestError(f"prompt.{kind} gives no tokens; send more text", field=f"prompt.{kind}")
    return ids
