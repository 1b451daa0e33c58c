"""Prompts of models that fill the gap between two texts, from the special tokens of their vocabulary. Pure."""

from __future__ import annotations

from collections.abc import Callable

PREFIX, SUFFIX = "{prefix}", "{suffix}"
FORMATS = (  # special tokens and the texts between them
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),  # Codestral
)


def infill_prompt(prefix: str, suffix: str, has_token: Callable[[str], bool]) -> str | None:
    """The prompt whose answer stands between prefix and suffix; None if the vocabulary has no tokens for it."""
    given = {PREFIX: prefix, SUFFIX: suffix}
    for format in FORMATS:
        if all(has_token(part) for part in format if part not in given):
            return "".join(given.get(part, part) for part in format)
    return None
