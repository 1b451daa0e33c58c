"""Prompts to token ids and ids to text: small inputs on the event loop, large ones in threads."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from quire.v1 import inference_pb2 as pb

from gateway_svc import validation
from gateway_svc.models import ServedModel
from gateway_svc.text.chat import ChatTemplateError
from svc_common.errors import InvalidRequestError

P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 1024  # tokenizing this much text takes less than a millisecond
INLINE_ID_BYTES = 16 << 10  # copying this many bytes of token ids costs no more than using a thread


class PromptReader:
    """Owns the threads that read large inputs. The tokenizer releases the GIL."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(min(8, max(2, os.cpu_count() or 2)), thread_name_prefix="tokenize")

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function directly if its input is small (`size` in bytes), else in a thread."""
        if size <= INLINE_BYTES:
            return function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def token_ids(
        self, prompt: pb.Prompt, model: ServedModel, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        """The prompt's token ids. Raises InvalidRequestError."""
        size = prompt.ByteSize()
        if prompt.HasField("tokens") and size <= INLINE_ID_BYTES:
            return prompt_token_ids(prompt, model, add_special_tokens=add_special_tokens)
        return await self.run(size, prompt_token_ids, prompt, model, add_special_tokens=add_special_tokens)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def prompt_token_ids(prompt: pb.Prompt, model: ServedModel, *, add_special_tokens: bool) -> Sequence[int]:
    """Token ids of a prompt of any kind. Raises InvalidRequestError with the field at fault."""
    kind = prompt.WhichOneof("kind")
    if kind == "tokens":
        return list(prompt.tokens.ids)
    if kind == "text":
        ids = model.require_tokenizer("prompt.text").encode(prompt.text, add_special_tokens=add_special_tokens)
    else:
        ids = _chat_token_ids(prompt.chat, model)
    if not ids:
        raise InvalidRequestError(f"prompt.{kind} gives no tokens; send more text", field=f"prompt.{kind}")
    return ids


def text_of_ids(ids: Sequence[int], model: ServedModel, *, skip_special_tokens: bool) -> str:
    """Text of token ids. Raises InvalidRequestError."""
    tokenizer = model.require_tokenizer("ids")
    validation.check_token_ids("ids", ids, model)
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def _chat_token_ids(chat: pb.Chat, model: ServedModel) -> list[int]:
    tokenizer = model.require_tokenizer("prompt.chat")
    template_kwargs = _parse_json("prompt.chat.template_kwargs_json", chat.template_kwargs_json, dict, "an object")
    tools = _parse_json("prompt.chat.tools_json", chat.tools_json, list, "an array")
    try:
        return tokenizer.encode_chat(
            [{"role": message.role, "content": message.content} for message in chat.messages],
            tools=tools,
            template_kwargs=template_kwargs,
            continue_final_message=chat.continue_final_message,
        )
    except ChatTemplateError as error:
        raise InvalidRequestError(f"prompt.chat: {error}", field="prompt.chat") from None


def _parse_json(field: str, text: str, kind: type, words: str) -> Any:
    if not text:
        return None
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # a lone \ud800 is valid JSON but cannot be encoded
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} is not JSON: {error}", field=field) from None
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{field} is a JSON {type(value).__name__}; it must be {words}", field=field)
    return value
