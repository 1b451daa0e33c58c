"""`quire compare A B`: the same requests with the same noise on two models (docs/compare.md).

Both answer each request. Where the answers differ, each model also scores the output of the other one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from quire_cli.connection import CONNECT_TIMEOUT_S, tls_option
from quire_cli.output import complain, count, describe, to_json
from quire_client.aio import AsyncClient
from quire_client.errors import QuireError
from quire_client.requests.generate import CHAT
from quire_client.types import Sample, TokenLogprob

from quire_analysis.differences import Difference, first_difference, path_of, score_summary, summary_of
from quire_analysis.report import report_page
from quire_analysis.requests_file import AnalysisError, StoredRequest, read_requests

EXIT_DIFFERS, EXIT_BAD_FILE, EXIT_ERRORS, EXIT_INTERRUPTED = 1, 2, 3, 130
OTHER_NOISE = 1 << 63  # changes a seed into one of independent noise
SHOW_EVERY_S = 0.5
KEPT = ("adapter", "cache_salt")  # options of a request that its scores need

Rule = Callable[[Mapping[str, Any], str], float]  # the score of an answer's text for the line of its request


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two models."""

    client: AsyncClient
    name: str
    num_top: int

    async def answer(self, request: StoredRequest, seed: int) -> Sequence[Sample]:
        """The samples of a request, with the raw log probabilities of their tokens."""
        own: Any = {"model": self.name, "seed": seed, "logprobs": self.num_top, "logprobs_mode": "raw"}
        return (await self.client.generate(**request.input, **{**request.options, **own})).samples

    async def scores(self, request: StoredRequest, output: Sequence[int]) -> Sequence[TokenLogprob]:
        """The raw log probabilities of an output after the prompt as this model reads it."""
        if not output:
            return ()
        given = request.options
        prompt = request.input.get("token_ids", request.input.get("prompt"))
        if prompt is None or isinstance(prompt, str):
            chat: Any = {name: given[name] for name in CHAT if name in given}
            prompt = (await self.client.tokenize(**request.input, model=self.name, **chat)).token_ids
        tokens = [*prompt[-given.get("truncate_prompt_tokens", 0) :], *output]
        result = await self.client.generate(
            token_ids=tokens, model=self.name, max_tokens=0, prompt_logprobs=self.num_top, logprobs_mode="raw",
            num_forced_tokens=len(output), **{name: given[name] for name in KEPT if name in given},
        )  # fmt: skip
        return cast(Sequence[TokenLogprob], result.prompt_logprobs[-len(output) :])


