"""The two wheels: the SDK works alone, the services bring everything else."""

import json
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import argcomplete
import google.protobuf
import grpc
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).parents[3]
LOCKED, IMAGES = ROOT / "packaging" / "requirements.txt", ROOT / "deploy" / "docker" / "constraints.txt"
SERVICES = {"gateway_svc", "scheduler_svc", "worker_svc", "svc_common", "prefix_index", "step_protocol", "grammars"}


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
    own = {"quire_client", "quire_cli", "quire_bench", "quire_batch", "quire_analysis"}
    assert top_level(sdk) == own | {"quire", "request_fields", "hub_models"}
    assert {
        "quire/v1/inference_pb2.py",
        "quire/v1/inference_pb2.pyi",
        "quire_client/py.typed",
        "quire_client/sync/client.py",
        "quire_client/results.py",
        "quire/py.typed",
    } <= set(sdk.namelist())
    assert not [name for name in sdk.namelist() if "demo_model" in name]
    needed, extras = requirements(sdk)
    assert {line.partition(">")[0] for line in needed} == {
        *("argcomplete", "googleapis-common-protos", "grpcio", "protobuf")
    }
    assert extras == {"bench", "hub"}


def test_the_server_wheel_has_the_services_and_needs_the_sdk(wheels):
    server, sdk = wheels["quire_server"], wheels["quire_client"]
    assert top_level(server) == SERVICES | {"quire_client"}
    assert not set(server.namelist()) & set(sdk.namelist())
    assert all(name.startswith("quire_client/demo_model/") for name in server.namelist() if "quire_client" in name)
    assert "gateway_svc/http/console/static/index.html" in server.namelist()
    assert {"worker_svc/engine/kernels/forward.cpp", "step_protocol/types.py"} <= set(server.namelist())
    needed, extras = requirements(server)
    assert needed == {"quire-client==0.1.0"}
    assert {"gateway", "scheduler", "worker", "cuda", "all"} <= extras


def sbom(wheel, name):
    path = next(path for path in wheel.namelist() if path.endswith(f".dist-info/sboms/{name}.cdx.json"))
    text = wheel.read(path).decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    return json.loads(text)


@pytest.mark.parametrize("name", ["quire-client", "quire-server"])
def test_a_wheel_lists_its_requirements_in_an_sbom(wheels, name):
    wheel = wheels[name.replace("-", "_")]
    found = sbom(wheel, name)
    about, components = found["metadata"]["component"], {part["name"]: part for part in found["components"]}
    assert (about["purl"], about["licenses"]) == (f"pkg:pypi/{name}@0.1.0", [{"expression": "Apache-2.0"}])
    text = LOCKED.read_text()
    locked = dict(re.findall(r"^([\w.-]+?)(?:\[.*\])?==([^\s;]+)", text, re.MULTILINE))
    own = {"quire-client": "0.1.0"} if name == "quire-server" else {}
    assert {name: part["version"] for name, part in components.items()}.items() <= (locked | own).items()
    for part in components.values():
        hashes = [entry["content"] for given in part.get("externalReferences", ()) for entry in given["hashes"]]
        assert part["name"] in own or (hashes and all(digest in text for digest in hashes))
    needed, _ = requirements(wheel)
    depends = {entry["ref"]: entry["dependsOn"] for entry in found["dependencies"]}
    names = {ref.removeprefix("pkg:pypi/").partition("@")[0] for ref in depends[about["bom-ref"]]}
    assert {re.match(r"[\w-]+", line)[0] for line in needed} <= names
    refs = {part["bom-ref"] for part in components.values()}
    assert {ref for needs in depends.values() for ref in needs} == refs, "each is needed by another one"


def test_the_sbom_of_the_services_has_every_package_of_the_images(wheels):
    components = {part["name"]: part["version"] for part in sbom(wheels["quire_server"], "quire-server")["components"]}
    images = dict(line.split("==") for line in IMAGES.read_text().splitlines() if not line.startswith("#"))
    images = {re.sub(r"\[.*\]", "", name): version for name, version in images.items()}
    assert images.items() <= components.items()


def test_the_sdk_wheel_works_without_the_services(wheels, tmp_path):
    """Runs an interpreter that can import only the wheel, its requirements and the standard library."""
    wheels["quire_client"].extractall(tmp_path)
    installed = [Path(module.__file__).parent for module in (argcomplete, grpc)] + [
        Path(google.protobuf.__file__).parents[1]
    ]
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
from quire_cli import main
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
