"""Replaces names of request fields in the server's messages with the flags that set them."""

from __future__ import annotations

import re

from request_fields.fields import FIELDS

FLAGS = {field.path: f"--{field.option.replace('_', '-')}" for field in FIELDS if field.has_flag} | {
    "sampling.n": "--n",
    "prompt.text": "the prompt",
    "prompt.tokens": "--tokens",
    "prompt.chat": "the chat",
}
SDK_OPTION = "api_key=... in the client"  # in the gateway's message for a missing key
PATHS = re.compile("|".join(rf"\b{re.escape(path)}\b" for path in sorted(FLAGS, key=len, reverse=True)))


def with_flag_names(message: str) -> str:
    """The message with flags instead of paths such as sampling.top_p."""
    message = message.replace(SDK_OPTION, "--api-key")
    return PATHS.sub(lambda match: FLAGS[match[0]], message)
