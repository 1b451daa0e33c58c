"""A limit for child processes that compute: processor time, which other programs on the machine do not use up."""

from __future__ import annotations


def limited(command: list[str], cpu_s: int) -> list[str]:
    """The command, which the kernel ends after this much processor time of one process. Use it without a timeout."""
    return ["bash", "-c", 'ulimit -t "$0" && exec "$@"', str(cpu_s), *command]
