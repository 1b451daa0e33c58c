"""The plan of `quire up`: ports, folders and flags of every service."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from hub_models.find import HubError, find_model, parse_name
from quire_cli.installation import SERVICES, RedisUrlError, install_command, is_installed, ping
from quire_cli.stack.arguments import flags_of
from quire_cli.stack.local_trust import LocalTrust, make_trust
from quire_cli.stack.supervisor import ServiceSpec, flag_arguments, free_ports, is_free, threads_each

T = TypeVar("T")

GATEWAY_PHASE, WORKER_PHASE, SCHEDULER_PHASE = range(3)  # stop new requests, then running rows, then schedulers
NEEDED = {
    "torch": "worker", "safetensors": "worker", "tokenizers": "gateway", "jinja2": "gateway", "msgspec": "gateway",
    "starlette": "gateway", "uvicorn": "gateway", "redis": "gateway and scheduler",
}  # fmt: skip
MAX_PORT = 65_535
DEFAULT_HTTP_PORT = 8000
# All services share one machine with the model: each message and each chunk takes CPU time from the model.
CHUNK_INTERVAL_MS = 50.0  # text still appears smoothly
RECORD_MEMORY = "64M"  # default of one gateway without Redis, for stored and background responses
BURST_MS = 20.0  # a new request may wait this long for each of two messages in flight


class SetupError(Exception):
    """The stack cannot be started with these options. The message has the remedy."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The services to start, and the notes to print first."""

    specs: tuple[ServiceSpec, ...]
    target: str
    model: str
    notes: tuple[str, ...]
    log_dir: Path
    is_log_dir_temporary: bool = False
    http_urls: tuple[str, ...] = ()  # URLs of the OpenAI-compatible API, one per gateway
    trust: LocalTrust = field(default_factory=LocalTrust)


def make_plan(args: argparse.Namespace, say: Callable[[str], None] = print) -> Plan:
    """Choose ports, folders and flags. Downloads a model of the Hub that is not cached; `say` prints its location.

    Raises SetupError.
    """
    _check_installed()
    _check_environment()
    _check_device(args)
    args.redis = args.redis or os.environ.get("QUIRE_REDIS")
    _set_defaults_of_one_machine(args)
    folder, args.model_name = resolve_model(args.model, args.model_name, say)
    check_worker(folder, args)
    ports = _gateway_ports(args.host, args.port, args.gateways)
    http_ports = _http_ports(args, excluded=ports)
    why_cpu = _choose_backend(args, folder)
    others = free_ports(args.schedulers + args.workers, excluded=[*ports, *http_ports])
    schedulers = [f"127.0.0.1:{port}" for port in others[: args.schedulers]]
    devices = _devices_each(args, visible_gpus() if args.backend == "cuda" else [])
    log_dir = make_log_dir(args.log_dir)
    if not (args.redis or args.batch_dir or "QUIRE_BATCH_DIR" in os.environ):
        args.batch_dir = log_dir / "batches"
    with writing_to("log-dir", log_dir):
        trust = make_trust(log_dir, args.host, args.api_key, has_tls=args.tls)
    specs = [
        *(_scheduler_spec(name, address, args) for name, address in _named("scheduler", schedulers)),
        *(
            _worker_spec(f"worker-{i}", f"127.0.0.1:{port}", schedulers, folder, devices[i], args)
            for i, port in enumerate(others[args.schedulers :])
        ),
        *(
            _gateway_spec(name, args.host, port, http_port, schedulers, args)
            for (name, port), http_port in zip(_named("gateway", ports), http_ports, strict=True)
        ),
    ]
    specs = (
        _with_metrics(specs, excluded=[*ports, *http_ports, *others])
        if args.metrics
        else [_quiet(spec) for spec in specs]
    )
    specs, console = _with_console(specs, excluded=[*ports, *http_ports, *others]) if args.console else (specs, "")
    specs = [trust.added_to(spec) for spec in specs]
    notes = (
        _model_note(args.model, folder, args.model_name),
        _backend_note(args, why_cpu),
        _index_note(args.redis, args.schedulers),
        *_reach_notes(args),
        *([f"console    {'https' if args.tls else 'http'}://{console}/console/"] if console else []),
        *(f"metrics    http://{spec.metrics}/metrics ({spec.name})" for spec in specs if spec.metrics),
    )
    target = ",".join(f"{_reachable(args.host)}:{port}" for port in ports)
    urls = tuple(f"{'https' if args.tls else 'http'}://{_reachable(args.host)}:{port}/v1" for port in http_ports)
    return Plan(tuple(specs), target, args.model_name, notes, log_dir, not args.log_dir, urls, trust)


