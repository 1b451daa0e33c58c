"""Ports that tests choose are not those that the kernel gives to connections."""

from __future__ import annotations

import pytest
from quire_cli.stack.supervisor import PORT_RANGE

from tests.processes.ports import NUM_PORTS, first_port, free_port


@pytest.mark.parametrize(
    ("outgoing", "first"),
    [
        ("32768\t60999\n", 10_000),
        ("16000 65535", 2_000),
        ("1024 50000", 50_001),
        ("1024 65535", 10_000),
    ],
)
def test_ports_are_outside_the_range_of_connections(outgoing: str, first: int) -> None:
    assert first_port(outgoing) == first


def test_ports_are_not_those_of_quire_up() -> None:
    assert first_port("32768 60999") + NUM_PORTS <= PORT_RANGE[0]


def test_a_port_is_not_chosen_again_soon() -> None:
    chosen = [free_port() for _ in range(100)]
    assert len(set(chosen)) == 100
