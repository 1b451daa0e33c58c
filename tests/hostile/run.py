"""Attack every port of a running system and print figures: `python -m tests.hostile.run` or `make hostile`.

One line per attack and port: how long it took, the speed of eight good streams compared with before and their longest
pause, the slowest probe, and the process whose memory grew most. The good streams have a process of their own. The
attacker shares the processors with the system, at a lower priority. At the end, the port between the hosts of a worker
is attacked. Ends with status 1 after a finding or a wrong token.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.hostile import attacks
from tests.hostile.attacks import FLOODS
from tests.hostile.node_attacks import NODE_ATTACKS
from tests.hostile.node_target import NodeTarget
from tests.hostile.streams_apart import streams_apart
from tests.hostile.suite import Row, Suite, all_attacks, as_stranger, one_of_each, takes_messages
from tests.hostile.target import Port, Target

REST_S = 5.0
ATTACKER_NICENESS = 10
MIN_S = 2.0  # the speed during a shorter attack says nothing
KEPT_MIB = 128.0
PEAK_MIB = 600.0
PAUSE_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000, help="mutated messages per port and kind of caller")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="smaller floods and bombs")
    parser.add_argument("--only", default="", help="only attacks whose name contains this text")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder, Target(Path(folder)) as target:
        status = asyncio.run(attack(target, args))
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder, NodeTarget(Path(folder)) as nodes:
        sys.exit(asyncio.run(attack_nodes(nodes, args)) or status)


async def attack(target: Target, args: argparse.Namespace) -> int:
    """All attacks, one port at a time. Returns the exit status."""
    size = attacks.SHORT if args.short else attacks.FULL
    await (await target.connect()).close()  # every worker is leased
    async with streams_apart(target) as streams:
        os.nice(ATTACKER_NICENESS)
        suite = Suite(target, streams, kept_mib=KEPT_MIB, peak_mib=PEAK_MIB, pause_s=PAUSE_S)
        unbounded = Suite(target, streams, kept_mib=math.inf, peak_mib=math.inf, pause_s=math.inf, stall_s=math.inf)
        rest = await suite.rest(REST_S)
        print(f"8 good streams without an attack: {rest:.0f} tokens/s", flush=True)
        ports = one_of_each(target)
        for is_insider in (False, True):
            for port in filter(takes_messages, ports):
                used = unbounded if is_insider and _is_service(port) else suite
                if args.only in "mutated":
                    await used.mutate([port], count=args.messages, seed=args.seed, is_insider=is_insider)
                    _report(used.rows[-1], rest)
        for found, places in all_attacks(ports).items():
            for port in places:
                callers = [as_stranger(port), port] if port.credentials else [port]
                for caller in callers if args.only in found.__name__ else []:
                    used = unbounded if found in FLOODS or _is_service(caller) else suite
                    await used.launch(found, [caller], size)
                    _report(used.rows[-1], rest, "with credentials" if caller.credentials else "")
        at_end = await suite.rest(REST_S)
    print(f"8 good streams after all attacks: {at_end:.0f} tokens/s; {streams.num_ended} streams", flush=True)
    wrong = streams.wrong()
    findings = suite.findings + unbounded.findings
    print(f"{len(findings)} findings, {len(wrong)} wrong streams", *wrong[:5], sep="\n")
    return int(bool(findings or wrong))


async def attack_nodes(target: NodeTarget, args: argparse.Namespace) -> int:
    """All attacks on the port for the other hosts of a worker. Returns the exit status."""
    size, status = attacks.SHORT if args.short else attacks.FULL, 0
    for found in NODE_ATTACKS:
        if args.only not in found.__name__:
            continue
        began = time.monotonic()
        findings = await target.attack(found, size)
        print(f"{found.__name__:45} {target.port.name:22} {time.monotonic() - began:24.1f} s", flush=True)
        for finding in findings:
            print(f"    FINDING: {finding}", flush=True)
            status = 1
    return status


def _is_service(caller: Port) -> bool:
    """Whether the caller has a service's token. Services trust each other's sizes; schedulers may take workers."""
    return bool(caller.credentials) and not caller.name.startswith("gateway")


def _report(row: Row, rest: float, caller: str = "") -> None:
    name, growth, peak = row.largest_growth
    speed = f"{row.tokens_per_s / rest:4.0%}" if row.seconds >= MIN_S else "   -"
    memory = f"memory {growth:+5.0f} MiB, peak {peak:+5.0f} ({name})"
    print(
        f"{row.attack:45} {row.port:22} {caller:17} {row.seconds:6.1f} s  speed {speed}  pause {row.pause_s:5.2f} s  "
        f"slowest probe {row.slowest_probe_s:5.2f} s  {memory}  {dict(row.codes) or ''}",
        flush=True,
    )
    for finding in row.findings:
        print(f"    FINDING: {finding}", flush=True)


if __name__ == "__main__":
    main()
