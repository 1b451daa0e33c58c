"""Prompts of text, of token ids and of chats, and what generations do with the tokens of all prompts. Templates render
chats in sandbox processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from quire.v1 import inference_pb2 as pb

from gateway_svc.request.field_errors import CHAT, FieldErrors, invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.images import images_of, with_images
from gateway_svc.request.prompts.reader import PromptInput, ReadContext, has_images
from gateway_svc.request.sandbox.template_renderer import render_frame, rendered_text
from gateway_svc.request.tools import ChatTools, must_call, parse_json, read_tools, refused, shown
from gateway_svc.text.bundle import RenderOptions, TooManyTokensError
from gateway_svc.text.chat import ChatTemplateError
from gateway_svc.text.chat_output import short_call_id
from gateway_svc.text.tool_formats import CallIds, ToolFormat
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


ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000  # number of messages in a chat
MIN_CHAT_LIMIT_BYTES = 1 << 20  # a template may drop part of a chat, so a large chat may have few tokens
INLINE_CHAT_BYTES = 16 << 10  # converting a chat of this size to JSON costs no more than using a thread


class ChatReader(TokenPromptReader):
    """Large chats are converted in a thread. Templates run in processes of their model."""

    def check(self, prompt: pb.Prompt, field: str) -> None:
        _check_chat(prompt.chat)

    def check_size(self, request: pb.GenerateRequest, model: ServedModel) -> None:
        limit = max(model.max_prompt_bytes, MIN_CHAT_LIMIT_BYTES)
        check_text_size(request, _text_size(request.prompt), model, limit)

    async def token_ids(
        self, prompt: pb.Prompt, model: ServedModel, context: ReadContext, how: Encoding
    ) -> PromptInput:
        tokenizer = model.require_tokenizer(CHAT)
        size = _text_size(prompt)
        frame, tools = await context.lane.run(0 if size <= INLINE_CHAT_BYTES else size, chat_frame, prompt.chat, model)
        answer = await context.templates.render(frame, model, is_call=context.lane.is_call)

        def tokenize() -> list[int]:
            return tokenizer.encode(rendered_text(answer), add_special_tokens=False, most=how.most)

        return PromptInput(some_ids(await context.lane.run(len(answer), tokenize), CHAT), tools=tools)


def _check_chat(chat: pb.Chat) -> None:
    """Check the fields that do not depend on the model, except the JSON fields. Raises InvalidRequestError."""
    if not chat.messages:
        raise refused("messages", "is empty; send at least one message")
    if len(chat.messages) > MAX_MESSAGES:
        raise refused("messages", f"has {len(chat.messages)} messages; at most {MAX_MESSAGES} are allowed")
    for i, message in enumerate(chat.messages):
        _check_message(f"messages[{i}]", message)
    if chat.tool_choice not in pb.ToolChoice.values():
        raise refused("tool_choice", f"is {chat.tool_choice}; must be a value of ToolChoice")
    if chat.tool_name and chat.tool_choice not in (pb.TOOL_CHOICE_UNSPECIFIED, pb.TOOL_CHOICE_REQUIRED):
        raise refused("tool_name", f"is {shown(chat.tool_name)}; if it is set, tool_choice must be REQUIRED or unset")
    if must_call(chat) and not chat.tools_json:
        field_name = "tool_name" if chat.tool_name else "tool_choice"
        raise refused(field_name, "requires a call, but the chat has no tools; send the tools")
    if chat.continue_final_message and any(part.HasField("image") for part in chat.messages[-1].parts):
        raise refused("continue_final_message", "is true, but the last message has an image; only text is continued")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise refused("add_generation_prompt", "is true with continue_final_message; set only one of them")


def _check_message(where: str, message: pb.ChatMessage) -> None:
    if message.role not in ROLES:
        raise refused(f"{where}.role", f"is {shown(message.role)}; must be one of {', '.join(ROLES)}")
    if message.tool_calls and message.role != "assistant":
        raise refused(f"{where}.tool_calls", f"is set, but the role is {message.role}; only assistant messages have it")
    if message.reasoning and message.role != "assistant":
        raise refused(f"{where}.reasoning", f"is set, but the role is {message.role}; only assistant messages have it")
    if message.tool_call_id and message.role != "tool":
        raise refused(f"{where}.tool_call_id", f"is set, but the role is {message.role}; only tool messages have it")
    if message.content and message.parts:
        raise refused(f"{where}.parts", "is set, and content too; set only one of them")
    for i, part in enumerate(message.parts):
        if part.WhichOneof("kind") is None:
            raise refused(f"{where}.parts[{i}]", "has neither text nor image; set one of them")
    for i, call in enumerate(message.tool_calls):
        if not call.name:
            raise refused(f"{where}.tool_calls[{i}].name", "is empty; send the name of the tool")


def _text_size(prompt: pb.Prompt) -> int:
    """Bytes of a chat without its images."""
    return prompt.ByteSize() - _images_size(prompt.chat)


def _images_size(chat: pb.Chat) -> int:
    """Bytes of the images of a chat."""
    return sum(len(part.image) for message in chat.messages for part in message.parts)


def chat_frame(chat: pb.Chat, model: ServedModel) -> tuple[bytes, ChatTools]:
    """The message that renders a chat (template_renderer.py), and the chat's tools. Raises InvalidRequestError."""
    tokenizer = model.require_tokenizer(CHAT)
    tools = read_tools(chat)
    options: RenderOptions = {
        "template_kwargs": parse_json("template_kwargs_json", chat.template_kwargs_json, dict, "an object"),
        "tools": list(tools.given) or None,
        "continue_final_message": chat.continue_final_message,
        "add_generation_prompt": chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
    }
    try:
        template = tokenizer.template_name(chat.chat_template, has_tools=bool(options["tools"]))
    except ChatTemplateError as error:
        raise InvalidRequestError(f"{CHAT}: {error}", field=CHAT) from None
    messages = [_message_variables(message) for message in chat.messages]
    _set_call_ids(messages, model.chat_format(chat.chat_template, has_tools=True).tools)
    return render_frame(template, messages, options, chat.ByteSize() - _images_size(chat)), tools


