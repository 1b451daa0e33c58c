"""Parses the text of one sample into AnswerParts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.v1 import inference_pb2 as pb

from gateway_svc.request.tools import AnswerPlan
from gateway_svc.text.chat_output import AnswerPiece, ItemKind, call_id
from gateway_svc.text.detokenizer import SampleText


class AnswerStream:
    """Parses the text of one sample. `num_reasoning_tokens` counts the tokens of the reasoning and its markers."""

    def __init__(self, plan: AnswerPlan, call_key: str, sample: int) -> None:
        self._parser = plan.new_parser()
        self._call_key = call_key
        self._sample = sample
        self._is_finished = False
        self.num_reasoning_tokens = 0

    def push(self, text: SampleText, ids: Sequence[int]) -> tuple[list[AnswerPiece], int]:
        """Add ids to the text and parse it. Returns the new parts, and how many of the ids belong to the output.

        Tokens are parsed one at a time until the reasoning ends, to count the reasoning tokens.
        """
        parts: list[AnswerPiece] = []
        position = 0
        while position < len(ids) and not self._parser.is_past_reasoning:
            was_reasoning = self._parser.is_reasoning
            released, count = text.read(ids[position : position + 1])
            parts += self._parser.push(released)
            self.num_reasoning_tokens += was_reasoning or self._parser.is_reasoning
            position += 1
            if text.stop is not None:
                return parts, position - 1 + count
        if position < len(ids):
            released, count = text.read(ids[position:])
            parts += self._parser.push(released)
            position += count
        return parts, position

    def finish(self, text: str) -> list[AnswerPiece]:
        """Parse the last text and end the answer. Returns all remaining parts."""
        if self._is_finished:
            return []
        self._is_finished = True
        return self._parser.push(text) + self._parser.finish()

    def add_to(self, chunk: pb.Chunk, parts: Iterable[AnswerPiece]) -> None:
        """Add parts to a chunk; adjacent parts of one item become one."""
        last: pb.AnswerPart | None = None
        for part in parts:
            if last is not None and last.item == part.item:
                _append(last, part.text)
            else:
                last = chunk.parts.add(item=part.item, offset=part.offset)
                self._set_kind(last, part)

    def _set_kind(self, message: pb.AnswerPart, part: AnswerPiece) -> None:
        if part.kind is ItemKind.REASONING:
            message.reasoning = part.text
        elif part.kind is ItemKind.CONTENT:
            message.content = part.text
        else:
            call = message.tool_call
            call.index, call.name, call.arguments = part.call, part.name, part.text
            call.id = call_id(self._call_key, self._sample, part.call)


def _append(message: pb.AnswerPart, text: str) -> None:
    kind = message.WhichOneof("kind")
    if kind == "tool_call":
        message.tool_call.arguments += text
    elif kind == "reasoning":
        message.reasoning += text
    else:
        message.content += text
