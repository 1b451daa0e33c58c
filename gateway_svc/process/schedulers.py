"""The schedulers of the process: one client each, the models that they serve, where requests go; and flags of chats."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

from gateway_svc.request.models import BundleCache
from gateway_svc.request.public_prefixes import public_prefixes
from gateway_svc.schedulers.directory import ModelDirectory, SchedulerClients
from gateway_svc.schedulers.dispatcher import Dispatcher
from gateway_svc.schedulers.routes import ModelRoutes
from gateway_svc.schedulers.scheduler_client import SchedulerClient
from gateway_svc.text.chat_output import AUTO, NONE, ParserNameError, ParserNames
from gateway_svc.text.reasoning import BUDGETS, REASONING_FORMATS, ThinkingSettings
from gateway_svc.text.tool_formats import TOOL_FORMATS
from request_fields.fields import MAX_UINT32
from svc_common.config import Flag, FlagGroup, SettingError, in_range, text
from svc_common.scheduler_names import SchedulerNames
from svc_common.security.trust import make_trust

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


class Schedulers:
    """Owns the clients of all schedulers. Raises SettingError."""

    def __init__(
        self, args: argparse.Namespace, gateway_id: str, on_change: Callable[[], None], routes: ModelRoutes
    ) -> None:
        bundles, parsers = BundleCache(chat_templates(args), public_prefixes(args)), parser_names(args)
        open_channel = make_trust(args, "gateway").channels_to("scheduler")
        self._clients = SchedulerClients(
            lambda address: SchedulerClient(
                address,
                gateway_id=gateway_id,
                bundles=bundles,
                parsers=parsers,
                deltas_interval_s=args.chunk_interval_ms / 1000,
                open_channel=open_channel,
                max_bundle_bytes=args.max_bundle_bytes,
            )
        )
        self.dispatcher = Dispatcher(self._clients.all, patience_s=args.scheduler_patience_s, on_change=on_change)
        self._clients.events = self.dispatcher
        self.directory = ModelDirectory(self._clients.all, routes)
        self._names = SchedulerNames(args.scheduler, self._clients.update)

    def start(self) -> list[asyncio.Task[None]]:
        """Look up the schedulers and connect to them. The caller cancels the tasks."""
        self._names.start()
        return [asyncio.create_task(run) for run in (self._clients.run(), self._names.run())]
