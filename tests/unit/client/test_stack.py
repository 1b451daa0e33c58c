"""Child processes are started, watched, restarted and stopped in order. The services are fake, the signals are real."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import quire_cli as cli
from quire_cli import arguments
from quire_cli.commands import stacks
from quire_cli.stack import plan as plans
from quire_cli.stack import supervisor as stack
from quire_cli.stack.supervisor import ServiceSpec, Stack, StartFailedError
from quire_client.demo import demo_model_dir

from gateway_svc.callers.authenticator import ApiKeys

TOY = """
    import pathlib, signal, sys, threading, time
    from concurrent import futures
    import grpc

    _, name, address, mood = sys.argv
    print("loading weights 50 %", flush=True)
    while mood == "slow" and not pathlib.Path(__file__).with_name("go").exists():
        time.sleep(0.01)
    if mood == "broken":
        sys.exit("config.json: no such file")
    server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    check = grpc.unary_unary_rpc_method_handler(lambda request, context: b"\\x08\\x01")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),))
    server.add_insecure_port(address)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    if mood == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.start()
    stopping.wait()
    print(name, "drained", flush=True)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A function that makes the spec of a toy service."""
    (tmp_path / "toy_service.py").write_text(textwrap.dedent(TOY))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name, mood="good", phase=0):
        address = f"127.0.0.1:{stack.free_ports(1)[0]}"
        return ServiceSpec(name, "toy_service", (name, address, mood), address, phase)

    return make


class Events:
    """Records the events of a Stack."""

    def __init__(self):
        self.seen = []
        self.changed = asyncio.Event()

    def __call__(self, event, service, facts):
        self.seen.append((event, service, facts))
        self.changed.set()

    def of(self, event):
        return [(service, facts) for kind, service, facts in self.seen if kind == event]

    async def wait_for(self, event, count=1):
        await self.wait_until(lambda: len(self.of(event)) >= count)

    async def wait_until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                await self.changed.wait()
                self.changed.clear()


async def test_starts_and_stops_in_order(toy, tmp_path):
    events = Events()
    services = Stack([toy("b", phase=1), toy("a", phase=0)], tmp_path, events)
    running = asyncio.create_task(services.run())
    async with asyncio.timeout(60):
        await services.wait_ready()
    await services.stop(10, asyncio.Event())
    await running
    assert [service for service, _ in events.of("stopped")] == ["a", "b"]
    assert (tmp_path / "a.log").read_text().endswith("a drained\n")
    assert not events.of("died")


async def test_a_killed_service_is_reported_and_restarted(toy, tmp_path):
    events = Events()
    services = Stack([toy("a")], tmp_path, events)
    running = asyncio.create_task(services.run())
    await events.wait_for("ready")
    os.kill(services.services[0].pid, signal.SIGKILL)
    await events.wait_for("ready", count=2)
    _, facts = events.of("died")[0]
    assert (facts["how"], facts["log_tail"]) == ("was killed by SIGKILL", ["loading weights 50 %"])
    await services.stop(10, asyncio.Event())
    await running


async def test_a_service_that_was_never_ready_fails_the_start(toy, tmp_path):
    events = Events()
    services = Stack([toy("good"), toy("bad", mood="broken")], tmp_path, events)
    with pytest.raises(StartFailedError, match="bad ended with exit code 1 before it was ready") as caught:
        await services.run()
    assert caught.value.tail[-1] == "config.json: no such file"
    assert services.services[0].pid is None


async def test_a_service_that_does_not_stop_is_killed(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(stack, "HURRY_S", 0.1)
    events = Events()
    services = Stack([toy("a", mood="stubborn")], tmp_path, events)
    running = asyncio.create_task(services.run())
    await events.wait_for("ready")
    await services.stop(0.1, asyncio.Event())
    await running
    assert events.of("killed") == [("a", {})]


def test_children_end_with_a_killed_parent(toy, tmp_path):
    spec = toy("a")
    script = f"""
import asyncio, pathlib
from quire_cli.stack.supervisor import ServiceSpec, spawn
async def main():
    process = await spawn(ServiceSpec(*{(spec.name, spec.module, spec.arguments, spec.address, 0)!r}), pathlib.Path({str(tmp_path / "a.log")!r}))
    print(process.pid, flush=True)
    await process.wait()
