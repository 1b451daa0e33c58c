"""Renders chats as the gateway does, but in the process of the test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Unpack

from quire.v1 import inference_pb2 as pb

from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.text import chat_frame
from gateway_svc.request.sandbox.child import LENGTH
from gateway_svc.request.sandbox.template_process import Templates
from gateway_svc.request.sandbox.template_renderer import rendered_text
from gateway_svc.text.bundle import RenderOptions, Tokenizer
from gateway_svc.text.chat import ChatMessages, ChatTemplate

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render_chat(
    tokenizer: Tokenizer, messages: ChatMessages, *, template: str = "", **options: Unpack[RenderOptions]
) -> str:
    """The text of a conversation. Raises ChatTemplateError."""
    name = tokenizer.template_name(template, has_tools=bool(options.get("tools")))
    return ChatTemplate(tokenizer.templates[name], SPECIAL_TOKENS).render(messages, **options)


def encode_chat(tokenizer: Tokenizer, messages: ChatMessages, **options: Any) -> list[int]:
    """Token ids of a conversation. Raises ChatTemplateError."""
    return tokenizer.encode(render_chat(tokenizer, messages, **options), add_special_tokens=False)


def prompt_ids(prompt: pb.Prompt, model: ServedModel) -> Sequence[int]:
    """Token ids of a prompt of any kind. Raises InvalidRequestError."""
    kind = prompt.WhichOneof("kind")
    if kind == "tokens":
        return list(prompt.tokens.ids)
    tokenizer = model.require_tokenizer(f"prompt.{kind}")
    if kind == "text":
        return tokenizer.encode(prompt.text, add_special_tokens=True)
    templates = Templates()
    templates.answer({"templates": tokenizer.templates, "special_tokens": model.text.special_tokens})
    answer = templates.answer(json.loads(chat_frame(prompt.chat, model)[0][LENGTH.size :]))
    return tokenizer.encode(rendered_text(json.dumps(answer).encode()), add_special_tokens=False)
