"""`quire up`: the whole stack as local processes."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from quire_client.channel import DEFAULT_TARGET
from quire_client.cli.output import complain
from quire_client.cli.stack import (
    Service,
    ServiceSpec,
    Stack,
    StartFailedError,
    flag_arguments,
    free_ports,
    is_free,
    threads_each,
)

T = TypeVar("T")

GATEWAY_PHASE, WORKER_PHASE, SCHEDULER_PHASE = range(3)  # nobody new comes in, then rows end, then the owner goes
NEEDED = {
    "torch": "worker",
    "safetensors": "worker",
    "tokenizers": "gateway",
    "jinja2": "gateway",
    "redis": "scheduler and gateway",
}
MAX_PORT = 65_535
# Services on one machine with their model: each message and each chunk costs CPU that the model can use better.
CHUNK_INTERVAL_MS = 50.0  # text still flows to the eye
BURST_MS = 20.0  # what a new request may wait for each of two messages, beside quick steps
DEFAULT_TARGETS = (DEFAULT_TARGET, "127.0.0.1:50051")
SAMPLE_QUESTION = "What does os.path.join do?"


class SetupError(Exception):
    """The stack cannot be started as asked; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run, and what to tell about it."""

    specs: tuple[ServiceSpec, ...]
    target: str
    model: str
    notes: tuple[str, ...]
    log_dir: Path


def run(args: argparse.Namespace) -> int:
    narrator = JsonNarrator() if args.json else TextNarrator()
    try:
        plan = make_plan(args)
        return asyncio.run(_serve(plan, args, narrator))
    except (SetupError, OSError) as error:
        complain(str(error))
        return 1
    finally:
        if args.ready_file:
            Path(args.ready_file).unlink(missing_ok=True)


def make_plan(args: argparse.Namespace) -> Plan:
    """Choose ports, folders and flags. Raises SetupError with what to do."""
    _check_installed()
    _check_environment()
    args.redis = args.redis or os.environ.get("QUIRE_REDIS")  # the scheduler would take it from there anyway
    folder, name = resolve_model(args.model, args.model_name)
    ports = _gateway_ports(args.host, args.port, args.gateways)
    others = free_ports(args.schedulers + args.workers, excluded=ports)
    schedulers = [f"127.0.0.1:{port}" for port in others[: args.schedulers]]
    threads = threads_each(args.workers, args.threads)
    devices = _devices_each(args, visible_gpus() if args.backend == "cuda" else [])
    log_dir = Path(args.log_dir or tempfile.mkdtemp(prefix="quire-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    specs = [
        *(_scheduler_spec(name, address, args) for name, address in _named("scheduler", schedulers)),
        *(
            _worker_spec(f"worker-{i}", f"127.0.0.1:{port}", schedulers, folder, name, threads, devices[i], args)
            for i, port in enumerate(others[args.schedulers :])
        ),
        *(_gateway_spec(name, args.host, port, schedulers, args) for name, port in _named("gateway", ports)),
    ]
    specs = _with_metrics(specs, excluded=[*ports, *others]) if args.metrics else [_quiet(spec) for spec in specs]
    notes = (
        _model_note(args.model, folder, name),
        _backend_note(args, threads),
        _index_note(args.redis, args.schedulers),
        *(f"metrics    http://{spec.metrics}/metrics ({spec.name})" for spec in specs if spec.metrics),
    )
    target = ",".join(f"{_reachable(args.host)}:{port}" for port in ports)
    return Plan(tuple(specs), target, name, notes, log_dir)


def _named(kind: str, items: Sequence[T]) -> Iterator[tuple[str, T]]:
    """Names of the services of one kind: the kind, numbered where there are several."""
    for i, item in enumerate(items):
        yield (kind if len(items) == 1 else f"{kind}-{i}"), item


def _quiet(spec: ServiceSpec) -> ServiceSpec:
    """Without metrics, whatever the environment says: it cannot be meant for several processes."""
    return replace(spec, arguments=(*spec.arguments, "--metrics-listen", "off", "--health-listen", "off"))


def _with_metrics(specs: Sequence[ServiceSpec], *, excluded: Sequence[int]) -> list[ServiceSpec]:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(specs), excluded=excluded)]
    flags = [("--metrics-listen", address, "--health-listen", "off") for address in addresses]
    return [
        replace(spec, arguments=(*spec.arguments, *flag), metrics=address)
        for spec, flag, address in zip(specs, flags, addresses, strict=True)
    ]


def resolve_model(model: str, name: str | None) -> tuple[Path, str]:
    """The folder to serve and its public name."""
    if model == "demo":
        from quire_client.demo import demo_model_dir

        return Path(demo_model_dir()), name or "demo"
    folder = Path(model).expanduser().resolve()
    if not folder.is_dir():
        raise SetupError(
            f"--model {model}: no such folder; download a checkpoint first "
            f"(e.g. `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`) or use --model demo"
        )
    if not (folder / "config.json").is_file():
        raise SetupError(f"--model {model}: there is no config.json; give a Hugging Face model folder")
    return folder, name or folder.name


def _check_installed() -> None:
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise SetupError(
            f"{', '.join(missing)} not installed; `pip install '.[all]'` in a checkout of Quire installs all"
        )


def _check_environment() -> None:
    if os.environ.get("QUIRE_TLS_CERT_FILE"):  # the gateway would take it from there
        raise SetupError(
            "QUIRE_TLS_CERT_FILE is set, and what `quire up` starts on one machine speaks plaintext; unset it, or "
            "start the services one by one (docs/deployment.md)"
        )


def _gateway_ports(host: str, port: int, count: int) -> list[int]:
    """The gateways' ports: any, or in a row from the one that was asked for."""
    if port == 0:
        return free_ports(count)
    ports = list(range(port, port + count))
    if ports[-1] > MAX_PORT:
        raise SetupError(f"{count} gateways from port {port} on do not fit: ports end at {MAX_PORT}")
    for taken in ports:
        if not is_free(host, taken):
            raise SetupError(f"port {taken} is taken: is a stack running already? (--port 0 picks a free one)")
    return ports