asyncio.run(main())
"""  # noqa: E501
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    wait_until((tmp_path / "a.log").exists)
    wait_until(lambda: "loading" in (tmp_path / "a.log").read_text())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(child))


def is_running(pid):
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


# The plan that `quire up` makes from its flags


def plan(*argv):
    return plans.make_plan(arguments.make_parser().parse_args(["up", *argv]))


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder without a model: plans are made as if a worker could serve it."""
    monkeypatch.setattr(plans, "check_worker", lambda folder, args: None)
    folder = tmp_path / "Tiny-1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize(
    ("service", "flag", "variable", "default"),
    [
        ("gateway", "--chunk-interval-ms", "QUIRE_CHUNK_INTERVAL_MS", "50.0"),
        ("scheduler", "--burst-ms", "QUIRE_BURST_MS", "20.0"),
    ],
)
def test_flags_and_variables_replace_the_defaults_for_one_machine(model, monkeypatch, service, flag, variable, default):
    assert flags_of(plan("--model", model), service)[flag] == default
    assert flags_of(plan("--model", model, flag, "0"), service)[flag] == "0.0"
    monkeypatch.setenv(variable, "5")
    assert flag not in flags_of(plan("--model", model), service)


def flags_of(made, name):
    values = next(spec for spec in made.specs if spec.name == name).arguments
    return dict(zip(values[::2], values[1::2], strict=True))


def test_plan_wires_the_services_together(model, tmp_path):
    made = plan(
        "--model", model, "--workers", "2", "--port", "0", "--dtype", "float32", "--log-dir", str(tmp_path / "l")
    )
    assert [spec.name for spec in made.specs] == ["scheduler", "worker-0", "worker-1", "gateway"]
    scheduler = flags_of(made, "scheduler")["--listen"]
    first = flags_of(made, "worker-0")
    assert (first["--scheduler"], first["--advertise"], first["--dtype"]) == (scheduler, first["--listen"], "float32")
    assert (first["--model"], first["--model-name"], first["--worker-id"]) == (model, "Tiny-1", "worker-0")
    assert flags_of(made, "worker-1")["--listen"] != first["--listen"]
    quiet = {"--metrics-listen": "off", "--health-listen": "off"}
    (url,) = made.http_urls
    http = url.removeprefix("http://").removesuffix("/v1")
    own = {"--listen": made.target, "--http-listen": http, "--scheduler": scheduler, "--chunk-interval-ms": "50.0"}
    own |= {"--drain-timeout-s": "30.0", "--record-memory": "64M", "--batch-dir": str(tmp_path / "l" / "batches")}
    assert flags_of(made, "gateway") == own | quiet | {"--token-file": str(tmp_path / "l" / "tokens")}
    assert all(flags_of(made, spec.name)["--token-file"] == str(*made.trust.secrets) for spec in made.specs)
    assert "--redis" not in flags_of(made, "scheduler")
    assert "in memory (no --redis given)" in "".join(made.notes)


@pytest.mark.parametrize("variable", ["QUIRE_TOKEN_FILE", "QUIRE_INTERNAL_TLS_CERT_FILE"])
def test_settings_of_the_environment_replace_the_tokens(model, tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, "/some/file")
    made = plan("--model", model, "--log-dir", str(tmp_path))
    assert not any("--token-file" in flags_of(made, spec.name) for spec in made.specs)
    assert not (tmp_path / "tokens").exists()


def test_http_ports(model, tmp_path, monkeypatch):
    def urls(*argv):
        return plan("--model", model, "--gateways", "2", "--log-dir", str(tmp_path), *argv).http_urls

    used = set()
    monkeypatch.setattr(plans, "is_free", lambda host, port: port not in used)
    assert urls() == ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8001/v1")
    assert urls("--http-port", "9000", "--host", "0.0.0.0") == ("http://127.0.0.1:9000/v1", "http://127.0.0.1:9001/v1")
    assert "http://127.0.0.1:8000/v1" not in urls("--port", "0")
    assert "http://127.0.0.1:8000/v1" not in urls("--http-port", "0")
    used.add(8001)
    assert "http://127.0.0.1:8000/v1" not in urls()
    with pytest.raises(plans.SetupError, match=r"--http-port 8001: .* some are in use"):
        urls("--http-port", "8001")
    with pytest.raises(plans.SetupError, match="--http-port 65535"):
        urls("--http-port", "65535")


