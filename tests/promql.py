"""The subset of PromQL that the dashboard and the autoscaling use, evaluated over two scrapes without Prometheus.

    history = History(older, newer, seconds=15)
    history.evaluate('sum(rate(quire_steps_total{namespace="quire"}[5m]))')   # {(): 12.5}

A vector maps labels (sorted pairs, without the name) to a value; a scalar is a float. `rate` is the increase per second
between the two scrapes, for any range. Unsupported syntax raises NotImplementedError.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]
Samples = dict[str, Vector]  # by name

AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "avg": lambda values: sum(values) / len(values),
    "count": len,
}
ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else math.nan,
}
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
}

# The vectors of these operators have equal label names here, or none (`on()`).
SETS: dict[str, Callable[[Vector, Vector], Vector]] = {
    "and": lambda left, right: {labels: value for labels, value in left.items() if labels in right},
    "or": lambda left, right: right | left,
    "unless": lambda left, right: {labels: value for labels, value in left.items() if labels not in right},
}


def read_scrape(text: str, **target: str) -> Samples:
    """The samples of one /metrics page, with the labels that Prometheus adds for the target."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted({**sample.labels, **target}.items()))
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


def merge(scrapes: Iterable[Samples]) -> Samples:
    """The samples of all targets."""
    merged: Samples = {}
    for scrape in scrapes:
        for name, vector in scrape.items():
            merged.setdefault(name, {}).update(vector)
    return merged


def names_in(expression: str) -> set[str]:
    """The names of the metrics in an expression."""
    return {selector.name for selector in _selectors(promql.parse(expression))}


def _selectors(node: Any) -> Iterator[Any]:
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if hasattr(node, name):
            yield from _selectors(getattr(node, name))
    for argument in getattr(node, "args", ()):
        yield from _selectors(argument)


@dataclass(frozen=True)
class History:
    """Two scrapes of the same targets, `seconds` apart."""

    older: Samples
    newer: Samples
    seconds: float

    def evaluate(self, expression: str) -> Vector | float:
        return self._value(promql.parse(expression))

    def _value(self, node: Any) -> Any:
        if isinstance(node, promql.NumberLiteral):
            return float(node.val)
        if isinstance(node, promql.ParenExpr):
            return self._value(node.expr)
        if isinstance(node, promql.VectorSelector):
            return _select(self.newer, node)
        if isinstance(node, promql.AggregateExpr):
            return _aggregate(node, self._value(node.expr))
        if isinstance(node, promql.BinaryExpr):
            return _combine(str(node.op), self._value(node.lhs), self._value(node.rhs))
        if isinstance(node, promql.Call):
            return self._call(node.func.name, node.args)
        raise NotImplementedError(f"{node}: {type(node).__name__}")

    def _call(self, name: str, arguments: list[Any]) -> Vector:
        if name in ("rate", "increase"):
            rates = self._rate(arguments[0].vector_selector)
            return rates if name == "rate" else {labels: rate * self.seconds for labels, rate in rates.items()}
        if name == "vector":
            return {(): self._value(arguments[0])}
        if name == "absent":
            return _absent(arguments[0], self._value(arguments[0]))
        values = [self._value(argument) for argument in arguments]
        if name in ("clamp_min", "clamp_max"):
            bound = max if name == "clamp_min" else min
            return {labels: bound(value, values[1]) for labels, value in values[0].items()}
        if name == "histogram_quantile":
            return _histogram_quantile(*values)
        raise NotImplementedError(f"the function {name}")

    def _rate(self, selector: Any) -> Vector:
        before = _select(self.older, selector)
        after = _select(self.newer, selector)
        return {labels: max(0.0, value - before.get(labels, 0.0)) / self.seconds for labels, value in after.items()}


def _select(samples: Samples, selector: Any) -> Vector:
    matchers = selector.matchers.matchers
    found = samples.get(selector.name, {})
    return {labels: value for labels, value in found.items() if all(_fits(m, dict(labels)) for m in matchers)}


def _absent(selector: Any, found: Vector) -> Vector:
    """absent(): one sample if the selector finds none, with the labels of its equality matchers."""
    wanted = [(m.name, m.value) for m in selector.matchers.matchers if m.op == promql.MatchOp.Equal]
    return {} if found else {tuple(sorted(wanted)): 1.0}


def _fits(matcher: Any, labels: dict[str, str]) -> bool:
    have = labels.get(matcher.name, "")
    is_regex = matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe)
    is_same = bool(re.fullmatch(matcher.value, have)) if is_regex else have == matcher.value
    return is_same == (matcher.op in (promql.MatchOp.Equal, promql.MatchOp.Re))


def _aggregate(node: Any, vector: Vector) -> Vector:
    kept = () if node.modifier is None else tuple(node.modifier.labels)
    if node.modifier is not None and node.modifier.type != promql.AggModifierType.By:
        raise NotImplementedError("without (...)")
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        groups.setdefault(tuple(pair for pair in labels if pair[0] in kept), []).append(value)
    return {labels: float(AGGREGATES[str(node.op)](values)) for labels, values in groups.items()}


def _combine(op: str, left: Any, right: Any) -> Any:
    if isinstance(left, float) and isinstance(right, float):
        return ARITHMETIC[op](left, right)
    if isinstance(left, float):
        return {labels: ARITHMETIC[op](left, value) for labels, value in right.items()}
    if op in SETS:
        return SETS[op](left, right)
    pairs = {labels: right if isinstance(right, float) else right.get(labels) for labels in left}
    if op in COMPARISONS:
        return {k: left[k] for k, other in pairs.items() if other is not None and COMPARISONS[op](left[k], other)}
    return {k: ARITHMETIC[op](left[k], other) for k, other in pairs.items() if other is not None}


def _histogram_quantile(fraction: float, vector: Vector) -> Vector:
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in vector.items():
        rest = tuple(pair for pair in labels if pair[0] != "le")
        groups.setdefault(rest, []).append((float(dict(labels)["le"]), count))
    return {labels: _quantile(fraction, sorted(buckets)) for labels, buckets in groups.items()}


def _quantile(fraction: float, buckets: list[tuple[float, float]]) -> float:
    """Prometheus' rule: linear interpolation within a bucket; the highest finite bound for values above it."""
    rank = fraction * buckets[-1][1]
    if not buckets[-1][1]:
        return math.nan
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / max(count - below, 1e-12)
        low, below = bound, count
    return low