def _scheduler_spec(name: str, address: str, args: argparse.Namespace) -> ServiceSpec:
    flags = [
        ("listen", address),
        ("redis", args.redis),
        ("max-waiting", args.max_waiting),
        ("max-waiting-tokens", args.max_waiting_tokens),
        ("burst-ms", _shared_machine(args.burst_ms, "QUIRE_BURST_MS", BURST_MS)),
    ]
    switches = ("--no-prefix-caching",) if args.no_prefix_caching else ()
    return ServiceSpec(name, "scheduler_svc.server", (*flag_arguments(flags), *switches), address, SCHEDULER_PHASE)


def _worker_spec(
    worker_id: str,
    address: str,
    schedulers: Sequence[str],
    folder: Path,
    model_name: str,
    threads: int,
    environment: tuple[tuple[str, str], ...],
    args: argparse.Namespace,
) -> ServiceSpec:
    flags: list[tuple[str, object]] = [
        ("model", folder),
        ("model-name", model_name),
        ("listen", address),
        ("advertise", address),
        *(("scheduler", scheduler) for scheduler in schedulers),
        ("worker-id", worker_id),
        ("threads", threads),
        ("drain-timeout-s", args.drain_timeout_s),
        ("dtype", args.dtype),
        ("kv-cache-dtype", args.kv_cache_dtype),
        ("quantize", args.quantize),
        ("block-size", args.block_size),
        ("num-blocks", args.num_blocks),
        ("kv-cache-memory", args.kv_cache_memory),
        ("max-num-seqs", args.max_num_seqs),
        ("max-num-batched-tokens", args.max_num_batched_tokens),
        ("max-model-len", args.max_model_len),
        ("determinism", args.determinism),
        ("executor", args.executor),
        ("backend", args.backend),
        ("attention", args.attention),
        ("gpu-memory-utilization", args.gpu_memory_utilization),
        ("tensor-parallel-size", args.tensor_parallel_size),
    ]
    return ServiceSpec(
        worker_id, "worker_svc.server", flag_arguments(flags), address, WORKER_PHASE, environment=environment
    )


def _gateway_spec(name: str, host: str, port: int, schedulers: Sequence[str], args: argparse.Namespace) -> ServiceSpec:
    flags: list[tuple[str, object]] = [
        ("listen", f"{_bracketed(host)}:{port}"),
        *(("scheduler", scheduler) for scheduler in schedulers),
        ("redis", args.redis),
        ("chunk-interval-ms", _shared_machine(args.chunk_interval_ms, "QUIRE_CHUNK_INTERVAL_MS", CHUNK_INTERVAL_MS)),
    ]
    return ServiceSpec(name, "gateway_svc.server", flag_arguments(flags), f"{_reachable(host)}:{port}", GATEWAY_PHASE)


