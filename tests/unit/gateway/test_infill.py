"""Prompts that have a suffix: the format follows from the vocabulary."""

from __future__ import annotations

import json

import pytest

from gateway_svc.http.openai.bodies import completion_generation, infill_prompt, with_suffix
from svc_common.errors import InvalidRequestError

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (QWEN, "<|fim_prefix|>a<|fim_suffix|>{prefix}<|fim_middle|>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]{prefix}[PREFIX]a"),
        (QWEN[:2], None),
    ],
)
def test_the_vocabulary_decides_the_format(tokens: tuple[str, ...], prompt: str | None) -> None:
    assert infill_prompt("a", "{prefix}", tokens.__contains__) == prompt


def test_all_prompts_of_a_body_get_the_suffix() -> None:
    asked = completion_generation(json.dumps({"prompt": ["a", "b"], "suffix": "c"}).encode())
    found = with_suffix(asked, QWEN.__contains__)
    assert [request.prompt.text for request in found.requests] == [
        f"<|fim_prefix|>{prefix}<|fim_suffix|>c<|fim_middle|>" for prefix in "ab"
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a"}, "no tokens for infilling"),
        ({"prompt": [5]}, "not a text"),
        ({"prompt": "a", "echo": True}, "echo"),
    ],
)
def test_a_suffix_that_cannot_be_used_is_refused(body: dict[str, object], words: str) -> None:
    asked = completion_generation(json.dumps({**body, "suffix": "c"}).encode())
    with pytest.raises(InvalidRequestError, match=words):
        with_suffix(asked, ().__contains__)
