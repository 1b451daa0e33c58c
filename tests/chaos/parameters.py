"""The request parameters that the workload draws, and how their values are drawn.

A parameter is drawn as soon as the table of request fields says that it is served.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from request_fields.fields import FIELDS

# Long enough that a fault can occur while the answer is streamed.
LONG_SCHEMA = {
    "type": "array",
    "minItems": 12,
    "maxItems": 16,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 4, "maxLength": 12}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
}
LONG_REGEX = r"([a-z]{2,9} ){30,40}end"
LONG_GRAMMAR = 'start: line{20,24}\nline: WORD "=" NUMBER "\\n"\nWORD: /[a-z]{3,8}/\nNUMBER: /[0-9]{1,4}/\n'
ADAPTER = "lora"
CHOICES = tuple(f"{word} {'and so on ' * 20}" for word in ("alpha", "beta", "gamma"))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One keyword option of the SDK. `draw`: (random numbers, vocabulary size) to the options that use it."""

    name: str
    draw: Callable[[random.Random, int], dict[str, Any]]
    is_alone: bool = False  # combines with max_tokens only


def _ids(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    return sorted(rng.sample(range(3, vocab_size), count))  # the first three are special


PARAMETERS = (
    Parameter("top_p", lambda rng, _: {"top_p": rng.uniform(0.3, 0.95)}),
    Parameter("top_k", lambda rng, _: {"top_k": rng.randint(2, 100)}),
    Parameter("min_p", lambda rng, _: {"min_p": rng.uniform(0.01, 0.3)}),
    Parameter("top_a", lambda rng, _: {"top_a": rng.uniform(0.01, 1)}),
    Parameter("min_tokens", lambda rng, v: {"min_tokens": 40, "stop_token_ids": _ids(rng, v, 64)}),
    Parameter("stop_token_ids", lambda rng, v: {"stop_token_ids": _ids(rng, v, 2)}),
    Parameter("repetition_penalty", lambda rng, _: {"repetition_penalty": rng.uniform(0.8, 1.6)}),
    Parameter("frequency_penalty", lambda rng, _: {"frequency_penalty": rng.uniform(-0.5, 1.5)}),
    Parameter("presence_penalty", lambda rng, _: {"presence_penalty": rng.uniform(-0.5, 1.5)}),
    Parameter("logit_bias", lambda rng, v: {"logit_bias": {i: rng.uniform(-8.0, 4.0) for i in _ids(rng, v, 12)}}),
    Parameter("allowed_token_ids", lambda rng, v: {"allowed_token_ids": _ids(rng, v, v // 4)}),
    Parameter("banned_token_ids", lambda rng, v: {"banned_token_ids": _ids(rng, v, 100)}),
    Parameter("bad_words", lambda rng, _: {"bad_words": rng.sample(("the", "return", "string", "a new", "is"), 3)}),
    Parameter("logprobs", lambda rng, _: {"logprobs": rng.randint(0, 5)}),
    Parameter("logprobs_mode", lambda rng, _: {"logprobs_mode": rng.choice(("raw", "processed")), "logprobs": 2}),
    Parameter("logits_digests", lambda rng, _: {"logits_digests": True, "logprobs": 0}),
    Parameter("prompt_logprobs", lambda rng, _: {"prompt_logprobs": rng.randint(0, 3)}),
    Parameter("json_schema", lambda rng, _: {"json_schema": LONG_SCHEMA, "ignore_eos": False}),
    Parameter("regex", lambda rng, _: {"regex": LONG_REGEX, "ignore_eos": False}),
    Parameter("grammar", lambda rng, _: {"grammar": LONG_GRAMMAR, "ignore_eos": False}),
    Parameter("choice", lambda rng, _: {"choice": list(CHOICES), "ignore_eos": False}),
    Parameter("best_of", lambda rng, _: {"best_of": 3, "n": 2, "temperature": 1.0, "seed": rng.getrandbits(64)}, True),
    Parameter("beam_width", lambda rng, _: {"beam_width": 3, "n": 2}, True),
    Parameter("length_penalty", lambda rng, _: {"beam_width": 2, "length_penalty": rng.uniform(-1, 2)}, True),
    Parameter("early_stopping", lambda rng, _: {"beam_width": 2, "early_stopping": rng.choice((True, "never"))}, True),
    Parameter("truncate_prompt_tokens", lambda rng, _: {"truncate_prompt_tokens": rng.randint(8, 40)}),
    Parameter("adapter", lambda rng, _: {"adapter": ADAPTER}),
    Parameter("skip_special_tokens", lambda rng, _: {"skip_special_tokens": False}),
    Parameter("repetition_detection", lambda *_: {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}}),
    Parameter(
        "thinking_token_budget",
        lambda rng, v: {
            "thinking_token_budget": rng.randint(0, 40),
            "thinking_end_ids": _ids(rng, v, 2),
            "thinking_last_ids": _ids(rng, v, 3),
        },
    ),
)
# The other options, with the reason why the workload does not draw them from the table above.
NOT_DRAWN = {
    "session_id": "tests/processes/test_sessions.py kills workers between turns",
    "session_sample": "of a request with session_id", "conversation": "changes no token",
    "temperature": "drawn for every request by workload.py", "seed": "drawn for every sampled request by workload.py",
    "n": "drawn for every sampled request by workload.py", "max_tokens": "drawn for every request by workload.py",
    "ignore_eos": "set in every request by workload.py, so that answers are long",
    "stop": "some requests occur a second time with a stop string of their answer (workload.py)",
    "include_stop_in_output": "keeps the match of a stop string; the expected text of these requests is cut before it",
    "json_object": "the same code as json_schema, but answers may end before a fault",
    "structural_tag": "becomes a grammar in the gateway", "parse_chat": "set by the SDK for every chat",
    "send_text": "the verdict compares the text", "send_token_ids": "the verdict compares the token ids",
    "priority": "changes no token", "images": "the model of this workload takes none", "tenant_id": "changes no token",
    "cache_salt": "changes no token; set for some streams by streams.py",
    "determinism": "changes no token: a request is accepted or refused", "resumable": "changes no token",
    "receipt": "tests/processes/test_receipts.py checks receipts by computing the answers again",
    "num_forced_tokens": "needs requests whose prompt ends with the output of another (test_rollouts.py)",
    **dict.fromkeys(("speculative", "draft_of", "draft_token_ids", "draft_text"), "changes no token"),
    **dict.fromkeys(
        ("thinking_start_ids", "thinking_end_ids", "thinking_last_ids", "thinking_repeats"),
        "of a request with thinking_token_budget; tests/processes/test_thinking.py kills a worker under it",
    ),
}  # fmt: skip
GRAMMARS = {"json_schema", "regex", "grammar", "choice"}  # a request has at most one of them
CLASHES = {"stop_token_ids": {"min_tokens"}, "min_tokens": {"stop_token_ids", *GRAMMARS}, "bad_words": GRAMMARS}
BANS = {"allowed_token_ids", "banned_token_ids", "stop_token_ids"}  # a grammar may require a token that these ban


def served_parameters() -> tuple[Parameter, ...]:
    """The parameters that this version serves."""
    served = {field.option for field in FIELDS}
    return tuple(parameter for parameter in PARAMETERS if parameter.name in served)


def fit_together(name: str, others: Iterable[str]) -> bool:
    """Whether a request may have this parameter together with the others."""
    rivals = set(CLASHES.get(name, ())) | (GRAMMARS | BANS if name in GRAMMARS else set())
    rivals |= GRAMMARS if name in BANS else set()
    return not rivals & set(others)
