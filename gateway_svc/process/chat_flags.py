"""The flags of the gateway for chats."""

from __future__ import annotations

import argparse
from pathlib import Path

from gateway_svc.text.chat_format import AUTO, NONE, ParserNameError, ParserNames
from gateway_svc.text.reasoning import BUDGETS, REASONING_FORMATS, ThinkingSettings
from gateway_svc.text.tool_formats import TOOL_FORMATS
from request_fields.fields import MAX_UINT32
from svc_common.config import Flag, FlagGroup, SettingError, in_range, text

EFFORTS = (*BUDGETS, "xhigh")
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
    Flag("--thinking-budget", text,
        "tokens of reasoning for a reasoning effort, or `off` for no limit. Repeat the flag for more efforts. Unset: "
        + ", ".join(f"{effort}={tokens}" for effort, tokens in BUDGETS.items()) + "; for GPT-OSS only none=0",
        metavar="EFFORT=TOKENS", is_list=True,
    ),
    Flag("--thinking-end-text", text,
        "text that is forced before the end marker of reasoning whose budget is used up", default="",
    ),
    Flag("--min-answer-tokens", in_range(int, 0, MAX_UINT32),
        "tokens of max_tokens that stay for the answer of a chat: reasoning is ended before it would use them. 0: "
        "reasoning may use all", default=0,
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
    """The parsers of --tool-parser and --reasoning-parser, with the rules of thinking budgets. Raises SettingError."""
    budgets = dict(map(_effort_budget, args.thinking_budget))
    thinking = ThinkingSettings(budgets, args.thinking_end_text, args.min_answer_tokens)
    try:
        return ParserNames.from_flags(args.tool_parser, args.reasoning_parser, thinking)
    except ParserNameError as error:
        raise SettingError(str(error)) from None


def _effort_budget(value: str) -> tuple[str, int | None]:
    effort, _, tokens = value.partition("=")
    if effort not in EFFORTS or not (tokens == "off" or (tokens.isdecimal() and int(tokens) <= MAX_UINT32)):
        known = ", ".join(EFFORTS)
        raise SettingError(
            f"--thinking-budget is {value!r}; must be EFFORT=TOKENS or EFFORT=off, EFFORT one of {known}"
        )
    return effort, None if tokens == "off" else int(tokens)
