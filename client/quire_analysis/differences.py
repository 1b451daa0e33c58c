"""The difference of two answers, numbers over many, and the page that shows them. No I/O.

A *path* is the output of one model; the other model scores it as forced tokens. Log probabilities are raw: the natural
logarithms of the softmax of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from statistics import fmean, variance
from typing import Any

from quire_client.types import Sample, TokenLogprob

NUM_AROUND = 12  # tokens of text on each side of a difference
MAX_SHOWN = 200  # answers on the page
BAR, HEIGHT = 4, 40  # pixels of a bar
STYLE = "body { max-width: 60em; margin: 2em auto } pre { white-space: pre-wrap } rect { fill: #b33 }"
LEAST_REST = 1e-7  # a smaller difference of 1 and a sum of float32 numbers means nothing


@dataclass(frozen=True, slots=True)
class Path:
    """The output of one model under both. Each list has a number per output token."""

    token_ids: Sequence[int]
    finish_reason: str
    around: str  # text around the first other token
    logprobs: Sequence[float]  # under the model that sampled it
    other_logprobs: Sequence[float]  # under the other model
    kl_at_least: Sequence[float]
    log_ratio: float  # sum of logprobs - sum of other_logprobs


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of one sample of a request."""

    number: int  # place of the request in its file, from 0
    name: str
    index: int  # index of the sample
    num_tokens: tuple[int, int]
    first: int | None  # output position of the first other token; None if all are equal
    is_equal: bool  # tokens and finish reasons are
    paths: tuple[Path, ...]  # the output of A, that of B; empty if all log probabilities are equal


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The index of the first other token; None if all are equal."""
    return next((i for i, (mine, other) in enumerate(zip_longest(a, b)) if mine != other), None)


def path_of(sample: Sample, other: Sequence[TokenLogprob], first: int | None) -> Path:
    """The output of a sample, with the log probabilities of another model."""
    around = slice(0) if first is None else slice(max(0, first - NUM_AROUND), first + NUM_AROUND)
    ours, theirs = [entry.logprob for entry in sample.logprobs], [entry.logprob for entry in other]
    return Path(
        sample.token_ids,
        sample.finish_reason.value,
        b"".join(entry.token for entry in sample.logprobs[around]).decode(errors="replace"),
        ours,
        theirs,
        [kl_at_least(p, q) for p, q in zip(sample.logprobs, other, strict=True)],
        math.fsum(ours) - math.fsum(theirs),
    )


def kl_at_least(p: TokenLogprob, q: TokenLogprob) -> float:
    """A lower bound of KL(p || q) at one position: the KL divergence of both distributions over the tokens that both
    list, and one class of all other tokens. It is exact where the lists have the whole vocabulary.
    """
    ours, theirs = _listed(p), _listed(q)
    common = [token for token in ours.keys() & theirs.keys() if min(ours[token], theirs[token]) > -math.inf]
    kl = math.fsum(math.exp(ours[token]) * (ours[token] - theirs[token]) for token in common)
    rest, other_rest = (1 - math.fsum(math.exp(known[token]) for token in common) for known in (ours, theirs))
    if rest > LEAST_REST:
        kl += rest * math.log(rest / max(other_rest, LEAST_REST))
    return max(0.0, kl)


def _listed(entry: TokenLogprob) -> dict[int | None, float]:
    return {top.token_id: top.logprob for top in entry.top} | {entry.token_id: entry.logprob}


def summary_of(found: Sequence[Difference]) -> dict[str, Any]:
    """Numbers over all answers. `a`: over the outputs of A, per token; answers without paths add zeros."""
    numbers: dict[str, Any] = {
        "num_answers": len(found),
        "num_differing": sum(not one.is_equal for one in found),
        "num_identical": sum(not one.paths for one in found),
        "agreement": fmean(one.is_equal for one in found) if found else None,
    }
    for side, name in enumerate("ab"):
        paths = [one.paths[side] for one in found if one.paths]
        num_tokens = sum(one.num_tokens[side] for one in found)
        numbers[name] = {
            "num_tokens": num_tokens,
            "mean_log_ratio": math.fsum(path.log_ratio for path in paths) / max(1, num_tokens),
            "mean_kl_at_least": math.fsum(kl for path in paths for kl in path.kl_at_least) / max(1, num_tokens),
        }
    return numbers


def scores_of(same_noise: Sequence[tuple[float, float]], other_noise: Sequence[tuple[float, float]]) -> Any:
    """The rate at which B wins and its mean gain, each with the variance of the estimate, from the scores of pairs of
    answers, A first. A tie is half a win.
    """
    found: dict[str, Any] = {}
    for name, pairs in (("same_noise", same_noise), ("other_noise", other_noise)):
        wins = [1.0 if b > a else 0.5 if b == a else 0.0 for a, b in pairs]
        for key, values in (("win_rate", wins), ("gain", [b - a for a, b in pairs])):
            found[f"{key}_{name}"] = fmean(values)
            found[f"{key}_variance_{name}"] = variance(values) / len(values) if len(values) > 1 else None
    return found


def report_page(report: Mapping[str, Any], found: Sequence[Difference]) -> str:
    """The report as one HTML page that loads nothing. Answers with other tokens come first."""
    differing = sorted(
        (one for one in found if one.paths), key=lambda one: (one.is_equal, -sum(abs(p.log_ratio) for p in one.paths))
    )
    rows = "".join(f"<tr><td>{name}<td>{escape(str(value))}" for name, value in report["summary"].items())
    errors = "".join(f"<li>{escape(name)}: {escape(words)}" for name, words in report["errors"].items())
    shown = "".join(
        f"<h3>{escape(one.name)}, sample {one.index}: first other token at {one.first}</h3>"
        + "".join(map(_path, "AB", one.paths))
        for one in differing[:MAX_SHOWN]
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>quire compare</title><style>{STYLE}</style>'
        f"<h1>A: {escape(report['a'])}, B: {escape(report['b'])}</h1><table>{rows}</table><ul>{errors}</ul>"
        f"<h2>{len(differing)} answers are not identical</h2>{shown}</html>\n"
    )


def _path(name: str, path: Path) -> str:
    """One output: the text around the difference, its log ratio, and its KL divergence as a bar per token."""
    most = max(path.kl_at_least, default=0.0) or 1.0
    bars = "".join(
        f'<rect x="{BAR * i}" width="{BAR - 1}" height="{HEIGHT * kl / most:.1f}"/>'
        for i, kl in enumerate(path.kl_at_least)
    )
    words = f"log ratio {path.log_ratio:.6g}; ended by {path.finish_reason}; KL per token up to {most:.3g}"
    size = f'width="{BAR * len(path.kl_at_least)}" height="{HEIGHT}"'
    return f"<pre>{name}: {escape(path.around)}</pre><p>{words}<br><svg {size}>{bars}</svg>"
