"""The results of a run: as text, and as one JSON object for scripts."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.chaos.cluster import KINDS
from tests.chaos.faults import Strike
from tests.chaos.streams import StreamRecord

TOGETHER = "two at once"
NEARBY_S = 5.0  # faults this close to a bad stream are printed with it
MAX_BAD_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Report:
    """All counts of a run. Times are seconds of one clock; memory is MiB by process."""

    records: Sequence[StreamRecord]
    strikes: Sequence[Strike]
    memory_before: dict[str, float]
    memory_after: dict[str, float]
    problems: Sequence[str]  # problems that are not bad streams
    began: float
    facts: dict[str, object]  # seed, executor, seconds of the run

    @property
    def is_good(self) -> bool:
        return not (self.problems or any(record.is_bad for record in self.records))

    def summary(self) -> dict[str, object]:
        kills = Counter(strike.fault.kind for strike in self.strikes if strike.fault.action != "flush")
        pauses = [pause for values in self._pauses().values() for pause in values]
        return {
            "streams": len(self.records),
            "kills": {kind: kills[kind] for kind in KINDS},
            "lost": sum(record.lost for record in self.records),
            "repeated": sum(record.repeated for record in self.records),
            "changed": sum(record.changed for record in self.records),
            "errors": sum(bool(record.error) for record in self.records),
            "pause_p50_s": round(quantile(pauses, 0.5), 3),
            "pause_p99_s": round(quantile(pauses, 0.99), 3),
            "pause_max_s": round(quantile(pauses, 1.0), 3),
            "worker_kill_pause_p99_s": round(quantile(self._pauses().get("worker kill", ()), 0.99), 3),
            "tokens": sum(record.num_tokens for record in self.records),
            "resumes": sum(record.resumes for record in self.records),
            "faults": dict(sorted(Counter(strike.fault.label for strike in self.strikes).items())),
            "problems": len(self.problems),
            **self.facts,
        }

    def text(self) -> str:
        parts = [
            self._fault_table(),
            self.parameter_table(),
            self._longest_pause(),
            self._exits(),
            self._memory(),
            *self._bad_streams(),
        ]
        parts += [f"PROBLEM: {problem}" for problem in self.problems]
        return "\n\n".join(filter(None, parts))

    def json_line(self) -> str:
        return json.dumps(self.summary())

    def _pauses(self) -> dict[str, list[float]]:
        """By fault label: the longest pause between two deltas, for each stream that ran during such a fault."""
        found: dict[str, list[float]] = defaultdict(list)
        for strike in self.strikes:
            for record in self.records:
                gap = _longest_gap(record.delta_times, strike.began, strike.ended)
                if gap is None:
                    continue
                begin, end = gap
                others = [s for s in self.strikes if s is not strike and s.began < end and s.ended > begin]
                found[TOGETHER if others else strike.fault.label].append(end - begin)
        return found

    def _fault_table(self) -> str:
        pauses = self._pauses()
        counts = Counter(strike.fault.label for strike in self.strikes)
        lines = [f"{'fault':<20}{'count':>6}{'streams':>9}{'p50 s':>8}{'p99 s':>8}{'max s':>8}   pauses of streams"]
        for label in [*sorted(counts), TOGETHER]:
            values = pauses.get(label, [])
            figures = "".join(f"{quantile(values, fraction):>8.2f}" for fraction in (0.5, 0.99, 1.0))
            lines.append(f"{label:<20}{counts[label] or '':>6}{len(values):>9}{figures if values else ''}")
        return "\n".join(lines)

    def parameter_table(self) -> str:
        """By parameter and kind of killed process: the streams that ran during such kills, and the bad streams."""
        kills = [strike for strike in self.strikes if strike.fault.action == "kill"]
        hit: Counter[tuple[str, str]] = Counter()
        bad: Counter[tuple[str, str]] = Counter()
        for record in self.records:
            kinds = {
                strike.fault.kind for strike in kills if record.began < strike.ended and record.ended > strike.began
            }
            cells = [(name, kind) for name in set(record.request.parameters) for kind in kinds]
            hit.update(cells)
            bad.update(cells if record.is_bad else ())
        names = sorted({name for record in self.records for name in record.request.parameters})
        lines = [f"{'parameter':<20}" + "".join(f"{kind:>14}" for kind in KINDS) + "   streams during a kill (bad)"]
        for name in names:
            cells = [(hit[name, kind], bad[name, kind]) for kind in KINDS]
            lines.append(f"{name:<20}" + "".join(f"{f'{count} ({wrong})':>14}" for count, wrong in cells))
        return "\n".join(lines)

    def _longest_pause(self) -> str:
        """The stream with the longest pause, and the faults at that time."""
        pauses = [(b - a, a, b, r) for r in self.records for a, b in pairwise(r.delta_times)]
        if not pauses:
            return ""
        length, begin, end, record = max(pauses, key=lambda pause: pause[0])
        lines = [f"longest pause: {length:.2f} s of stream {record.number} (id {record.request_id}) "]
        lines[0] += f"from {self._at(begin)} to {self._at(end)}, {record.resumes} resumes"
        near = [s for s in self.strikes if s.began < end and (s.recovered or end) > begin - 1.0]
        return "\n".join([*lines, *(f"  {self._at(s.began)} {s}" for s in near)])

    def _exits(self) -> str:
        asked = [strike for strike in self.strikes if strike.exit_s is not None and strike.fault.action != "kill"]
        slowest: dict[str, float] = {}
        for strike in asked:
            slowest[strike.fault.label] = max(slowest.get(strike.fault.label, 0.0), strike.exit_s or 0.0)
        return "\n".join(f"slowest exit after {label}: {seconds:.1f} s" for label, seconds in sorted(slowest.items()))

    def _memory(self) -> str:
        names = sorted(self.memory_before)
        lines = [f"{'process':<20}{'MiB before':>12}{'MiB after':>12}"]
        lines += [f"{n:<20}{self.memory_before[n]:>12.0f}{self.memory_after.get(n, 0.0):>12.0f}" for n in names]
        return "\n".join(lines)

    def _bad_streams(self) -> Iterable[str]:
        bad = [record for record in self.records if record.is_bad]
        for record in bad[:MAX_BAD_SHOWN]:
            yield self._bad_stream(record)
        if len(bad) > MAX_BAD_SHOWN:
            yield f"... and {len(bad) - MAX_BAD_SHOWN} more bad streams"

    def _bad_stream(self, record: StreamRecord) -> str:
        lines = [
            f"BAD STREAM {record.number} (id {record.request_id}, seed {record.seed}, {record.resumes} resumes, "
            f"{self._at(record.began)} to {self._at(record.ended)}): {record.difference()}",
            f"  {record.request}",
        ]
        lines += [f"  {self._at(s.began)} {s}" for s in self.strikes if self._is_near(s, record)]
        return "\n".join(lines)

    def _is_near(self, strike: Strike, record: StreamRecord) -> bool:
        last = record.ended or strike.began
        return strike.began < last + NEARBY_S and (strike.recovered or last) > record.began - NEARBY_S

    def _at(self, time: float) -> str:
        return f"t={time - self.began:.1f}"


def _longest_gap(times: Sequence[float], begin: float, end: float) -> tuple[float, float] | None:
    """The longest interval between two neighbours that overlaps [begin, end]."""
    gaps = [(a, b) for a, b in pairwise(times) if a < end and b > begin]
    return max(gaps, key=lambda gap: gap[1] - gap[0], default=None)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Nearest rank; 0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0