def make_log_dir(folder: str | None) -> Path:
    """The folder of --log-dir, or a temporary one. Raises SetupError."""
    log_dir = Path(folder or tempfile.mkdtemp(prefix="quire-"))
    with writing_to("log-dir", log_dir):
        log_dir.mkdir(parents=True, exist_ok=True)
    return log_dir


@contextmanager
def writing_to(flag: str, path: Path) -> Iterator[None]:
    """Raise an OSError of the block as a SetupError that names the flag."""
    try:
        yield
    except OSError as error:
        raise SetupError(f"--{flag} {path}: {error.strerror or error}; choose a folder that can be written") from None


def _named(kind: str, items: Sequence[T]) -> Iterator[tuple[str, T]]:
    """Name the services of one kind; several services are numbered."""
    for i, item in enumerate(items):
        yield (kind if len(items) == 1 else f"{kind}-{i}"), item


def _quiet(spec: ServiceSpec) -> ServiceSpec:
    """Disable metrics even if the environment sets a port: several processes cannot share a port."""
    return replace(spec, arguments=(*spec.arguments, "--metrics-listen", "off", "--health-listen", "off"))


def _with_metrics(specs: Sequence[ServiceSpec], *, excluded: Sequence[int]) -> list[ServiceSpec]:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(specs), excluded=excluded)]
    flags = [("--metrics-listen", address, "--health-listen", "off") for address in addresses]
    return [
        replace(spec, arguments=(*spec.arguments, *flag), metrics=address)
        for spec, flag, address in zip(specs, flags, addresses, strict=True)
    ]


def _with_console(specs: Sequence[ServiceSpec], *, excluded: Sequence[int]) -> tuple[list[ServiceSpec], str]:
    """The services, of which the first gateway serves the console at the returned address."""
    taken = [*excluded, *(int(spec.metrics.rpartition(":")[2]) for spec in specs if spec.metrics)]
    address = f"127.0.0.1:{free_ports(1, excluded=taken)[0]}"
    first = next(spec for spec in specs if spec.module == "gateway_svc.service")
    shown = replace(first, arguments=(*first.arguments, "--console-listen", address))
    return [shown if spec is first else spec for spec in specs], address


def resolve_model(model: str, name: str | None, say: Callable[[str], None]) -> tuple[Path, str]:
    """The model folder to serve, and its public name. A folder has precedence over a model of the Hub."""
    if model == "demo":
        from quire_client.demo import demo_model_dir

        return Path(demo_model_dir()), name or "demo"
    folder = Path(model).expanduser().resolve()
    if folder.is_file():
        raise SetupError(
            f"--model {model}: this is a file; give the folder of a Hugging Face model, with config.json and "
            "safetensors weights. GGUF is not supported"
        )
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SetupError(f"--model {model}: the folder has no config.json; give a Hugging Face model folder")
        return folder, name or folder.name
    on_hub = parse_name(model)
    if on_hub is None:
        raise SetupError(
            f"--model {model}: no such folder; give a Hugging Face model folder, ORG/NAME of the Hub, or demo"
        )
    try:
        return find_model(on_hub, say=say, check_config=_check_architecture), name or on_hub.repo
    except HubError as error:
        raise SetupError(f"--model {model}: there is no such folder, and {error}") from None


def check_worker(folder: Path, args: argparse.Namespace) -> None:
    """Refuse the model and the workers' flags before a port is tried or a service is started. Raises SetupError."""
    refusal = _refusal(flag_arguments([("model", folder), *flags_of("worker", args)]))
    if refusal:
        raise SetupError(refusal)


def _check_architecture(folder: Path) -> None:
    refusal = _refusal([str(folder)])
    if refusal:
        raise HubError(f"its weights were not downloaded: {refusal}")


