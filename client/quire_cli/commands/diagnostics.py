"""`quire profile` and `quire debug bundle`: files for the people who look for a problem."""

from __future__ import annotations

import argparse
import io
import json
import platform
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from quire_client.errors import QuireError
from quire_client.sync.client import Client
from quire_client.types import Status

from quire_cli.commands.status import OPERATORS_ONLY
from quire_cli.connection import connect
from quire_cli.output import complain, count, to_json

CONTENTS = """\
A bundle of `quire debug bundle`, made at {when} of {target}.

status.json               queues, workers, blocks, hits, oldest requests (ids and sizes)
SERVICE/versions.json     versions of Quire, Python, packages and the system
SERVICE/settings.toml     settings in force with their sources, without secrets
SERVICE/metrics.txt       all metrics, in the Prometheus format
SERVICE/log.txt           the last 2,000 log lines, without prompts, outputs and keys
errors.txt                services that did not answer

It has ids of requests, names of models and hosts, and addresses. Read it before you send it to others.
"""


def profile(args: argparse.Namespace) -> int:
    """Record a profile and write it to a file."""
    path = Path(args.output or f"{_file_name(args.service)}.trace.json.gz")
    with connect(args) as client:
        data = client.profile(args.service, seconds=args.seconds, hz=args.hz)
    if (code := _write(path, data)) == 0:
        print(f"{path}: open it at https://ui.perfetto.dev, or in chrome://tracing")
    return code


def debug(args: argparse.Namespace) -> int:
    """Ask all services for their reports and write them to one file. Exit code 1 if a service did not answer."""
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = Path(args.output or f"quire-bundle-{when}.tar.gz")
    with connect(args) as client:
        status = client.status()
        if status.is_summary:
            complain(OPERATORS_ONLY)
            return 1
        files, errors = collect(client, status)
    files["README.txt"] = CONTENTS.format(when=when, target=args.target or "the default target")
    if code := _write(path, bundle(files, f"quire-bundle-{when}")):
        return code
    print(f"{path}: {count(len(services_of(status)) - len(errors), 'service')}")
    for error in errors:
        complain(error)
    return 1 if errors else 0


def services_of(status: Status) -> dict[str, str]:
    """Folder and name of every service behind the gateway, and the gateway itself."""
    services = {"gateway": "gateway"}
    for scheduler in status.schedulers:
        services[f"scheduler-{_file_name(scheduler.address)}"] = scheduler.address
        for worker in scheduler.workers:
            services[f"worker-{_file_name(worker.worker_id)}"] = worker.worker_id
    return services


def collect(client: Client, status: Status) -> tuple[dict[str, str], list[str]]:
    """The files of a bundle by path, and the errors of services that did not answer."""
    files = {
        "status.json": to_json(status),
        "client.json": json.dumps({"python": sys.version.split()[0], "system": platform.platform()}),
    }
    errors = []
    for folder, service in services_of(status).items():
        try:
            files |= {f"{folder}/{name}": text for name, text in files_of(client.report(service)).items()}
        except QuireError as error:
            errors.append(f"{service}: {error.message}")
    return files | ({"errors.txt": "\n".join(errors)} if errors else {}), errors


def files_of(report: dict[str, Any]) -> dict[str, str]:
    """The parts of a report as files."""
    facts = {name: report.get(name) for name in ("service", "instance", "uptime_s", "versions")}
    return {
        "versions.json": json.dumps(facts, indent=1),
        "settings.toml": str(report.get("settings", "")),
        "metrics.txt": str(report.get("metrics", "")),
        "log.txt": str(report.get("log", "")),
    }


def bundle(files: dict[str, str], folder: str) -> bytes:
    """The files as a tar archive in gzip, readable by their owner only."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, text in sorted(files.items()):
            data = text.encode()
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    return target.getvalue()


def _file_name(text: str) -> str:
    """The text with characters that are safe in a file name."""
    return "".join(char if char.isalnum() or char in "-_." else "-" for char in text).lstrip(".") or "service"


def _write(path: Path, data: bytes) -> int:
    try:
        path.write_bytes(data)
        path.chmod(0o600)
    except OSError as error:
        complain(f"cannot write {path}: {error.strerror or error}")
        return 2
    return 0
