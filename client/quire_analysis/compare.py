"""`quire compare A B`: the same requests with the same noise on two models (docs/compare.md).

Both answer each request. Where the answers differ, each model also scores the output of the other one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from quire_cli.connection import tls_option
from quire_cli.output import complain, count, describe, to_json
from quire_client.aio import AsyncClient
from quire_client.errors import InvalidRequest, QuireError
from quire_client.requests.generate import CHAT, generate_request
from quire_client.types import Sample, TokenLogprob

from quire_analysis.differences import Difference, first_difference, path_of, report_page, scores_of, summary_of

EXIT_DIFFERS, EXIT_BAD_FILE, EXIT_ERRORS, EXIT_INTERRUPTED = 1, 2, 3, 130
OTHER_NOISE = 1 << 63  # changes a seed into one of independent noise
SHOW_EVERY_S = 0.5
TIMEOUT_S = 600.0
INPUTS = ("prompt", "token_ids", "messages")
OWN = {"model", "logprobs", "prompt_logprobs", "logprobs_mode", "receipt", "resumable", "request_id", "stream"}
KEPT = ("adapter", "cache_salt")  # options of a request that its scores need

Rule = Callable[[Mapping[str, Any], str], float]  # the score of an answer's text for the line of its request


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request of a file."""

    name: str  # custom_id, else the number of its line
    line: Mapping[str, Any]
    input: Mapping[str, Any]  # one of INPUTS
    options: Mapping[str, Any]  # options of the SDK


