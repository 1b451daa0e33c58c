"""Chooses the gateway for the next attempt. No I/O; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

AVOID_S = 1.0  # how long a gateway is avoided after a refusal or a break
AVOID_FROZEN_S = 30.0  # longer, because each call to a hanging gateway costs a stall timeout; a probe can end it


@dataclass(slots=True)
class _Target:
    avoid_until: float = 0.0
    is_frozen: bool = False
    alive_at: float = -1e9


class TargetRing:
    """Round robin over gateways; gateways that failed recently are chosen last. Threads may share it without a lock: a
    lost update only costs one attempt.
    """

    def __init__(self, num_targets: int) -> None:
        self._targets = [_Target() for _ in range(num_targets)]
        self._last = num_targets - 1

    def __len__(self) -> int:
        return len(self._targets)

    def next(self, now: float) -> int:
        """The next working gateway; if there is none, the gateway whose avoid time ends first."""
        order = [(self._last + 1 + i) % len(self._targets) for i in range(len(self._targets))]
        best = min(order, key=lambda index: max(0.0, self._targets[index].avoid_until - now))
        self._last = best
        return best

    def has_working(self, now: float) -> bool:
        """Whether at least one gateway has not failed recently."""
        return any(target.avoid_until <= now for target in self._targets)

    def failed(self, index: int, now: float, *, is_frozen: bool = False) -> None:
        """Avoid a gateway: AVOID_S after a refusal or a break; a frozen gateway AVOID_FROZEN_S or until it answers."""
        target = self._targets[index]
        target.is_frozen = target.is_frozen or is_frozen
        target.avoid_until = now + (AVOID_FROZEN_S if target.is_frozen else AVOID_S)

    def works(self, index: int, now: float) -> None:
        """The gateway answered."""
        target = self._targets[index]
        target.alive_at = now
        target.avoid_until = 0.0
        target.is_frozen = False

    def alive_at(self, index: int) -> float:
        """The time of the gateway's last answer."""
        return self._targets[index].alive_at

    def frozen(self) -> list[int]:
        """The gateways that hang. The caller probes them."""
        return [index for index, target in enumerate(self._targets) if target.is_frozen]
