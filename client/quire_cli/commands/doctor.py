"""`quire doctor`: lists what works on this machine, what is missing, and which fallbacks are used."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_client.connection.channel import TARGET_ENV, Tls, resolve_targets
from quire_client.errors import ConnectionFailed, QuireError, Unauthenticated
from quire_client.sync import Client

from quire_cli.connection import tls_option
from quire_cli.installation import SERVICES, RedisUrlError, install_command, is_installed, ping
from quire_cli.output import count, to_json
from quire_cli.stack.plan import has_gpu
from quire_cli.stack.supervisor import cores

OK, FALLBACK, MISSING, UNKNOWN = "ok", "fallback", "missing", "unknown"
MARKS = {OK: "ok  ", FALLBACK: "note", MISSING: "FAIL", UNKNOWN: "?   "}
SERVICE_PACKAGES = {
    "gateway": (
        "tokenizers", "jinja2", "msgspec", "starlette", "uvicorn", "xxhash", "grpcio-health-checking",
        "grpcio-reflection",
    ),
    "scheduler": ("numpy", "xxhash", "redis"), "worker": ("torch", "numpy", "safetensors", "xxhash"),
}  # fmt: skip
PROBE = ("-P", "-m", "worker_svc.engine.kernels.probe", "--all")
PROBE_TIMEOUT_S = 60.0  # compiles the kernels on a new machine
KINDS = ("bfloat16", "int8", "float32")
NOT_FASTEST = "QUIRE_DISABLE_AMX is set, the compiler does not know it, or the system refuses it (see a worker's log)"
TARGET_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `state`: ok, fallback (works, with the limit in `detail`), missing (fails) or unknown."""

    name: str
    state: str
    detail: str


def run(args: argparse.Namespace) -> int:
    """Print each finding when its check ends. Exit code 1 if a required check failed."""
    findings = []
    for finding in examine(args.redis or os.environ.get("QUIRE_REDIS"), args.target, tls_option(args), args.api_key):
        findings.append(finding)
        if not args.json:
            print(f"{MARKS[finding.state]}  {finding.name:<10} {finding.detail}", flush=True)
    is_healthy = all(finding.state != MISSING for finding in findings)
    if args.json:
        print(to_json({"healthy": is_healthy, "findings": findings}))
    return 0 if is_healthy else 1


def examine(
    redis: str | None, target: str | None, tls: Tls | None = None, api_key: str | None = None
) -> Iterator[Finding]:
    """All checks; the kernels, which take the longest, are measured meanwhile and reported last."""
    with ThreadPoolExecutor(1) as pool:
        probe = pool.submit(probe_kernels) if is_installed(SERVICES["worker"]) else None
        yield check_python()
        yield check_sdk()
        for service, packages in SERVICE_PACKAGES.items():
            yield check_service(service, packages)
        yield check_backend()
        yield check_compiler()
        yield check_demo_model()
        yield check_redis(redis)
        is_named = bool(target or os.environ.get(TARGET_ENV))
        for address in resolve_targets(target):
            yield check_target(address, is_named=is_named, tls=tls, api_key=api_key)
        if probe is None:
            yield Finding("kernels", FALLBACK, "not measured: the worker is not installed")
            return
        if not probe.done():
            print("measuring the kernels; a new machine compiles them first", file=sys.stderr, flush=True)
        yield from check_kernels(probe.result())


def check_python() -> Finding:
    return Finding(
        "python",
        OK,
        f"{platform.python_version()} on {platform.system()} {platform.machine()}, {count(cores(), 'core')}",
    )


def check_sdk() -> Finding:
    return Finding("sdk", OK, f"grpcio {_version('grpcio')}, protobuf {_version('protobuf')}")


def check_service(name: str, packages: Iterable[str]) -> Finding:
    found = {package: _version(package) for package in packages}
    missing = [package for package, version in found.items() if version is None]
    if not is_installed(SERVICES[name]):
        missing.insert(0, "quire-server")
    if missing:
        detail = f"cannot run here, not installed: {', '.join(missing)}; run {install_command(name)}"
        return Finding(name, FALLBACK, detail)
    return Finding(name, OK, ", ".join(f"{package} {version}" for package, version in found.items()))


def check_backend() -> Finding:
    if has_gpu():
        return Finding("backend", OK, "a GPU is present; `quire up` uses it for models that backend cuda serves")
    return Finding("backend", OK, "CPU: no GPU found (no /dev/nvidia*)")


def check_compiler() -> Finding:
    """The CPU kernels are compiled at the first start of a worker."""
    named = os.environ.get("CXX")
    found = [path for path in map(shutil.which, [named] if named else ["g++", "c++", "clang++"]) if path]
    if found:
        return Finding("compiler", OK, f"{found[0]}: compiles the CPU kernels once; they are cached")
    looked_for = f"CXX={named}" if named else "g++, c++ or clang++"
    return Finding(
        "compiler",
        FALLBACK,
        f"none ({looked_for}): workers use plain torch, which is slower; run `apt-get install g++`",
    )


