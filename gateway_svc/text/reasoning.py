"""Reasoning: text between two markers at the start of an answer. The first marker may be the end of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from gateway_svc.text.answer import AnswerReader, ItemKind, Steps


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning. `aliases`: other names, which vLLM uses."""

    name: str
    models: str
    start: str
    end: str
    aliases: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start, self.end

    def read(self, reader: AnswerReader, *, is_begun: bool, stops: tuple[str, ...] = ()) -> Steps:
        """Read the reasoning, if the answer starts with it. `is_begun`: the prompt ended with the start marker.
        `stops`: markers that also end it, and are not read.
        """
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


THINK = ReasoningFormat(
    "think",
    "Qwen3, DeepSeek R1 and V3.1, GLM-4.5, Kimi K2, MiniMax M2 and others",
    "<think>",
    "</think>",
    ("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "minimax_m2"),
)
MAGISTRAL = ReasoningFormat("magistral", "Magistral, Ministral", "[THINK]", "[/THINK]", ("mistral",))
ROWS = (THINK, MAGISTRAL)
REASONING_FORMATS = {one.name: one for one in ROWS}
REASONING_PARSERS = REASONING_FORMATS | {alias: one for one in ROWS for alias in one.aliases}