def _shared_machine(given: float | None, variable: str, default: float) -> float | None:
    """A flag whose own default is meant for services that have machines of their own. None: the environment says."""
    return default if given is None and variable not in os.environ else given


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _reachable(host: str) -> str:
    """The address for clients of this machine: 0.0.0.0 is no destination."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, _bracketed(host))


def _model_note(model: str, folder: Path, name: str) -> str:
    if model == "demo":
        return (
            f"model      {name}: no --model given, so the bundled one; it knows some of Python's standard library only"
        )
    return f"model      {name} from {folder}"


def _devices_each(args: argparse.Namespace, visible: Sequence[str]) -> list[tuple[tuple[str, str], ...]]:
    """What tells each worker its own GPUs, where there are enough; workers of one GPU may have to share."""
    size = args.tensor_parallel_size or 1
    needed = size * args.workers
    if visible and needed > len(visible) and size > 1:
        raise SetupError(
            f"--workers {args.workers} with --tensor-parallel-size {size} need {needed} GPUs, {len(visible)} can be "
            "seen; lower one of them, or see CUDA_VISIBLE_DEVICES"
        )
    if needed > len(visible):
        return [()] * args.workers
    return [(("CUDA_VISIBLE_DEVICES", ",".join(visible[i : i + size])),) for i in range(0, needed, size)]


def _backend_note(args: argparse.Namespace, threads: int) -> str:
    num_workers: int = args.workers
    if args.backend == "cuda":
        ranks = f" of {args.tensor_parallel_size} GPUs" if (args.tensor_parallel_size or 1) > 1 else ""
        return f"backend    CUDA, {num_workers} worker{'s' if num_workers > 1 else ''}{ranks}"
    reason = "a GPU is here; --backend cuda uses it" if has_gpu() else "no GPU found"
    return f"backend    CPU ({reason}), {num_workers} x {threads} thread{'s' if threads > 1 else ''}"


def _index_note(redis: str | None, num_schedulers: int) -> str:
    if not redis and num_schedulers > 1:
        return "index      in memory of each scheduler (no --redis given)"
    if not redis:
        return "index      in memory (no --redis given)"
    parts = urllib.parse.urlsplit(redis)
    return f"index      Redis at {parts._replace(netloc=parts.netloc.rpartition('@')[2]).geturl()}"


def has_gpu() -> bool:
    """Whether an NVIDIA device is visible; asks no driver and loads no torch."""
    return bool(visible_gpus()) and shutil.which("nvidia-smi") is not None


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The devices that a process of ours may use, as CUDA_VISIBLE_DEVICES would name them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device.strip() for device in chosen.split(",") if device.strip()]
    return [str(number) for number in range(len(list(devices.glob("nvidia[0-9]*"))))]


async def _serve(plan: Plan, args: argparse.Namespace, narrator: Narrator) -> int:
    loop = asyncio.get_running_loop()
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    stack = Stack(plan.specs, plan.log_dir, narrator.report)
    narrator.begin(plan)
    running = asyncio.create_task(stack.run())
    try:
        if await _ready_before(stack, running, stopping):
            _announce(plan, stack, args.ready_file, narrator)
            await _either(running, stopping)
        if running.done():
            running.result()  # raises what ended it
        narrator.draining()
        await stack.stop(args.drain_timeout_s, hurry)
        await running
    except StartFailedError as error:
        narrator.failed(error, plan.log_dir)
        return 1
    narrator.end()
    return 0


async def _ready_before(stack: Stack, running: asyncio.Task[None], stopping: asyncio.Event) -> bool:
    """Wait for readiness, a failure or a signal; whether readiness came first."""
    ready = asyncio.create_task(stack.wait_ready())
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait([ready, running, stop], return_when=asyncio.FIRST_COMPLETED)
    is_ready = ready.done()
    for task in (ready, stop):
        task.cancel()
    return is_ready


async def _either(running: asyncio.Task[None], stopping: asyncio.Event) -> None:
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait([running, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()


def _announce(plan: Plan, stack: Stack, ready_file: str | None, narrator: Narrator) -> None:
    services = [_facts_of(service) for service in stack.services]
    facts = {"target": plan.target, "model": plan.model, "log_dir": str(plan.log_dir), "services": services}
    if ready_file:
        scratch = Path(f"{ready_file}.{os.getpid()}")
        scratch.write_text(json.dumps(facts))
        scratch.replace(ready_file)  # whoever waits for the file finds it whole
    narrator.serving(plan, facts)


def _facts_of(service: Service) -> dict[str, Any]:
    spec = service.spec
    facts = {"name": spec.name, "address": spec.address, "pid": service.pid, "log": str(service.log_path)}
    return facts | ({"metrics": f"http://{spec.metrics}/metrics"} if spec.metrics else {})


class Narrator(Protocol):
    """Tells what happens, to a person or to a program."""

    def begin(self, plan: Plan) -> None: ...
    def report(self, event: str, service: str, facts: dict[str, Any]) -> None: ...
    def serving(self, plan: Plan, facts: dict[str, Any]) -> None: ...
    def draining(self) -> None: ...
    def failed(self, error: StartFailedError, log_dir: Path) -> None: ...
    def end(self) -> None: ...


class JsonNarrator:
    """One JSON line per event on stdout."""

    def begin(self, plan: Plan) -> None:
        self._line("starting", model=plan.model, log_dir=str(plan.log_dir))

    def report(self, event: str, service: str, facts: dict[str, Any]) -> None:
        self._line(event, service=service, **facts)

    def serving(self, plan: Plan, facts: dict[str, Any]) -> None:
        self._line("serving", **facts)

    def draining(self) -> None:
        self._line("draining")

    def failed(self, error: StartFailedError, log_dir: Path) -> None:
        self._line("failed", service=error.name, message=str(error), log_tail=error.tail)

    def end(self) -> None:
        self._line("end")

    def _line(self, event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, **facts}), flush=True)


class TextNarrator:
    """A line per service. On a terminal, one more line at the bottom that changes while weights load."""

    def __init__(self) -> None:
        self._is_tty = sys.stdout.isatty()
        self._loading: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._is_serving = False
        self._started = time.monotonic()

    def begin(self, plan: Plan) -> None:
        for note in (*plan.notes, f"logs       {plan.log_dir}"):
            self._line(note)
        self._line(f"starting   {', '.join(spec.name for spec in plan.specs)}")

    def report(self, event: str, service: str, facts: dict[str, Any]) -> None:
        tellers: dict[str, Callable[[str, dict[str, Any]], None]] = {
            "progress": self._progress,
            "waiting": lambda name, facts: self._line(
                f"{name:<10} still starting: {''.join(facts['log_tail']) or '...'}"
            ),
            "ready": self._ready,
            "died": self._died,
            "stopped": lambda name, _: self._line(f"{name:<10} stopped"),
            "killed": lambda name, _: self._line(f"{name:<10} did not stop in time: killed"),
        }
        if event in tellers:
            tellers[event](service, facts)

    def serving(self, plan: Plan, facts: dict[str, Any]) -> None:
        self._is_serving = True
        target = "" if plan.target in DEFAULT_TARGETS else f" --target {plan.target}"
        question = SAMPLE_QUESTION if plan.model == "demo" else "Hello!"
        self._line(f"\nServing {plan.model} on {plan.target}. In another terminal:")
        self._line(f'  quire chat "{question}"{target}')
        self._line(f"  quire status{target}")
        self._line("Ctrl-C drains and stops.\n")

    def draining(self) -> None:
        self._line("\ndraining: running answers are finished first; Ctrl-C again stops at once")

    def failed(self, error: StartFailedError, log_dir: Path) -> None:
        self._clear()
        complain(f"{error}. The end of {log_dir / error.name}.log:")
        for line in error.tail:
            print(f"  {line}", file=sys.stderr)

    def end(self) -> None:
        self._line("everything is stopped")

    def _progress(self, service: str, facts: dict[str, Any]) -> None:
        percent = int(facts["percent"])
        self._loading[service] = percent
        if self._is_tty:
            self._show_loading()
        elif percent // 25 > self._told.get(service, 0) // 25:
            self._told[service] = percent
            self._line(f"{service:<10} loading weights: {percent} %")

    def _ready(self, service: str, facts: dict[str, Any]) -> None:
        self._loading.pop(service, None)
        again = "ready again" if self._is_serving else "ready"
        self._line(f"{service:<10} {again:<8} {facts['address']:<22} {facts['seconds']:.1f} s")
        self._show_loading()

    def _died(self, service: str, facts: dict[str, Any]) -> None:
        self._line(f"{service:<10} {facts['how']}; starting it again in {facts['restart_in_s']:.1f} s. Its last lines:")
        for line in facts["log_tail"]:
            self._line(f"           | {line}")

    def _show_loading(self) -> None:
        if self._is_tty and self._loading:
            parts = ", ".join(f"{name} {percent} %" for name, percent in sorted(self._loading.items()))
            sys.stdout.write(f"\r\x1b[Kloading weights: {parts}")
            sys.stdout.flush()

    def _line(self, text: str) -> None:
        self._clear()
        print(text, flush=True)

    def _clear(self) -> None:
        if self._is_tty:
            sys.stdout.write("\r\x1b[K")
