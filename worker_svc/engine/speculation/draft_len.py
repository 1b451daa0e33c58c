"""How many drafts a row computes: a pure function, and the measurements that it is given."""

from __future__ import annotations

import math

MEMORY = 0.05  # weight of a longer step in the running time of its size
UNMEASURED_TOKENS = 10  # before it is measured, a step takes as long as this number of tokens and those that it has
LEAST_CHANCE = 0.05  # no draft that is less likely than this: steps with drafts are never free
STALE = 64  # steps, after which a size is measured again
FORGOTTEN = 512  # steps, after which a larger size counts as not measured: the last time may have been a disturbed one
PROBE_SHARE = 0.01  # of the time, for the drafts of rows whose drafts do not pay


def probe_pause(draft_cost: float) -> int:
    """The number of steps from one draft to the next of a row whose drafts do not pay. It shows whether they do again.
    To propose a draft takes the share `draft_cost` of a step.
    """
    return max(1, math.ceil(draft_cost / PROBE_SHARE))


def draft_len(acceptance: float, num_outputs: float, token_cost: float, most: int) -> int:
    """The number of drafts, at most `most`, that a row of a step should compute.

    The k-th draft becomes a token with probability acceptance ** k. It makes the step longer by the fraction
    `token_cost`, in which the step would return `num_outputs` * `token_cost` tokens without it. So it pays while its
    probability is larger. Where a step takes as long as its weights are read, a token costs little; where it computes
    as many tokens as the processor can, `token_cost` is 1 / tokens and no draft pays.
    """
    lost, chance, count = max(num_outputs * token_cost, LEAST_CHANCE), acceptance, 0
    while count < most and chance > lost:
        count, chance = count + 1, chance * acceptance
    return count


class StepTimes:
    """The time of steps without prompts by the number of their tokens, in groups of powers of two.

    Other programs make steps longer and never shorter, so a shorter step counts at once and a longer one a little.
    """

    def __init__(self) -> None:
        self._groups: dict[int, tuple[float, float]] = {}  # bits of the number -> mean number, seconds
        self._num_steps = 0
        self._measured_at: dict[int, int] = {}  # bits of the number -> number of steps

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step has run."""
        group = num_tokens.bit_length()
        self._num_steps += 1
        self._measured_at[group] = self._num_steps
        size, before = self._groups.get(group, (float(num_tokens), seconds))
        weight = 1.0 if seconds < before else MEMORY
        self._groups[group] = size + MEMORY * (num_tokens - size), before + weight * (seconds - before)

    def is_stale(self, num_rows: int) -> bool:
        """Whether a step of so many rows should have no drafts, to be measured."""
        return self._num_steps - self._measured_at.get(num_rows.bit_length(), -STALE) >= STALE

    def of_rows(self, num_rows: int) -> float | None:
        """Seconds of a step of about so many rows without drafts; None before there was one."""
        found = self._groups.get(num_rows.bit_length())
        return None if found is None else found[1]

    def token_cost(self, num_rows: int) -> float:
        """The share of a step of so many rows that one more token takes."""
        group = num_rows.bit_length()
        base = self._groups.get(group)
        known = {one for one, at in self._measured_at.items() if self._num_steps - at < FORGOTTEN}
        larger = next((self._groups[group + more] for more in (1, 2, 3) if group + more in known), None)
        if base is None or larger is None or larger[0] <= base[0]:
            return 1 / (UNMEASURED_TOKENS + num_rows)
        return max(larger[1] - base[1], 0.0) / (larger[0] - base[0]) / base[1]