def _refusal(arguments: Sequence[str]) -> str:
    """The error of the worker's own check, empty if there is none. The client never imports a service."""
    command = [sys.executable, "-P", "-m", "worker_svc.check_model", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def _check_installed() -> None:
    command = install_command("all")
    if not all(map(is_installed, SERVICES.values())):
        raise SetupError(f"`quire up` starts the services, but only the SDK is installed here; run {command}")
    missing = [f"{package} ({service})" for package, service in NEEDED.items() if not is_installed(package)]
    if missing:
        raise SetupError(f"the services need packages that are not installed: {', '.join(missing)}; run {command}")


def _check_environment() -> None:
    if os.environ.get("QUIRE_TLS_CERT_FILE"):  # the gateway would read it
        raise SetupError(
            "QUIRE_TLS_CERT_FILE is set, but `quire up` uses no certificates, or with --tls its own; unset it, or "
            "start the services one by one (docs/deployment.md)"
        )


def _check_device(args: argparse.Namespace) -> None:
    """Refuse --backend cuda on a machine without any sign of a GPU, before torch is imported."""
    if args.backend != "cuda" or visible_gpus() or shutil.which("nvidia-smi") or Path("/dev/dxg").exists():
        return
    hidden = "CUDA_VISIBLE_DEVICES is empty" if "CUDA_VISIBLE_DEVICES" in os.environ else "no /dev/nvidia* exists"
    raise SetupError(f"--backend cuda: no GPU is visible ({hidden}); use --backend cpu, or check the driver")


def _gateway_ports(host: str, port: int, count: int) -> list[int]:
    """The gateways' ports: consecutive from `port`, or free ones if it is 0."""
    if port == 0:
        return free_ports(count)
    ports = list(range(port, port + count))
    if ports[-1] > MAX_PORT:
        raise SetupError(
            f"--port {port}: {count} gateways need the ports up to {ports[-1]}, but the highest port is {MAX_PORT}; "
            "use a lower --port"
        )
    for taken in ports:
        if not is_free(host, taken):
            raise SetupError(f"port {taken} is in use, maybe by another stack; stop it, or use --port 0 for free ports")
    return ports


def _http_ports(args: argparse.Namespace, *, excluded: Sequence[int]) -> list[int]:
    """The gateways' HTTP ports: consecutive from --http-port; free ports if it is 0. Without --http-port: consecutive
    from 8000; free ports if one of these is in use or --port is 0.
    """
    first = args.http_port if args.http_port is not None else args.port and DEFAULT_HTTP_PORT
    ports = list(range(first, min(first + args.gateways, MAX_PORT + 1)))
    is_usable = len(ports) == args.gateways and all(p not in excluded and is_free(args.host, p) for p in ports)
    if first and is_usable:
        return ports
    if args.http_port:
        raise SetupError(
            f"--http-port {first}: {args.gateways} gateways need consecutive free ports from {first}, but some are in "
            "use; choose another --http-port, or use --http-port 0 for free ports"
        )
    return free_ports(args.gateways, excluded=excluded)


def _set_defaults_of_one_machine(args: argparse.Namespace) -> None:
    """Defaults where those of the services are for separate machines. A variable of the environment replaces them."""
    args.threads = threads_each(args.workers, args.threads)
    has_one_gateway = args.gateways == 1 and not args.redis
    record_memory = RECORD_MEMORY if has_one_gateway else None
    defaults = {"chunk_interval_ms": CHUNK_INTERVAL_MS, "burst_ms": BURST_MS, "record_memory": record_memory}
    for name, default in defaults.items():
        if getattr(args, name) is None and f"QUIRE_{name.upper()}" not in os.environ:
            setattr(args, name, default)


def _scheduler_spec(name: str, address: str, args: argparse.Namespace) -> ServiceSpec:
    flags = flag_arguments([("listen", address), *flags_of("scheduler", args)])
    return ServiceSpec(name, "scheduler_svc.service", flags, address, SCHEDULER_PHASE)


def _worker_spec(
    worker_id: str,
    address: str,
    schedulers: Sequence[str],
    folder: Path,
    environment: tuple[tuple[str, str], ...],
    args: argparse.Namespace,
) -> ServiceSpec:
    own = (("model", folder), ("listen", address), ("advertise", address), ("worker-id", worker_id))
    flags = flag_arguments([*own, *(("scheduler", one) for one in schedulers), *flags_of("worker", args)])
    return ServiceSpec(worker_id, "worker_svc.service", flags, address, WORKER_PHASE, environment=environment)


def _gateway_spec(
    name: str, host: str, port: int, http_port: int, schedulers: Sequence[str], args: argparse.Namespace
) -> ServiceSpec:
    own = (("listen", f"{_bracketed(host)}:{port}"), ("http-listen", f"{_bracketed(host)}:{http_port}"))
    flags = flag_arguments([*own, *(("scheduler", one) for one in schedulers), *flags_of("gateway", args)])
    return ServiceSpec(name, "gateway_svc.service", flags, f"{_reachable(host)}:{port}", GATEWAY_PHASE)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _reachable(host: str) -> str:
    """An address that clients on this machine can connect to; 0.0.0.0 is not one."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, _bracketed(host))


def _model_note(model: str, folder: Path, name: str) -> str:
    if model == "demo":
        return f"model      {name}: the bundled model; it knows only parts of Python's standard library"
    return f"model      {name} from {folder}"


def _devices_each(args: argparse.Namespace, visible: Sequence[str]) -> list[tuple[tuple[str, str], ...]]:
    """CUDA_VISIBLE_DEVICES of each worker. Empty if there are too few GPUs: single-GPU workers then share them."""
    size = args.tensor_parallel_size or 1
    needed = size * args.workers
    if visible and needed > len(visible) and size > 1:
        raise SetupError(
            f"--workers {args.workers} with --tensor-parallel-size {size} need {needed} GPUs, but {len(visible)} are "
            "visible; lower --workers or --tensor-parallel-size, or check CUDA_VISIBLE_DEVICES"
        )
    if needed > len(visible):
        return [()] * args.workers
    return [(("CUDA_VISIBLE_DEVICES", ",".join(visible[i : i + size])),) for i in range(0, needed, size)]


def _choose_backend(args: argparse.Namespace, folder: Path) -> str:
    """Sets --backend to cuda if it is not set and a visible GPU serves the model. Returns why workers use the CPU."""
    if args.backend is not None or "QUIRE_BACKEND" in os.environ or "QUIRE_CONFIG" in os.environ:
        return "as configured"
    if not visible_gpus():
        return "no GPU found"
    command = [sys.executable, "-P", "-m", "worker_svc.check_model", "gpu", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return "a GPU is present, but " + (done.stderr.strip().splitlines() or ["the check of backend cuda failed"])[-1]
    args.backend = "cuda"
    return ""


def _backend_note(args: argparse.Namespace, why_cpu: str) -> str:
    num_workers, threads = args.workers, args.threads
    if args.backend == "cuda":
        ranks = f" of {args.tensor_parallel_size} GPUs" if (args.tensor_parallel_size or 1) > 1 else ""
        return f"backend    CUDA, {num_workers} worker{'s' if num_workers > 1 else ''}{ranks}"
    return f"backend    CPU ({why_cpu}), {num_workers} x {threads} thread{'s' if threads > 1 else ''}"


def _index_note(redis: str | None, num_schedulers: int) -> str:
    if not redis:
        where = "in memory of each scheduler" if num_schedulers > 1 else "in memory"
        return f"index      {where} (no --redis given)"
    try:
        return f"index      Redis at {ping(redis)[0]}"
    except RedisUrlError as error:
        raise SetupError(f"--redis: {error}") from None
    except OSError as error:
        return f"index      {error}; the services use it as soon as it answers"


def _reach_notes(args: argparse.Namespace) -> Iterator[str]:
    has_keys = args.api_key or args.api_keys or args.jwt_issuer
    if args.host not in ("127.0.0.1", "localhost", "::1") and not has_keys:
        yield f"WARNING    --host {args.host}: other machines need no key to use this server; see --api-key and --tls"
    if args.chunk_interval_ms:
        yield (
            f"chunks     a stream gets one every {args.chunk_interval_ms:g} ms, with all tokens since the last one; "
            "--chunk-interval-ms 0 sends each token when it is there"
        )


def has_gpu() -> bool:
    """Whether an NVIDIA device is visible, without calling the driver or loading torch."""
    return bool(visible_gpus()) and shutil.which("nvidia-smi") is not None


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The devices that the workers may use, in the form of CUDA_VISIBLE_DEVICES."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device.strip() for device in chosen.split(",") if device.strip()]
    return [str(number) for number in range(len(list(devices.glob("nvidia[0-9]*"))))]