def read_requests(path: Path) -> list[StoredRequest]:
    """All requests of a file. Raises InvalidRequest for the first line that is none, and OSError."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found += [_request_of(json.loads(line), str(number))] if line.strip() else []
        except (ValueError, TypeError, RecursionError, QuireError) as error:
            raise InvalidRequest(f"{path}, line {number}: {error}") from None
    if not found:
        raise InvalidRequest(f"{path} has no requests")
    return found


def _request_of(line: Any, name: str) -> StoredRequest:
    given = isinstance(line, dict) and (line.get("request") or line.get("body"))
    if not isinstance(given, dict):
        raise ValueError('must be an object with "request" (options of the SDK) or "body" (a line of quire batch)')
    options = {key: value for key, value in given.items() if key not in OWN}
    if "max_completion_tokens" in options:
        options["max_tokens"] = options.pop("max_completion_tokens")
    asked = {key: options.pop(key) for key in INPUTS if key in options}
    if "session_id" in options:
        raise ValueError("session_id is set; send the whole prompt, because a session is that of one model")
    generate_request(asked.get("prompt"), asked.get("token_ids"), asked.get("messages"), options)  # checks them
    return StoredRequest(str(line.get("custom_id", name)), line, asked, options)


@dataclass(frozen=True, slots=True)
class ComparedModel:
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
class ModelComparison:
    """All results so far."""

    a: ComparedModel
    b: ComparedModel
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
            except QuireError as error:
                self.errors[request.name] = describe(error)
            except Exception as error:  # the rule of --score is a program of the user
                self.errors[request.name] = f"{type(error).__name__}: {error}"
            self.num_done += 1

    async def _add(self, number: int, request: StoredRequest) -> None:
        seed = request.options.get("seed", self.first_seed + number)
        asked = [(self.a, seed), (self.b, seed), (self.b, seed ^ OTHER_NOISE)][: 3 if self.rule else 2]
        answers = await asyncio.gather(*(side.answer(request, of) for side, of in asked))
        rule = self.rule
        scores = [[float(rule(request.line, one.text)) for one in samples] for samples in answers if rule]
        pairs = zip(*answers[:2], strict=True)
        self.found += [await self._difference(number, request, a, b) for a, b in pairs]
        if rule:
            self.same_noise += zip(scores[0], scores[1], strict=True)
            self.other_noise += zip(scores[0], scores[2], strict=True)

    async def _difference(self, number: int, request: StoredRequest, a: Sample, b: Sample) -> Difference:
        first, scores = first_difference(a.token_ids, b.token_ids), (b.logprobs, a.logprobs)
        is_equal = first is None and a.finish_reason is b.finish_reason
        if first is not None:
            asked = self.b.scores(request, a.token_ids), self.a.scores(request, b.token_ids)
            scores = cast(Any, await asyncio.gather(*asked))
        is_identical = is_equal and a.logprobs == b.logprobs
        paths = () if is_identical else tuple(map(path_of, (a, b), scores, (first, first)))
        return Difference(
            number, request.name, a.index, (len(a.token_ids), len(b.token_ids)), first, is_equal=is_equal, paths=paths
        )

    def to_dict(self) -> dict[str, Any]:
        """The whole report."""
        self.found.sort(key=lambda one: (one.number, one.index))
        scores = scores_of(self.same_noise, self.other_noise) if self.same_noise else {}
        summary = summary_of(self.found) | scores | {"num_errors": len(self.errors)}
        return {"a": self.a.name, "b": self.b.name, "summary": summary, "errors": self.errors, "answers": self.found}


def run(args: argparse.Namespace) -> int:
    """Exit code: 0; 1 for more differing answers than --max-differing; 2 if it cannot begin; 3 for failed requests."""
    code, made = 0, list[ModelComparison]()
    try:
        if not Path(args.output).parent.is_dir():
            raise InvalidRequest(f"--output is {args.output}, but its folder does not exist")
        requests, rule = read_requests(args.requests), _rule_of(args.score) if args.score else None
        asyncio.run(_compare(args, requests, rule, made))
    except (QuireError, OSError) as error:
        complain(str(error))
        return EXIT_BAD_FILE
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    written = _write_report(args, made[0]) if made else 0
    return code or written


def _write_report(args: argparse.Namespace, comparison: ModelComparison) -> int:
    """Write what was compared, and print the summary. Returns the exit code."""
    report = comparison.to_dict()
    Path(f"{args.output}.json").write_text(to_json(report) + "\n", "utf-8")
    Path(f"{args.output}.html").write_text(report_page(report, comparison.found), "utf-8")
    print(to_json(report["summary"]))
    if comparison.errors:
        complain(f"{count(len(comparison.errors), 'request')} failed; {args.output}.json has the errors")
        return EXIT_ERRORS
    is_above = args.max_differing is not None and report["summary"]["num_differing"] > args.max_differing
    return EXIT_DIFFERS if is_above else 0


def _rule_of(path: str) -> Rule:
    try:
        return cast(Rule, runpy.run_path(path)["score"])
    except Exception as error:
        words = f"has no function score(line, text): {type(error).__name__}: {error}"
        raise InvalidRequest(f"--score {path} {words}") from error


async def _compare(
    args: argparse.Namespace, requests: Sequence[StoredRequest], rule: Rule | None, made: list[ModelComparison]
) -> None:
    """Compare the answers to all requests. `made` gets the comparison when it begins."""
    async with contextlib.AsyncExitStack() as stack:
        sides: list[ComparedModel] = []
        for name, gateway in ((args.a, args.gateway_a), (args.b, args.gateway_b or args.gateway_a)):
            options: Any = {"tls": tls_option(args), "api_key": args.api_key, "timeout_s": args.timeout_s or TIMEOUT_S}
            client = await stack.enter_async_context(await AsyncClient.connect(gateway or args.target, **options))
            sides.append(ComparedModel(client, name, args.top))
        sizes = [(await side.client.model(side.name)).vocab_size for side in sides]
        if sizes[0] != sizes[1]:
            raise InvalidRequest(f"the vocabularies have {sizes[0]} and {sizes[1]} tokens; both must be the same")
        made.append(comparison := ModelComparison(sides[0], sides[1], rule, args.seed))
        progress = asyncio.create_task(_show_progress(comparison, len(requests)))
        left = iter(enumerate(requests))
        async with asyncio.TaskGroup() as group:
            for _ in range(args.concurrency):
                group.create_task(comparison.add(left))
        progress.cancel()


async def _show_progress(comparison: ModelComparison, num_requests: int) -> None:
    while sys.stderr.isatty():
        differing = sum(not one.is_equal for one in comparison.found)
        print(f"\r\x1b[K{comparison.num_done}/{num_requests}, {differing} differ", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(SHOW_EVERY_S)
