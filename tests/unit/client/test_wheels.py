"""The two wheels: the SDK works alone, the services bring everything else."""

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import google.protobuf
import grpc
import pytest

ROOT = Path(__file__).parents[3]
SERVICES = {"gateway_svc", "scheduler_svc", "worker_svc", "svc_common", "prefix_index", "grammars"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels by the name of their distribution."""
    out = tmp_path_factory.mktemp("wheels")
    for project in (ROOT / "client", ROOT / "packaging" / "quire-server"):
        command = [sys.executable, "-m", "uv", "build", "--quiet", "--offline", "--wheel", "--no-build-isolation"]
        done = subprocess.run([*command, "--out-dir", str(out), str(project)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return {path.name.partition("-")[0]: zipfile.ZipFile(path) for path in out.glob("*.whl")}


def top_level(wheel):
    return {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}


def requirements(wheel):
    """Requirements without an extra, and the names of the extras."""
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    about = Parser().parsestr(wheel.read(name).decode())
    needed = {line for line in about.get_all("Requires-Dist", ()) if "extra ==" not in line}
    return needed, set(about.get_all("Provides-Extra", ()))


def test_the_sdk_wheel_has_the_sdk_and_the_stubs_only(wheels):
    sdk = wheels["quire_client"]
    assert top_level(sdk) == {"quire", "quire_client", "request_fields"}
    assert {
        "quire/v1/inference_pb2.py",
        "quire/v1/inference_pb2.pyi",
        "quire_client/py.typed",
        "quire/py.typed",
    } <= set(sdk.namelist())
    assert not [name for name in sdk.namelist() if "demo_model" in name]
    needed, extras = requirements(sdk)
    assert {line.partition(">")[0] for line in needed} == {"grpcio", "protobuf"}
    assert extras == {"bench", "hub"}


def test_the_server_wheel_has_the_services_and_needs_the_sdk(wheels):
    server, sdk = wheels["quire_server"], wheels["quire_client"]
    assert top_level(server) == SERVICES | {"quire_client"}
    assert not set(server.namelist()) & set(sdk.namelist())
    assert all(name.startswith("quire_client/demo_model/") for name in server.namelist() if "quire_client" in name)
    assert "worker_svc/engine/kernels/forward.cpp" in server.namelist()
    needed, extras = requirements(server)
    assert needed == {"quire-client==0.1.0"}
    assert {"gateway", "scheduler", "worker", "cuda", "all"} <= extras


def test_the_sdk_wheel_works_without_the_services(wheels, tmp_path):
    """Runs an interpreter that can import only the wheel, grpc, protobuf and the standard library."""
    wheels["quire_client"].extractall(tmp_path)
    installed = [Path(grpc.__file__).parent, Path(google.protobuf.__file__).parents[1]]
    try:
        import typing_extensions  # grpc needs it
    except ImportError:
        pass
    else:
        installed.append(Path(typing_extensions.__file__))
    for path in installed:
        (tmp_path / path.name).symlink_to(path)
    code = f"""
import sys
sys.path.append({str(tmp_path)!r})
from quire_client import Client
from quire_client.cli import main
from quire_client.testing import FakeGateway
with FakeGateway({{"hi": "hello"}}) as gateway, Client.connect(gateway.target) as client:
    print(client.chat("hi").text)
sys.exit(main(["up"]))
"""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.stdout == "hello\n", done.stderr
    assert done.returncode == 1
    assert "only the SDK is installed here; run `pip install 'quire-server[all]'`" in done.stderr