def test_plan_of_replicas(model, tmp_path):
    made = plan(
        "--model", model, "--port", "0", "--gateways", "2", "--schedulers", "2", "--workers", "2",
        "--log-dir", str(tmp_path),
    )  # fmt: skip
    names = [spec.name for spec in made.specs]
    assert names == ["scheduler-0", "scheduler-1", "worker-0", "worker-1", "gateway-0", "gateway-1"]
    addresses = [spec.address for spec in made.specs]
    assert len(set(addresses)) == 6
    for spec in made.specs[2:]:
        given = [spec.arguments[i + 1] for i, word in enumerate(spec.arguments) if word == "--scheduler"]
        assert given == addresses[:2]
    assert made.target == ",".join(addresses[4:])
    assert "in memory of each scheduler" in "".join(made.notes)


def test_gateways_get_consecutive_ports(model, tmp_path):
    port = next(port for port in stack.free_ports(50) if stack.is_free("127.0.0.1", port + 1))
    made = plan("--model", model, "--port", str(port), "--gateways", "2", "--log-dir", str(tmp_path))
    assert made.target == f"127.0.0.1:{port},127.0.0.1:{port + 1}"
    with pytest.raises(plans.SetupError, match="2 gateways need the ports up to 65536"):
        plan("--model", model, "--port", "65535", "--gateways", "2")


def test_only_a_single_gateway_without_redis_keeps_records_in_memory(model, tmp_path):
    def memory(*flags):
        made = plan("--model", model, "--port", "0", "--log-dir", str(tmp_path), *flags)
        gateway = next(spec for spec in made.specs if spec.name.startswith("gateway"))
        return dict(zip(gateway.arguments[::2], gateway.arguments[1::2], strict=True)).get("--record-memory")

    assert memory() == "64M"
    assert memory("--record-memory", "1G") == "1G"
    assert memory("--gateways", "2") is memory("--redis", "redis://r.invalid") is None


def test_clients_need_the_keys_of_the_command_line(model, tmp_path):
    made = plan("--model", model, "--port", "0", "--log-dir", str(tmp_path), "--api-key", "token-abc", "--host", "::1")
    folder = tmp_path / "api-keys"
    assert flags_of(made, "gateway")["--api-keys"] == str(folder)
    assert ApiKeys(folder).find("token-abc").owner == "local"
    assert "token-abc" not in (folder / "local").read_text()
    assert folder.stat().st_mode & 0o077 == 0
    made.trust.delete()
    assert not folder.exists()


