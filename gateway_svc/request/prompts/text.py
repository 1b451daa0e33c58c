"""Prompts of text and of token ids, and what generations do with the tokens of all prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from quire.v1 import inference_pb2 as pb

from gateway_svc.request.field_errors import FieldErrors, invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.images import images_of, with_images
from gateway_svc.request.prompts.reader import PromptInput, ReadContext, has_images
from gateway_svc.request.tools import read_tools
from gateway_svc.text.bundle import TooManyTokensError
from svc_common.errors import ContextLengthError, InvalidRequestError

MAX_TOKENIZE_BYTES = 4 << 20
INLINE_ID_BYTES = 16 << 10  # copying this many bytes of token ids costs no more than using a thread


class Encoding(NamedTuple):
    """How a text becomes tokens."""

    adds_special: bool = True
    most: int | None = None  # a text with far more tokens raises TooManyTokensError


class TokenPromptReader:
    """Reads prompts that consist of tokens, between which there may be images."""

    def check(self, prompt: pb.Prompt, field: str) -> None:
        raise NotImplementedError

    def check_size(self, request: pb.GenerateRequest, model: ServedModel) -> None:
        raise NotImplementedError

    async def token_ids(
        self, prompt: pb.Prompt, model: ServedModel, context: ReadContext, how: Encoding
    ) -> PromptInput:
        """The tokens of a prompt whose form is checked, with the tools of a chat."""
        raise NotImplementedError

    async def read(
        self, request: pb.GenerateRequest, model: ServedModel, known_ids: Sequence[int] | None, context: ReadContext
    ) -> PromptInput:
        chat = request.prompt.chat
        has_any = request.media or (request.prompt.HasField("chat") and has_images(chat))
        images = images_of(request) if has_any else []
        if images:
            context.images.check(images, model)
        if known_ids is not None:
            prompt = PromptInput(known_ids, tools=await context.lane.run(len(chat.tools_json), read_tools, chat))
        else:
            prompt = await self._token_ids(request, model, context)
        if images or model.info.HasField("images"):
            prompt = await with_images(prompt, images, model, context, is_expanded=known_ids is not None)
        return prompt

    async def _token_ids(self, request: pb.GenerateRequest, model: ServedModel, context: ReadContext) -> PromptInput:
        is_cut = request.HasField("truncate_prompt_tokens") or model.info.HasField("encoder")
        most = None if is_cut else model.limits.max_tokens
        try:
            how = Encoding(not request.session_id, most)  # the prompt of its session has the special tokens
            return await self.token_ids(request.prompt, model, context, how)
        except TooManyTokensError as error:
            field = f"prompt.{request.prompt.WhichOneof('kind')}"
            words = (
                f"{field} {error}, the limit for prompt and output (max_model_len and the KV pool): shorten the prompt"
            )
            raise ContextLengthError(words, field=field, limit=model.limits.max_tokens) from None


class TextReader(TokenPromptReader):
    """Small texts are tokenized on the event loop, large ones in a thread."""

    def check(self, prompt: pb.Prompt, field: str) -> None:
        if not prompt.text:
            raise invalid(f"{field}.text", "is empty; send at least one character")

    def check_size(self, request: pb.GenerateRequest, model: ServedModel) -> None:
        check_text_size(request, request.prompt.ByteSize(), model, model.max_prompt_bytes)

    async def token_ids(
        self, prompt: pb.Prompt, model: ServedModel, context: ReadContext, how: Encoding
    ) -> PromptInput:
        tokenizer = model.require_tokenizer("prompt.text")
        encode = partial(tokenizer.encode, add_special_tokens=how.adds_special, most=how.most)
        ids = await context.lane.run(prompt.ByteSize(), encode, prompt.text)
        return PromptInput(some_ids(ids, "prompt.text"))


class TokensReader(TokenPromptReader):
    """Many ids are copied in a thread."""

    def check(self, prompt: pb.Prompt, field: str) -> None:
        if not prompt.tokens.ids:
            raise invalid(f"{field}.tokens.ids", "is empty; send at least one token id")

    def check_size(self, request: pb.GenerateRequest, model: ServedModel) -> None:
        if request.HasField("truncate_prompt_tokens"):
            check_truncated(request.prompt.ByteSize())
        elif (num_tokens := len(request.prompt.tokens.ids)) > model.limits.max_tokens:
            with FieldErrors():
                model.limits.resolve(num_tokens, None)

    async def token_ids(
        self, prompt: pb.Prompt, model: ServedModel, context: ReadContext, how: Encoding
    ) -> PromptInput:
        size = 4 * len(prompt.tokens.ids)
        return PromptInput(await context.lane.run(0 if size <= INLINE_ID_BYTES else size, list, prompt.tokens.ids))


def check_text_size(request: pb.GenerateRequest, size: int, model: ServedModel, limit: int) -> None:
    """Refuse a text of `size` bytes that has more tokens than the model takes, if `limit` bytes always have more."""
    if request.HasField("truncate_prompt_tokens"):
        check_truncated(size)
    elif size > limit:
        kind = request.prompt.WhichOneof("kind")
        raise ContextLengthError(
            f"prompt.{kind} has {size} bytes, more than the {limit} bytes that max_model_len "
            f"({model.info.max_model_len} tokens) can hold: shorten the prompt",
            field=f"prompt.{kind}",
            limit=model.limits.max_tokens,
        )


def check_truncated(size: int) -> None:
    """Check the size of a prompt of which only the end is kept."""
    if size > MAX_TOKENIZE_BYTES:
        words = f"has {size} bytes; with truncate_prompt_tokens at most {MAX_TOKENIZE_BYTES} are allowed: send less"
        raise invalid("prompt", words)


def some_ids(ids: Sequence[int], field: str) -> Sequence[int]:
    """The ids of a text. Raises InvalidRequestError if there are none."""
    if not ids:
        raise InvalidRequestError(f"{field} gives no tokens; send more text", field=field)
    return ids
