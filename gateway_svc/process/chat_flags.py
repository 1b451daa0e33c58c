"""The flags of the gateway for chats."""

from __future__ import annotations

import argparse
from pathlib import Path

from gateway_svc.text.chat_format import AUTO, NONE, ParserNameError, ParserNames
from gateway_svc.text.reasoning import REASONING_FORMATS
from gateway_svc.text.tool_formats import TOOL_FORMATS
from svc_common.config import Flag, FlagGroup, SettingError, text

CHAT_FLAGS = FlagGroup("chats (docs/chat.md)", (
    Flag("--chat-template", text,
        "a Jinja chat template that requests can name; FILE alone or `default=FILE` replaces the default template of "
        "all models. Repeat the flag for more templates (in the environment variable, separate them by commas). "
        "Requests cannot send templates", metavar="[NAME=]FILE", is_list=True,
    ),
    Flag("--tool-parser", text,
        "how a model writes tool calls: " + ", ".join((AUTO, NONE, *TOOL_FORMATS)) + ". Unset: auto, from the "
        "chat template", metavar="[MODEL=]NAME", is_list=True,
    ),
    Flag("--reasoning-parser", text,
        "how a model marks its reasoning: " + ", ".join((AUTO, NONE, *REASONING_FORMATS)) + ". Unset: auto, from "
        "the chat template and the vocabulary", metavar="[MODEL=]NAME", is_list=True,
    ),
))  # fmt: skip


class TemplateFileError(SettingError):
    """A value of --chat-template is not FILE or NAME=FILE, or the file cannot be read."""


def chat_templates(args: argparse.Namespace) -> dict[str, str]:
    """The templates of --chat-template, by name. Raises TemplateFileError."""
    templates: dict[str, str] = {}
    for value in args.chat_template:
        name, path = value.split("=", 1) if "=" in value else ("default", value)
        if not name or not path:
            raise TemplateFileError(f"--chat-template is {value!r}; must be FILE or NAME=FILE")
        try:
            templates[name] = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TemplateFileError(f"--chat-template {value}: the file cannot be read: {error}") from None
    return templates


def parser_names(args: argparse.Namespace) -> ParserNames:
    """The parsers of --tool-parser and --reasoning-parser. Raises SettingError."""
    try:
        return ParserNames.from_flags(args.tool_parser, args.reasoning_parser)
    except ParserNameError as error:
        raise SettingError(str(error)) from None