@dataclass(slots=True)
class Comparison:
    """All results so far."""

    a: Side
    b: Side
    rule: Rule | None
    first_seed: int
    num_done: int = 0  # requests
    found: list[Difference] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)  # by name of the request
    same_noise: list[tuple[float, float]] = field(default_factory=list)  # scores of A and B
    other_noise: list[tuple[float, float]] = field(default_factory=list)

    async def add(self, requests: Iterable[tuple[int, StoredRequest]]) -> None:
        """Compare the answers of requests, one after the other. Errors are results."""
        for number, request in requests:
            try:
                await self._add(number, request)
            except AnalysisError as error:
                self.errors[request.name] = str(error)
            except QuireError as error:
                self.errors[request.name] = describe(error)
            self.num_done += 1

    async def _add(self, number: int, request: StoredRequest) -> None:
        seed = request.options.get("seed", self.first_seed + number)
        asked = [(self.a, seed), (self.b, seed), (self.b, seed ^ OTHER_NOISE)][: 3 if self.rule else 2]
        answers = await asyncio.gather(*(side.answer(request, of) for side, of in asked))
        scores = [[self._score(request, sample) for sample in samples] for samples in answers if self.rule]
        pairs = zip(*answers[:2], strict=True)
        self.found += [await self._difference(number, request, a, b) for a, b in pairs]
        if self.rule:
            self.same_noise += zip(scores[0], scores[1], strict=True)
            self.other_noise += zip(scores[0], scores[2], strict=True)

    async def _difference(self, number: int, request: StoredRequest, a: Sample, b: Sample) -> Difference:
        first, scores = first_difference(a, b), (b.logprobs, a.logprobs)
        is_equal = first is None and a.finish_reason is b.finish_reason
        if first is not None:
            asked = self.b.scores(request, a.token_ids), self.a.scores(request, b.token_ids)
            scores = cast(Any, await asyncio.gather(*asked))
        is_identical = is_equal and a.logprobs == b.logprobs
        paths = () if is_identical else tuple(map(path_of, (a, b), scores, (first, first)))
        return Difference(
            number, request.name, a.index, (len(a.token_ids), len(b.token_ids)), first, is_equal=is_equal, paths=paths
        )

    def _score(self, request: StoredRequest, sample: Sample) -> float:
        try:
            return float(cast(Rule, self.rule)(request.line, sample.text))
        except Exception as error:
            raise AnalysisError(f"the rule of --score failed: {type(error).__name__}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The whole report."""
        self.found.sort(key=lambda one: (one.number, one.index))
        scores = score_summary(self.same_noise, self.other_noise) if self.same_noise else {}
        summary = summary_of(self.found) | scores | {"num_errors": len(self.errors)}
        return {"a": self.a.name, "b": self.b.name, "summary": summary, "errors": self.errors, "answers": self.found}


def run(args: argparse.Namespace) -> int:
    """Exit code: 0; 1 for more differing answers than --max-differing; 2 for a bad file; 3 if requests have errors."""
    code, made = 0, list[Comparison]()
    try:
        requests, rule = read_requests(args.requests), args.score and _rule_of(args.score)
        asyncio.run(_compare(args, requests, rule, made))
    except AnalysisError as error:
        complain(str(error))
        return EXIT_BAD_FILE
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    written = _write_report(args, made[0]) if made else 0
    return code or written


def _write_report(args: argparse.Namespace, comparison: Comparison) -> int:
    """Write what was compared, and print the summary. Returns the exit code."""
    report = comparison.to_dict()
    Path(f"{args.output}.json").write_text(to_json(report) + "\n", "utf-8")
    Path(f"{args.output}.html").write_text(report_page(report, comparison.found), "utf-8")
    print(to_json(report["summary"]))
    if comparison.errors:
        name, words = next(iter(comparison.errors.items()))
        complain(f"{count(len(comparison.errors), 'request')} failed; the first is {name}: {words}")
        return EXIT_ERRORS
    is_above = args.max_differing is not None and report["summary"]["num_differing"] > args.max_differing
    return EXIT_DIFFERS if is_above else 0


def _rule_of(path: Any) -> Rule:
    try:
        return cast(Rule, runpy.run_path(path)["score"])
    except Exception as error:
        words = "has no function score(line, text)"
        raise AnalysisError(f"--score {path} {words}: {type(error).__name__}: {error}") from error


async def _compare(
    args: argparse.Namespace, requests: Sequence[StoredRequest], rule: Rule | None, made: list[Comparison]
) -> None:
    """Compare the answers to all requests. `made` gets the comparison when it begins."""
    async with contextlib.AsyncExitStack() as stack:
        sides: list[Side] = []
        for name, gateway in ((args.a, args.gateway_a), (args.b, args.gateway_b or args.gateway_a)):
            limits = {} if args.timeout_s is None else {"timeout_s": args.timeout_s}
            connecting = AsyncClient.connect(
                gateway or args.target, tls=tls_option(args), api_key=args.api_key, connect_timeout_s=CONNECT_TIMEOUT_S,
                **limits,
            )  # fmt: skip
            sides.append(Side(await stack.enter_async_context(await connecting), name, args.top))
        sizes = [(await side.client.model(side.name)).vocab_size for side in sides]
        if sizes[0] != sizes[1]:
            raise AnalysisError(f"the vocabularies have {sizes[0]} and {sizes[1]} tokens; both must be the same")
        made.append(comparison := Comparison(sides[0], sides[1], rule, args.seed))
        progress = asyncio.create_task(_show_progress(comparison, len(requests)))
        left = iter(enumerate(requests))
        async with asyncio.TaskGroup() as group:
            for _ in range(args.concurrency):
                group.create_task(comparison.add(left))
        progress.cancel()


async def _show_progress(comparison: Comparison, num_requests: int) -> None:
    while sys.stderr.isatty():
        differing = sum(not one.is_equal for one in comparison.found)
        print(f"\r\x1b[K{comparison.num_done}/{num_requests}, {differing} differ", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(SHOW_EVERY_S)
