"""The commands of the services where their packages are not installed."""

import subprocess
import sys

import pytest


def start(service, missing):
    """Run the command of a service in a process without the package `missing`."""
    code = f"import sys; sys.modules[{missing!r}] = None; from {service}_svc.command import main; main()"
    return subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("service", "missing"),
    [("gateway", "tokenizers"), ("gateway", "grpc_health"), ("scheduler", "numpy"), ("worker", "xxhash")],
)
def test_a_missing_package_names_the_extra(service, missing):
    done = start(service, missing)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"the package {missing} is not installed; run `pip install 'quire-server[{service}]'`" in done.stderr


def test_the_worker_needs_torch_before_it_starts():
    code = (
        "import importlib.util as u; real = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'torch' else real(name, *a); "
        "from worker_svc.command import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert "the package torch is not installed; run `pip install 'quire-server[worker]'`" in done.stderr


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker"])
def test_the_command_starts_the_service(service):
    done = start(service, "no_such_package")
    assert done.returncode == 0
    assert "--listen" in done.stdout
