"""AdminService on a port of its own: keys for inference cannot call it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire_cli.commands.setup import digest_line
from quire_client import Client, QuireError, Status

from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack

NO_SCHEDULER = Service("none", [], "127.0.0.1:1", Path("none"))  # no scheduler listens here
AUDIT = "operators.jsonl"
USER, OPERATOR = "key-of-a-user", "key-of-an-operator"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("users", "operators")}
    (folders["users"] / "team").write_text(USER)
    (folders["operators"] / "ops").write_text(digest_line(OPERATOR))
    return folders


@pytest.fixture(scope="module")
def ports(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses for inference and for operations."""
    admin = f"127.0.0.1:{free_port()}"
    keys = (f"--api-keys={folders['users']}", f"--admin-keys={folders['operators']}")
    flags = (*keys, f"--admin-listen={admin}", f"--audit-log={folders['operators'].parent / AUDIT}")
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        gateway = stack.start_gateway(NO_SCHEDULER, flags=flags)
        wait_for(gateway, "AdminService at")
        yield gateway.address, admin


def wait_for(service: Service, words: str) -> None:
    deadline = time.monotonic() + 30.0
    while words not in service.log():
        assert time.monotonic() < deadline, service.log()
        assert service.is_running, service.log()
        time.sleep(0.05)


def test_errors_for_clients_contain_no_address(ports: tuple[str, str]) -> None:
    with Client.connect(ports[0], api_key=USER, retry=None) as client, pytest.raises(QuireError) as refused:
        client.generate(token_ids=[1], max_tokens=1)
    assert refused.value.code.name == "UNAVAILABLE"
    assert "no model is ready yet (not connected)" in str(refused.value)
    assert NO_SCHEDULER.address not in str(refused.value)


def refusal_of_drain(address: str, key: str | None) -> tuple[str, str]:
    with Client.connect(address, api_key=key) as client, pytest.raises(QuireError) as refused:
        client.drain_worker("worker-0")
    return refused.value.code.name, str(refused.value)


def test_each_port_accepts_its_own_keys_only(ports: tuple[str, str]) -> None:
    public, admin = ports
    code, words = refusal_of_drain(public, USER)
    assert code == "PERMISSION_DENIED"
    assert "use the address of the gateway's --admin-listen" in words
    assert refusal_of_drain(public, OPERATOR)[0] == "UNAUTHENTICATED"
    assert refusal_of_drain(admin, USER)[0] == "UNAUTHENTICATED"
    assert refusal_of_drain(admin, None)[0] == "UNAUTHENTICATED"
    code, words = refusal_of_drain(admin, OPERATOR)
    assert code == "NOT_FOUND", words  # accepted: there is no such worker
    with Client.connect(admin, api_key=OPERATOR) as client, pytest.raises(QuireError) as refused:
        client.generate(token_ids=[1], max_tokens=1)
    assert refused.value.code.name == "UNIMPLEMENTED", "no inference on the port for operations"


def test_only_operators_update_weights(ports: tuple[str, str]) -> None:
    public, admin = ports
    for address, key, code in (
        (public, USER, "PERMISSION_DENIED"),
        (public, OPERATOR, "UNAUTHENTICATED"),
        (admin, USER, "UNAUTHENTICATED"),
    ):
        with Client.connect(address, api_key=key, retry=None) as client:
            for call in (client.weights, lambda: client.put_tensors("u", "a"), lambda: client.pause("p")):
                with pytest.raises(QuireError) as refused:
                    call()
                assert refused.value.code.name == code


def test_calls_of_operators_are_in_the_audit_log(ports: tuple[str, str], folders: dict[str, Path]) -> None:
    _, admin = ports
    path = folders["operators"].parent / AUDIT
    refusal_of_drain(admin, OPERATOR)
    refusal_of_drain(admin, USER)
    expected = [("ops", "NOT_FOUND"), ("", "UNAUTHENTICATED")]
    deadline = time.monotonic() + 30.0
    while drains_in(path)[-2:] != expected:
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.02)
    assert OPERATOR not in path.read_text()


def drains_in(path: Path) -> list[tuple[str, str]]:
    """Owners and results of the drains in an audit log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["owner"], line["code"]) for line in lines if line["method"].endswith("/DrainWorker")]


def status_of(address: str, key: str | None) -> Status:
    with Client.connect(address, api_key=key) as client:
        return client.status()


def test_only_operators_see_addresses(ports: tuple[str, str]) -> None:
    public, admin = ports
    summary = status_of(public, USER)
    assert summary.is_summary
    assert [(s.address, s.connected) for s in summary.schedulers] == [("", False)]
    whole = status_of(admin, OPERATOR)
    assert not whole.is_summary
    assert [s.address for s in whole.schedulers] == [NO_SCHEDULER.address]


@pytest.mark.parametrize("flag", ["--api-keys", "--admin-listen", None])
def test_the_port_for_inference_shows_workers_only_where_it_is_the_port_of_operators(
    tmp_path: Path, folders: dict[str, Path], flag: str | None
) -> None:
    values = {"--api-keys": str(folders["users"]), "--admin-listen": f"127.0.0.1:{free_port()}"}
    with Stack(tmp_path) as stack:
        gateway = stack.start_gateway(NO_SCHEDULER, flags=() if flag is None else (flag, values[flag]))
        wait_for(gateway, "listens on")
        assert status_of(gateway.address, USER).is_summary is (flag is not None)


def test_keys_for_inference_are_never_keys_for_operations(tmp_path: Path, folders: dict[str, Path]) -> None:
    with Stack(tmp_path) as stack:
        gateway = stack.start_gateway(NO_SCHEDULER, flags=(f"--api-keys={folders['users']}",))
        wait_for(gateway, "listens on")
        assert refusal_of_drain(gateway.address, USER)[0] == "PERMISSION_DENIED"


def test_an_admin_port_that_other_machines_can_reach_needs_keys(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        gateway = stack.start_gateway(NO_SCHEDULER, flags=(f"--admin-listen=0.0.0.0:{free_port()}",))
        assert gateway.wait() == 1
        assert "set --admin-keys, listen on 127.0.0.1, or set --insecure" in gateway.log()
