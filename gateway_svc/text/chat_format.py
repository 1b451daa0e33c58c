"""Chooses the format of a model's answers from its chat template and vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway_svc.text.chat_output import ChatFormat
from gateway_svc.text.reasoning import REASONING_FORMATS, REASONING_PARSERS, ReasoningFormat, ThinkingSettings
from gateway_svc.text.tool_formats import TOOL_FORMATS, TOOL_PARSERS, ToolFormat

AUTO, NONE = "auto", "none"
NO_SETTINGS = ThinkingSettings()


class ParserNameError(ValueError):
    """A flag names a parser or a model that does not exist."""


def detect_format(template: str, has_token: Callable[[str], bool]) -> ChatFormat:
    """Detect the format from a template's source and the vocabulary. A template contains the markers of tool calls;
    the markers of reasoning may be in the vocabulary only.
    """
    tools = next((one for one in TOOL_FORMATS.values() if _uses(template, one)), None)
    formats = REASONING_FORMATS.values()
    named = (one for one in formats if one.word in template)
    reasoning = next(named, next((one for one in formats if all(map(has_token, one.markers))), None))
    return ChatFormat(reasoning, tools)


def _uses(template: str, format: ToolFormat) -> bool:
    return any(all(word in template for word in words) for words in format.words)


@dataclass(frozen=True, slots=True)
class ParserNames:
    """Parsers chosen by flags: a parser's name, `none` or `auto`, by model name; "" for all other models."""

    tools: Mapping[str, str]
    reasoning: Mapping[str, str]
    thinking: ThinkingSettings = NO_SETTINGS

    @classmethod
    def from_flags(
        cls, tools: Sequence[str], reasoning: Sequence[str], thinking: ThinkingSettings = NO_SETTINGS
    ) -> ParserNames:
        """The flags of parsers are NAME or MODEL=NAME. Raises ParserNameError."""
        return cls(
            _by_model("--tool-parser", tools, TOOL_PARSERS),
            _by_model("--reasoning-parser", reasoning, REASONING_PARSERS),
            thinking,
        )

    def format_of(self, model: str, detected: ChatFormat) -> ChatFormat:
        """The format of a model's answers."""
        tools, reasoning = _of(self.tools, model), _of(self.reasoning, model)
        chosen_tools: ToolFormat | None = detected.tools if tools == AUTO else TOOL_PARSERS.get(tools)
        chosen_reasoning: ReasoningFormat | None = (
            detected.reasoning if reasoning == AUTO else REASONING_PARSERS.get(reasoning)
        )
        return ChatFormat(chosen_reasoning, chosen_tools)


DETECTED = ParserNames({}, {})


def _of(names: Mapping[str, str], model: str) -> str:
    return names.get(model, names.get("", AUTO))


def _by_model(flag: str, values: Sequence[str], known: Mapping[str, object]) -> dict[str, str]:
    names: dict[str, str] = {}
    for value in values:
        model, _, name = value.rpartition("=")
        if name not in (AUTO, NONE, *known):
            raise ParserNameError(f"{flag} {value!r}: no parser {name!r}; use one of {', '.join((AUTO, NONE, *known))}")
        names[model] = name
    return names