def _set_call_ids(messages: Iterable[dict[str, Any]], format: ToolFormat | None) -> None:
    """Give calls and their results the ids that the template requires: functions of their number in the chat."""
    if format is None or format.ids is CallIds.OPAQUE:
        return
    shown, number = dict[str, str](), 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            is_short = format.ids is CallIds.SHORT
            new_id = short_call_id(number) if is_short else f"functions.{call['function']['name']}:{number}"
            shown[call["id"]] = call["id"] = new_id
            number += 1
        if "tool_call_id" in message:
            message["tool_call_id"] = shown.get(message["tool_call_id"], message["tool_call_id"])


def _message_variables(message: pb.ChatMessage) -> dict[str, Any]:
    """The message as templates expect it. Fields that are not set are missing, because templates test for them."""
    content: Any = message.content
    if any(part.HasField("image") for part in message.parts):
        content = [_part_variables(part) for part in message.parts]
    elif message.parts:
        content = "\n".join(part.text for part in message.parts)
    variables: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        variables["tool_calls"] = [_call_variables(call) for call in message.tool_calls]
    if message.reasoning:
        variables |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    given = {"tool_call_id": message.tool_call_id, "name": message.name}
    return variables | {name: value for name, value in given.items() if value}


def _part_variables(part: pb.ContentPart) -> dict[str, Any]:
    return {"type": "image"} if part.HasField("image") else {"type": "text", "text": part.text}


def _call_variables(call: pb.ToolCall) -> dict[str, Any]:
    """Arguments are a JSON value, which templates serialize; text that is not JSON stays text."""
    try:
        arguments = json.loads(call.arguments) if call.arguments else {}
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
