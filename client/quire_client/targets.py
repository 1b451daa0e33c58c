"""Which of several gateways is asked next. No I/O; time comes in."""

from __future__ import annotations

from dataclasses import dataclass

AVOID_S = 1.0  # one that just refused may be back in a moment
AVOID_FROZEN_S = 30.0  # one that hangs costs whoever asks it a whole stall; a probe frees it earlier


@dataclass(slots=True)
class _Target:
    avoid_until: float = 0.0
    is_frozen: bool = False
    alive_at: float = -1e9


class TargetRing:
    """Round robin over gateways, those that just failed last. Threads may share it: a lost update costs one try."""

    def __init__(self, num_targets: int) -> None:
        self._targets = [_Target() for _ in range(num_targets)]
        self._last = num_targets - 1

    def __len__(self) -> int:
        return len(self._targets)

    def next(self, now: float) -> int:
        """The next gateway that works; when none does, the one that is to be tried again first."""
        order = [(self._last + 1 + i) % len(self._targets) for i in range(len(self._targets))]
        best = min(order, key=lambda index: max(0.0, self._targets[index].avoid_until - now))
        self._last = best
        return best

    def has_working(self, now: float) -> bool:
        """Whether at least one has not just failed."""
        return any(target.avoid_until <= now for target in self._targets)

    def failed(self, index: int, now: float, *, is_frozen: bool = False) -> None:
        """It refused or broke (avoided for a second) or hangs (avoided until it answers a probe)."""
        target = self._targets[index]
        target.is_frozen = target.is_frozen or is_frozen
        target.avoid_until = now + (AVOID_FROZEN_S if target.is_frozen else AVOID_S)

    def works(self, index: int, now: float) -> None:
        """It answered."""
        target = self._targets[index]
        target.alive_at = now
        target.avoid_until = 0.0
        target.is_frozen = False

    def alive_at(self, index: int) -> float:
        """When it last answered a probe."""
        return self._targets[index].alive_at

    def frozen(self) -> list[int]:
        """Those that hang, to be probed."""
        return [index for index, target in enumerate(self._targets) if target.is_frozen]