def check_kernels(found: dict[str, Any]) -> Iterator[Finding]:
    """The path of a CPU worker on this machine with its speed, and the speeds of the other paths."""
    late = f"the measurement did not end within {PROBE_TIMEOUT_S:g} s on this busy or slow machine"
    if found.get("is_fatal"):
        yield Finding("kernels", MISSING, f"CPU workers do not start: {found['error']}")
    elif error := found.get("error"):
        yield Finding("kernels", FALLBACK, f"workers use plain torch, which is slower: {error}")
    elif "path" in found:
        yield describe_path(found)
    else:
        yield Finding("kernels", UNKNOWN, late)
    if others := found.get("others"):
        speeds = ", ".join(f"{other['path']} {' / '.join(map(_speed, _ordered(other)))}" for other in others)
        yield Finding("paths", OK, f"QUIRE_CPU_PATH can select: {speeds} GOP/s ({' / '.join(KINDS)})")
    if found.get("is_late") and "path" in found:
        yield Finding("paths", UNKNOWN, late)


def describe_path(found: dict[str, Any]) -> Finding:
    """The finding for the line of worker_svc.engine.kernels.probe."""
    used, names = found["path"], found["instructions"]
    speeds = ", ".join(f"{kind} {_speed(found['giga_operations'][kind])} GOP/s ({names[kind]})" for kind in KINDS)
    detail = (
        f"{used}; on one core, 256 rows: {speeds}; one row reads weights at {found['read_gb_s']:g} GB/s, "
        f"a copy of memory runs at {found['copy_gb_s']:g} GB/s"
    )
    if used == found["fastest"]:
        return Finding("kernels", OK, detail)
    reason = "QUIRE_CPU_PATH" if found["is_chosen"] else NOT_FASTEST
    return Finding("kernels", FALLBACK, f"{detail}; {found['fastest']}, the fastest path here, is not used: {reason}")


def _ordered(found: dict[str, Any]) -> list[float]:
    return [found["giga_operations"][kind] for kind in KINDS]


def _speed(giga_operations: float) -> str:
    return f"{giga_operations:,.0f}"


def probe_kernels() -> dict[str, Any]:
    """The first line of worker_svc.engine.kernels.probe, or the field `error`, with the other lines as `others`.

    `is_late`: lines are missing because of the time limit.
    """
    command = [sys.executable, *PROBE]
    is_late = False
    try:
        lines = subprocess.run(command, capture_output=True, check=True, timeout=PROBE_TIMEOUT_S).stdout
    except subprocess.TimeoutExpired as error:
        lines, is_late = error.stdout or b"", True
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": f"{' '.join(command)}: {error}", "others": []}
    first, *others = [json.loads(line) for line in lines.splitlines()] or [{}]
    return {**first, "others": others, "is_late": is_late}


def check_demo_model() -> Finding:
    try:
        from quire_client.demo import demo_model_dir

        return Finding("demo model", OK, str(Path(demo_model_dir())))
    except Exception as error:  # any fault of the model is a finding
        return Finding("demo model", FALLBACK, f"{error}; or use `quire up --model DIR`")


def check_redis(url: str | None) -> Finding:
    if not url:
        return Finding("redis", OK, "not configured: prefix index in memory (fine for one scheduler)")
    try:
        name, policy = ping(url)
        if policy.startswith("allkeys"):
            words = "pinned sessions and epochs can be evicted; set maxmemory-policy volatile-lru"
            return Finding("redis", FALLBACK, f"{name} answers, with maxmemory-policy {policy}: {words}")
        return Finding("redis", OK, f"{name} answers")
    except RedisUrlError as error:
        return Finding("redis", MISSING, str(error))
    except OSError as error:
        return Finding("redis", FALLBACK, f"{error}; services run without it, with fewer hits")
    except ImportError:
        return Finding("redis", FALLBACK, f"not checked: redis-py is not installed; run {install_command('scheduler')}")


def check_target(address: str, *, is_named: bool, tls: Tls | None = None, api_key: str | None = None) -> Finding:
    """A gateway set by flag or variable must answer; the default gateway need not run."""
    try:
        with Client.connect(address, tls=tls, api_key=api_key, connect_timeout_s=TARGET_TIMEOUT_S) as client:
            names = ", ".join(f"{m.name} ({count(m.ready_workers, 'worker')} ready)" for m in client.models())
    except Unauthenticated as error:
        state = MISSING if is_named else FALLBACK
        return Finding("gateway", state, f"{address} is running, but requires an API key: {error.message}")
    except QuireError as error:
        if not is_named and not isinstance(error, ConnectionFailed):
            return Finding("gateway", FALLBACK, f"{address}: {error.message}")
        state = MISSING if is_named else FALLBACK
        return Finding("gateway", state, error.message if is_named else f"none at {address}; `quire up` starts one")
    return Finding("gateway", OK, f"{address} serves {names or 'no model yet'}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