def test_each_worker_gets_its_own_gpus(model, monkeypatch):
    def devices(*flags):
        made = plan("--model", model, "--port", "0", "--backend", "cuda", *flags)
        return [dict(spec.environment).get("CUDA_VISIBLE_DEVICES") for spec in made.specs if "worker" in spec.name]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3, 5,7")
    assert devices("--workers", "2", "--tensor-parallel-size", "2") == ["2,3", "5,7"]
    assert devices("--workers", "5") == [None] * 5  # fewer GPUs than workers: they share
    with pytest.raises(plans.SetupError, match="--tensor-parallel-size 2 need 6 GPUs, but 4 are visible"):
        devices("--workers", "3", "--tensor-parallel-size", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(plans, "visible_gpus", list)
    monkeypatch.setattr(plans.shutil, "which", lambda name: None)
    with pytest.raises(plans.SetupError, match="--backend cuda: no GPU is visible"):
        devices()
    monkeypatch.setattr(plans.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert devices("--tensor-parallel-size", "2") == [None]
    made = plan("--model", model, "--port", "0", "--backend", "cuda", "--tensor-parallel-size", "2")
    assert flags_of(made, "worker-0")["--tensor-parallel-size"] == "2"
    assert "backend    CUDA, 1 worker of 2 GPUs" in made.notes


def backend_of(made):
    return flags_of(made, "worker-0").get("--backend"), next(note for note in made.notes if note.startswith("backend"))


def test_a_visible_gpu_that_serves_the_model_is_used(model, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(plans, "is_installed", lambda name: True)
    asked = []

    def check(command, **_):
        asked.append(command[-2:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(plans.subprocess, "run", check)
    made = plan("--model", model, "--port", "0")
    assert backend_of(made) == ("cuda", "backend    CUDA, 1 worker")
    assert asked == [["gpu", model]]
    assert backend_of(plan("--model", model, "--port", "0", "--backend", "cpu"))[0] == "cpu"
    monkeypatch.setenv("QUIRE_BACKEND", "reference")
    assert backend_of(plan("--model", model, "--port", "0"))[0] is None
    monkeypatch.delenv("QUIRE_BACKEND")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert backend_of(plan("--model", model, "--port", "0"))[0] is None
    assert len(asked) == 1


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="the GPU serves")
def test_a_gpu_that_torch_cannot_use_is_named_with_the_reason(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the interpreter would do
    flag, note = backend_of(plan("--model", "demo", "--port", "0"))
    assert flag is None
    assert note.startswith("backend    CPU (a GPU is present, but no CUDA device was found: torch ")


def test_plan_refuses_impossible_options(tmp_path, model):
    with pytest.raises(plans.SetupError, match="no such folder; give a Hugging Face model folder, ORG/NAME of the Hub"):
        plan("--model", "./Qwen3-0.6B")
    with pytest.raises(plans.SetupError, match=r"no config\.json"):
        plan("--model", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(plans.SetupError, match=f"port {port} is in use"):
            plan("--model", model, "--port", str(port))


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        (lambda folder: (folder / "config.json").write_text('{"architectures": ["NewForCausalLM"]}'), (), "NewForC"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"), (), "only safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), (), "is damaged"),
        (lambda folder: None, ("--kv-cache-memory", "9000G"), "--kv-cache-memory is 9000.0 GiB"),
        (lambda folder: None, ("--max-model-len", "999999"), "--max-model-len 999999 is above the model's"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_the_port_is_tried(tmp_path, change, flags, message):
    folder = tmp_path / "model"
    shutil.copytree(demo_model_dir(), folder)
    change(folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(plans.SetupError, match=message):
            plan("--model", str(folder), "--port", port, "--log-dir", str(tmp_path / "logs"), *flags)
    assert not (tmp_path / "logs").exists()


# The stacks of this machine


@pytest.mark.parametrize("flags", [["--log-dir"], ["--detach", "--log-dir"], ["--ready-file"]])
def test_a_folder_that_cannot_be_written_is_named_by_its_flag(tmp_path, capsys, flags):
    path = tmp_path / "file" / "inside"
    path.parent.write_text("")
    assert cli.main(["up", "--port", "0", *flags, str(path)]) == 1
    words = capsys.readouterr().err.splitlines()[-1]
    assert words == f"quire: error: {flags[-1]} {path}: Not a directory; choose a folder that can be written"


def test_a_stack_is_listed_while_its_process_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert stacks.running() == []
    entry = stacks.RunningStack(
        state="starting", model="m", target="a:1", http=["http://a:2/v1"], log_dir=str(tmp_path)
    )
    assert not stacks.is_serving(os.getpid())
    entry.update(state="serving")
    assert stacks.is_serving(os.getpid())
    (facts,) = stacks.running()
    assert (facts["pid"], facts["model"]) == (os.getpid(), "m")
    assert cli.main(["ps"]) == 0
    assert f"{os.getpid()}  m      serving  a:1" in capsys.readouterr().out
    (tmp_path / "gateway.log").write_text("one\ntwo\n")
    assert cli.main(["logs", "--service", "worker-0"]) == 1
    assert "has no log of 'worker-0'" in capsys.readouterr().err
    assert cli.main(["stop", "other"]) == 1
    assert f"no single stack is other; running: {os.getpid()} (m)" in capsys.readouterr().err
    entry.close()
    assert stacks.running() == []


def test_the_entry_of_a_killed_process_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stacks.folder().mkdir(parents=True)
    left = stacks.folder() / "1.json"
    left.write_text('{"pid": 1}')
    assert stacks.running() == []
    assert not left.exists()


# Text output
