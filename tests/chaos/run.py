"""python -m tests.chaos.run: kill, freeze, restart and drain every process under load, and compare every token.

Starts gateways, schedulers, workers and Redis as processes on this machine, keeps streams running, executes a seeded
plan of faults, and compares every stream with its answer without faults. The last line of output is one JSON object.
The exit code is 1 if a token was lost, repeated or changed, or if a client got an error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from quire_client import AsyncClient

from tests.chaos.cluster import KINDS, Cluster
from tests.chaos.faults import Saboteur, make_plan
from tests.chaos.reference import Catalogue, SimRule, Source, UndisturbedStack
from tests.chaos.report import Report
from tests.chaos.streams import StreamLoad

PROGRESS_S = 5.0
MIN_FAULTS = 14  # one fault of each kind and action
MODELS = ("demo", "heads", "recurrent")  # random weights but for the first one
END_DEADLINE_S = 120.0  # for streams and faults that are still running when the time is over


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one run. Equal seeds give equal requests and planned faults."""

    seconds: float = 300.0
    seed: int = 0
    executor: str = "cpu"
    model: str = "demo"
    streams: int = 0
    lanes: int = 24
    requests: int = 40
    gap_s: float = 5.0
    gateways: int = 2
    schedulers: int = 2
    workers: int = 3
    kinds: tuple[str, ...] = KINDS


def main() -> int:
    settings, keep_logs = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the child processes
    folder = Path(tempfile.mkdtemp(prefix="quire-chaos-"))
    is_good = False
    try:
        report = asyncio.run(run(settings, folder))
        is_good = report.is_good
        print(f"\n{report.text()}\n")
        if not is_good:
            print(f"logs: {folder}")
        print(report.json_line(), flush=True)
        return 0 if is_good else 1
    except BaseException:
        print(f"logs: {folder}", file=sys.stderr)
        raise
    finally:
        if is_good and not keep_logs:
            shutil.rmtree(folder)


def parse_arguments() -> tuple[Settings, bool]:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=default.seconds, help="seconds during which faults are executed (300)"
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="seed of requests and faults (0)")
    parser.add_argument("--executor", choices=("cpu", "sim"), default="cpu", help="executor of the workers (cpu)")
    parser.add_argument("--model", choices=MODELS, default="demo", help="model of --executor cpu (demo)")
    parser.add_argument(
        "--streams",
        type=int,
        default=default.streams,
        help="minimum number of streams; the run may take longer than --seconds (0)",
    )
    parser.add_argument("--lanes", type=int, default=default.lanes, help="streams at once (24)")
    parser.add_argument("--requests", type=int, default=default.requests, help="different requests (40)")
    parser.add_argument("--gap-s", type=float, default=default.gap_s, help="mean seconds between faults (5)")
    parser.add_argument("--gateways", type=int, default=default.gateways)
    parser.add_argument("--schedulers", type=int, default=default.schedulers)
    parser.add_argument("--workers", type=int, default=default.workers)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds that may fail (gateway,scheduler,worker,redis)")
    parser.add_argument("--keep-logs", action="store_true", help="keep the logs of the processes after a good run too")
    arguments = vars(parser.parse_args())
    keep_logs = arguments.pop("keep_logs")
    kinds = tuple(arguments.pop("kinds").split(","))
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: unknown {', '.join(sorted(unknown))}; choose from {', '.join(KINDS)}")
    return Settings(kinds=kinds, **arguments), keep_logs


async def run(settings: Settings, folder: Path) -> Report:
    """One run from the start of the processes to their end. Logs go to `folder`."""
    sizes = {"gateways": settings.gateways, "schedulers": settings.schedulers, "workers": settings.workers}
    say(f"starting {', '.join(f'{n} {kind}' for kind, n in sizes.items())} and redis; logs in {folder}")
    with Cluster(folder, executor=settings.executor, model=settings.model, **sizes) as cluster:
        async with await cluster.connect() as client:
            is_sim = settings.executor == "sim"
            source: Source = SimRule(client, cluster.model_dir) if is_sim else UndisturbedStack(client)
            vocab_size = (await client.model()).vocab_size
            began = time.monotonic()
            catalogue = await Catalogue.build(
                source, seed=settings.seed, count=settings.requests, vocab_size=vocab_size
            )
            say(f"{len(catalogue)} answers without faults in {time.monotonic() - began:.0f} s; faults start now")
            load = StreamLoad(client, catalogue, seed=settings.seed, lanes=settings.lanes, at_least=settings.streams)
            report = await disturb(settings, cluster, client, load, source)
        await cluster.close()
    return report


async def disturb(
    settings: Settings, cluster: Cluster, client: AsyncClient, load: StreamLoad, source: Source
) -> Report:
    """Run streams and faults at the same time, then the checks that need an idle system."""
    members = {kind: len(cluster.members.get(kind, ("redis",))) for kind in settings.kinds}
    plan = make_plan(
        settings.seed, max(MIN_FAULTS, int(4 * settings.seconds / settings.gap_s)), settings.gap_s, members
    )
    saboteur = Saboteur(cluster, client, plan)
    memory_before = cluster.memory_mib()
    began = asyncio.get_running_loop().time()
    until = began + settings.seconds
    async with _progress(load, saboteur, began):
        tasks = [asyncio.create_task(saboteur.run(until)), asyncio.create_task(load.run(until))]
        _, pending = await asyncio.wait(
            tasks, timeout=settings.seconds + END_DEADLINE_S, return_when=asyncio.FIRST_EXCEPTION
        )
    for task in pending:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    problems = [f"{type(end).__name__}: {end}" for end in ends if isinstance(end, Exception)]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(load.verify_unseeded(source), END_DEADLINE_S)
    finished = [record for record in load.records if record.ended]
    if len(finished) < len(load.records):
        problems.append(f"{len(load.records) - len(finished)} streams were still running at the end")
    problems += [f"not verified: {r.request}" for r in finished if r.expected is None and not r.error]
    problems += [f"unclean exit: {strike}" for strike in saboteur.strikes if not strike.is_clean]
    problems += [f"{name}.log contains {words!r}" for name, words in cluster.complaints()]
    facts: dict[str, object] = {
        "seed": settings.seed,
        "executor": settings.executor,
        "model": settings.model,
        "seconds": round(asyncio.get_running_loop().time() - began, 1),
    }
    return Report(finished, saboteur.strikes, memory_before, cluster.memory_mib(), problems, began, facts)


@contextlib.asynccontextmanager
async def _progress(load: StreamLoad, saboteur: Saboteur, began: float) -> AsyncIterator[None]:
    """Print a line every few seconds while the block runs."""

    async def report() -> None:
        last_tokens = 0
        while True:
            await asyncio.sleep(PROGRESS_S)
            counts = load.counts
            bad = " ".join(f"{name} {counts[name]}" for name in ("lost", "repeated", "changed", "errors"))
            rate = (counts["tokens"] - last_tokens) / PROGRESS_S
            last_tokens = counts["tokens"]
            last = f"; last: {saboteur.strikes[-1].fault.label}" if saboteur.strikes else ""
            say(
                f"t={asyncio.get_running_loop().time() - began:.0f} s: {counts['streams']} streams done, "
                f"{load.num_running} running, {rate:.0f} tokens/s, {bad}, resumes {counts['resumes']}, "
                f"{len(saboteur.strikes)} faults{last}"
            )

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
