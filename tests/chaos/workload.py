"""Seeded requests whose answers do not depend on when or where they are computed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.chaos.parameters import Parameter, fit_together, served_parameters

MIN_TOKENS, MAX_TOKENS = 50, 400
MAX_TOKENS_OF_SEVERAL = 150  # for n > 1, so that these requests take about as long as those with one sample
MAX_PARAMETERS = 4  # without those of _common_options
STOP_CHARS = 6
# A stop string ends a request only after this fraction of its text, so that its output stays long enough.
STOP_AFTER = 0.4

QUESTIONS = (
    "What does os.path.join do?", "What does json.dumps do?", "What is collections.Counter?", "Explain str.split.",
    "What is the csv module for?", "Tell me everything about functools.lru_cache.", "Recite the Zen of Python.",
    "Who are you?",
)  # fmt: skip
TEXTS = ("Return a new", "The module provides", "If the argument is a string,", "Raises ValueError when")
SYSTEM = "You answer questions about Python's standard library in one sentence."


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. Streams with equal requests must get equal answers."""

    number: int
    prompt: dict[str, Any]  # one of token_ids, messages, prompt
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        return int(self.options.get("n", 1))

    @property
    def parameters(self) -> list[str]:
        """The options that change the answer, and the kind of prompt."""
        return [*(name for name in self.options if name not in ("max_tokens", "ignore_eos")), *self.prompt]

    def __str__(self) -> str:
        return f"request {self.number}: {self.prompt | self.options}"


@dataclass(frozen=True, slots=True)
class Answer:
    """One sample, as the client receives it."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[Any, ...] = ((), None, ())  # log probabilities of the tokens, their sum, those of the prompt


def make_requests(
    seed: int, count: int, vocab_size: int, parameters: Sequence[Parameter] | None = None
) -> list[Request]:
    """Greedy and sampled requests with one to three samples. Prompts: tokens (some share a prefix), text, chats.

    `parameters` occur equally often; None: all that are served.
    """
    rng = random.Random(seed)
    prefixes = [_tokens(rng, vocab_size, length) for length in (32, 96, 200)]
    deck = _Deck(rng, served_parameters() if parameters is None else parameters)
    return [
        Request(number, _prompt(rng, prefixes, vocab_size), _options(rng, deck, vocab_size)) for number in range(count)
    ]


class _Deck:
    """Returns each parameter once in random order, then starts again in a new order."""

    def __init__(self, rng: random.Random, parameters: Sequence[Parameter]) -> None:
        self._rng = rng
        self._parameters = list(parameters)
        self._left: list[Parameter] = []

    def deal(self, count: int) -> list[Parameter]:
        """Up to `count` parameters that may be used together."""
        dealt: list[Parameter] = []
        for _ in range(count if self._parameters else 0):
            self._left = self._left or self._rng.sample(self._parameters, len(self._parameters))
            newest = self._left.pop()
            if (newest.is_alone and dealt) or not fit_together(newest.name, [other.name for other in dealt]):
                self._left.insert(0, newest)
                break
            dealt.append(newest)
            if newest.is_alone:
                break
        return dealt


def _prompt(rng: random.Random, prefixes: list[list[int]], vocab_size: int) -> dict[str, Any]:
    kind = rng.choice(("tokens", "tokens", "chat", "text"))
    if kind == "chat":
        return {"messages": [("system", SYSTEM), ("user", rng.choice(QUESTIONS))]}
    if kind == "text":
        return {"prompt": rng.choice(TEXTS)}
    return {"token_ids": rng.choice(prefixes) + _tokens(rng, vocab_size, rng.randint(1, 60))}


def _tokens(rng: random.Random, vocab_size: int, length: int) -> list[int]:
    return [rng.randrange(3, vocab_size) for _ in range(length)]  # the first three are special


def _options(rng: random.Random, deck: _Deck, vocab_size: int) -> dict[str, Any]:
    dealt = deck.deal(rng.randint(0, MAX_PARAMETERS))
    drawn = {name: value for parameter in dealt for name, value in parameter.draw(rng, vocab_size).items()}
    if dealt and dealt[0].is_alone:
        return {"max_tokens": rng.randint(MIN_TOKENS, MAX_TOKENS_OF_SEVERAL), "ignore_eos": True} | drawn
    return _common_options(rng) | drawn


def _common_options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": rng.randint(MIN_TOKENS, MAX_TOKENS), "ignore_eos": True}
    if rng.random() < 0.4:
        return options | {"temperature": 0.0}
    options |= {"temperature": 1.0, "seed": rng.getrandbits(64)}
    num_samples = rng.choice((1, 1, 1, 2, 3))
    if num_samples > 1:
        options |= {"n": num_samples, "max_tokens": rng.randint(MIN_TOKENS, MAX_TOKENS_OF_SEVERAL)}
    return options


def with_stop_string(request: Request, answers: Sequence[Answer], rng: random.Random, number: int) -> Request | None:
    """The same request with a stop string that its answer contains. None if no suitable string is found."""
    text = answers[0].text
    earliest = int(len(text) * STOP_AFTER)
    if (
        request.num_samples > 1
        or request.options.keys() & {"min_tokens", "beam_width", "best_of"}
        or len(answers[0].token_ids) * STOP_AFTER < MIN_TOKENS
    ):
        return None
    for _ in range(10):
        start = rng.randint(earliest, max(earliest, len(text) - 2 * STOP_CHARS))
        stop = text[start : start + STOP_CHARS]
        if stop.strip() and text.find(stop) == start:
            return replace(request, number=number, options=request.options | {"stop": [stop]})
    return None
