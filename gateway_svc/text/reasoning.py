"""Reasoning: text between two markers at the start of an answer. The first marker may be the end of the prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway_svc.text.answer import AnswerReader, ItemKind, Steps
from gateway_svc.text.tool_formats import HARMONY_MARKERS, OPENAI, ToolFormat, read_harmony

# Tokens of reasoning by effort, as in Gemini's OpenAI API; no limit for the others.
BUDGETS: Mapping[str, int] = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192, "high": 24576}
MARKER = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")


@dataclass(frozen=True, slots=True)
class ThinkingSettings:
    """The operator's rules of thinking budgets, for all models."""

    budgets: Mapping[str, int | None] = field(default_factory=dict)  # by effort, in place of those of the format
    end_text: str = ""  # forced before the end marker
    answer_tokens: int = 0  # tokens of max_tokens that stay for the answer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning. `aliases`: other names, which vLLM uses. `budgets`: tokens of reasoning by effort,
    for models that do not know how much an effort is. `repeats`: an answer may have reasoning several times."""

    name: str
    models: str
    start: str
    end: str
    aliases: tuple[str, ...] = ()
    after: str = ""  # text between reasoning and the rest of an answer
    budgets: Mapping[str, int] = field(default_factory=lambda: BUDGETS, hash=False)
    repeats: bool = False

    @property
    def word(self) -> str:
        """A template with this text, or a vocabulary with all markers, makes the model use this format."""
        return self.end

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(MARKER.findall(self.start + self.end))

    def read(self, reader: AnswerReader, tools: ToolFormat | None, *, is_begun: bool) -> Steps:
        """Read the reasoning, if the answer starts with it. `is_begun`: the prompt ended with the start marker.
        `tools`: the format of the calls that follow.
        """
        stops = () if tools is None else tools.ends_reasoning
        at = yield from reader.space_end()
        has_start = yield from reader.has(self.start, at)
        if not (has_start or is_begun):
            return
        reader.is_reasoning = True
        reader.skip(at + len(self.start) if has_start else at)
        yield from reader.skip_space()
        if marker := (yield from reader.write_until(ItemKind.REASONING, (self.end, *stops))):
            at = yield from reader.space_end()
            reader.is_reasoning, reader.is_past_reasoning = False, True
            reader.skip(at + len(self.end) if marker == self.end else at)
            yield from reader.skip_space()

    def is_open_in(self, text: str) -> bool:
        """Whether the text ends inside reasoning."""
        return text.rfind(self.start) > text.rfind(self.end)


class HarmonyReasoning(ReasoningFormat):
    """Reads whole answers: reasoning and calls are messages of equal rank, in any order."""

    @property
    def word(self) -> str:
        return self.start

    @property
    def markers(self) -> tuple[str, ...]:
        return HARMONY_MARKERS

    def read(self, reader: AnswerReader, tools: ToolFormat | None, *, is_begun: bool) -> Steps:
        has_calls = tools is not None and tools.name == OPENAI
        yield from read_harmony(reader, has_reasoning=True, has_calls=has_calls, is_begun=is_begun)


THINK = ReasoningFormat(
    "think", "Qwen3, DeepSeek R1 and V3.1, GLM-4.5, Kimi K2, MiniMax M2 and others", "<think>", "</think>",
    ("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "minimax_m2"),
)  # fmt: skip
MAGISTRAL = ReasoningFormat("magistral", "Magistral, Ministral", "[THINK]", "[/THINK]", ("mistral",))
GPT_OSS = HarmonyReasoning(
    "openai_gptoss",
    "GPT-OSS",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    after="<|start|>assistant",
    budgets={"none": 0},  # its template tells the model the effort
    repeats=True,
)
COHERE = ReasoningFormat("cohere", "Command A", "<|START_THINKING|>", "<|END_THINKING|>", ("cohere_command3",))
GEMMA4 = ReasoningFormat("gemma4", "Gemma 4", "<|channel>thought", "<channel|>")
ROWS = (THINK, MAGISTRAL, GPT_OSS, COHERE, GEMMA4)
REASONING_FORMATS = {one.name: one for one in ROWS}
REASONING_PARSERS = REASONING_FORMATS | {alias: one for one in ROWS for alias in one.aliases}
