"""The links between the nodes of a worker: joining, messages, refusals, losses, and hostile connections."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

import pytest
import trustme

from svc_common.security.tls import TlsFiles
from svc_common.security.trust import Tokens, Trust, TrustError, check_reach
from worker_svc.engine.nodes import NodesError, difference
from worker_svc.flags import check_node_flags, make_parser
from worker_svc.node_links import frames, identity, leader_link, node_server, tunnel
from worker_svc.node_links.frames import LinkError, receive_frame, receive_text, send_frame
from worker_svc.node_links.leader_link import LeaderLink
from worker_svc.node_links.node_server import NodeServer

FACTS = {"version": "engine-1", "dtype": "float32"}
SECURITY = ("nothing", "tokens", "certificates", "both")
SLACK_S = 20.0
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Leader:
    """A started server and what it has noticed."""

    server: NodeServer
    ends: Queue[tuple[str, int]] = field(default_factory=Queue)
    drains: Queue[bool] = field(default_factory=Queue)


class Secrets:
    """Trust of workers of one deployment, and of processes that do not belong to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(folder / "ca.crt")

    def trust(self, security: str, *, name: str = "quire-worker", token: str = "token-of-workers") -> Trust:
        has_tokens, has_files = security in ("tokens", "both"), security in ("certificates", "both")
        return Trust(
            "worker", self._files(name) if has_files else None, tokens=self._tokens(token) if has_tokens else None
        )

    def _tokens(self, token: str) -> Tokens:
        path = self._folder / f"tokens-{token}"
        path.write_text(f"worker {token}\n")
        return Tokens(path)

    def _files(self, name: str) -> TlsFiles:
        issued = self._authority.issue_cert(name)
        cert, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return TlsFiles(cert, key, self._folder / "ca.crt")


@pytest.fixture
def secrets(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


@pytest.fixture
def lead(secrets: Secrets) -> Iterator[Callable[..., Leader]]:
    """Starts leaders."""
    with contextlib.ExitStack() as stack:

        def start(
            security: str = "tokens", *, nodes: int = 2, timeout_s: float = SLACK_S, store_port: int = 1
        ) -> Leader:
            drains: Queue[bool] = Queue()
            server = NodeServer("127.0.0.1:0", secrets.trust(security), nodes, timeout_s, lambda: drains.put(True))
            leader = Leader(server, drains=drains)
            server.start(store_port, FACTS, lambda *end: leader.ends.put(end))
            stack.callback(server.stop)
            return leader

        yield start


def join(leader: Leader, trust: Trust, rank: int = 1, timeout_s: float = SLACK_S, **changed: str) -> LeaderLink:
    link = LeaderLink(leader.server.address, trust, rank)
    link.join(FACTS | changed, timeout_s)
    return link


@pytest.mark.parametrize("security", SECURITY)
def test_a_worker_of_three_nodes(lead: Callable[..., Leader], secrets: Secrets, security: str) -> None:
    """Nodes join in any order, receive all messages in order, reach the store, and stop after the last message."""
    with echo_server() as port:
        leader = lead(security, nodes=3, store_port=port)
        links = [join(leader, secrets.trust(security), rank) for rank in (2, 1)][::-1]
        outboxes = leader.server.wait_joined()
        messages = [b"s" * size for size in (1, 70_000, 3 << 20)]
        sending = threading.Thread(target=lambda: [outbox.send_bytes(m) for m in messages for outbox in outboxes])
        sending.start()
        received: dict[int, list[bytes]] = {}
        readers = [
            threading.Thread(target=lambda i=i: received.update({i: [links[i].recv_bytes() for _ in messages]}))
            for i in (0, 1)
        ]
        for thread in readers:
            thread.start()
        for thread in (*readers, sending):
            thread.join(SLACK_S)
        assert received == {0: messages, 1: messages}
        for link in links:
            echo(link.store_port, os.urandom(2 << 20))
            link.report_loaded({"numerics": "a"})
        leader.server.wait_loaded({"numerics": "a"})
        links[1].report_drain()
        assert leader.drains.get(timeout=SLACK_S)
        leader.server.stop()
        for link in links:
            with pytest.raises(EOFError):
                link.recv_bytes()
        assert leader.ends.empty()


@contextlib.contextmanager
def echo_server() -> Iterator[int]:
    """Stands for the store: it answers each connection with the bytes that it sends."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(client: socket.socket) -> None:
            with client:
                while data := client.recv(1 << 16):
                    client.sendall(data)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


def echo(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), SLACK_S) as client:
        threading.Thread(target=client.sendall, args=(data,), daemon=True).start()
        assert frames.read(client, len(data), time.monotonic() + SLACK_S) == data


@pytest.mark.parametrize(
    ("rank", "changed", "message"),
    [
        (1, {"dtype": "bfloat16"}, "node 1 has dtype bfloat16, the leader has float32; start all nodes with the same"),
        (1, {"version": "engine-2"}, "node 1 has version engine-2, the leader has engine-1"),
        (1, {"nnodes": "4"}, "node 1 has nnodes 4, the leader has none"),
        (2, {}, "--node-rank 2 is not from 1 to 1: the leader has --nnodes 2"),
        (0, {}, "--node-rank 0 is not from 1 to 1"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(lead, secrets, rank, changed, message):
    leader = lead(timeout_s=0.2)
    with pytest.raises(NodesError, match=re.escape(message)):
        join(leader, secrets.trust("tokens"), rank, **changed)
    with pytest.raises(NodesError, match=r"node 1 of 2 did not join within 0\.2 s .*; the last refusal: ") as missing:
        leader.server.wait_joined()
    assert message.partition(";")[0] in str(missing.value)


def test_a_rank_can_be_taken_once(lead, secrets):
    leader = lead()
    join(leader, secrets.trust("tokens"))
    with pytest.raises(NodesError, match=r"--node-rank 1 is taken by 127\.0\.0\.1:\d+; each node needs its own"):
        join(leader, secrets.trust("tokens"))


def test_missing_nodes_are_named(lead, secrets):
    leader = lead(nodes=4, timeout_s=0.2)
    join(leader, secrets.trust("tokens"), 2)
    with pytest.raises(
        NodesError, match=r"nodes 1, 3 of 4 did not join within 0\.2 s \(--node-timeout-s\); start each"
    ):
        leader.server.wait_joined()


def test_a_leader_that_is_missing_is_named(secrets):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nothing listens
        link = LeaderLink(f"127.0.0.1:{unused.getsockname()[1]}", secrets.trust("nothing"), 1)
        with pytest.raises(
            NodesError, match=r"--leader-address 127\.0\.0\.1:\d+: no connection within 0\.1 s .*refused"
        ):
            link.join(FACTS, 0.1)


@pytest.mark.parametrize(
    ("of_leader", "of_node", "message"),
    [
        ({"security": "tokens"}, {"security": "tokens", "token": "another-token-01"}, "compare the token files"),
        ({"security": "tokens"}, {"security": "nothing"}, "compare the token files"),
        ({"security": "nothing"}, {"security": "tokens"}, "compare the token files"),
        ({"security": "certificates"}, {"security": "certificates", "name": "quire-gateway"}, "closed"),
        (
            {"security": "certificates", "name": "quire-gateway"},
            {"security": "certificates"},
            "names quire-gateway, not",
        ),
        ({"security": "both"}, {"security": "certificates"}, "compare the token files"),
        ({"security": "certificates"}, {"security": "tokens"}, ""),
        ({"security": "tokens"}, {"security": "certificates"}, ""),
    ],
)
def test_a_process_that_is_no_worker_of_this_deployment_is_refused(monkeypatch, secrets, of_leader, of_node, message):
    """Also a leader that is not: a node proves its token without sending it, and takes no messages."""
    handshake_s = SLACK_S if message else 0.5  # without a message each waits for the other
    monkeypatch.setattr(node_server, "HANDSHAKE_S", handshake_s)
    monkeypatch.setattr(leader_link, "HANDSHAKE_S", handshake_s)
    server = NodeServer("127.0.0.1:0", secrets.trust(**of_leader), 2, 0.1, lambda: None)
    server.start(1, FACTS, lambda *end: None)
    link = LeaderLink(server.address, secrets.trust(**of_node), 1)
    with pytest.raises(NodesError, match=f"no connection within .*{message}"):
        link.join(FACTS, 0.1)
    with pytest.raises(NodesError, match="node 1 of 2 did not join"):
        server.wait_joined()
    server.stop()


def test_the_token_is_not_sent(secrets):
    ours, theirs = socket.socketpair()
    seen: list[bytes] = []

    def read() -> None:
        with theirs:
            seen.append(theirs.recv(1 << 16))

    theirs.sendall(identity.MAGIC + bytes(32))
    reader = threading.Thread(target=read)
    reader.start()
    with ours, contextlib.suppress(OSError):
        identity.Identity(secrets.trust("tokens")).connect(ours, time.monotonic() + SLACK_S)
    reader.join()
    assert len(seen[0]) == len(identity.MAGIC) + 64
    assert b"token-of" not in seen[0]


def test_a_lost_node_ends_the_leader(lead, secrets):
    leader = lead()
    link = join(leader, secrets.trust("tokens"))
    leader.server.wait_joined()
    link._reports.close()
    reason, exit_code = leader.ends.get(timeout=SLACK_S)
    assert re.fullmatch(r"node 1 \(127\.0\.0\.1:\d+\) is lost: the connection was closed", reason)
    assert exit_code == 70


def test_the_reason_of_a_node_is_that_of_the_leader(lead, secrets):
    leader = lead()
    link = join(leader, secrets.trust("tokens"))
    leader.server.wait_joined()
    link.report_end("rank-3 ended (exit code -9)", 70)
    link._reports.close()
    assert leader.ends.get(timeout=SLACK_S)[0].endswith("): rank-3 ended (exit code -9)")


def test_a_node_that_has_not_joined_wholly_may_try_again(lead, secrets):
    leader = lead()
    half = LeaderLink(leader.server.address, secrets.trust("tokens"), 1)
    half._open("reports", facts=FACTS).close()
    deadline = time.monotonic() + SLACK_S
    while leader.server._links:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    join(leader, secrets.trust("tokens"))
    leader.server.wait_joined()
    assert leader.ends.empty()


def test_a_node_may_try_again_before_its_first_connection_has_ended(lead, secrets):
    leader = lead()
    link = LeaderLink(leader.server.address, secrets.trust("tokens"), 1)
    with link._open("reports", facts=FACTS):
        with pytest.raises(NodesError, match="is taken"):
            join(leader, secrets.trust("tokens"))
        link.join(FACTS, SLACK_S)
    leader.server.wait_joined()
    link.report_drain()
    assert leader.drains.get(timeout=SLACK_S)
    assert leader.ends.empty()


def test_no_thread_accepts_nodes_after_the_stop(lead):
    leader = lead()
    [accepting] = [thread for thread in threading.enumerate() if thread.name == "node-server"]
    leader.server.stop()
    accepting.join(SLACK_S)
    assert not accepting.is_alive()


def test_a_lost_leader_is_not_an_end(lead, secrets):
    leader = lead()
    link = join(leader, secrets.trust("tokens"))
    leader.server.wait_joined()
    leader.server._links[1].steps.close()
    with pytest.raises(LinkError, match="the connection was closed"):
        link.recv_bytes()


def test_other_results_of_loading_are_refused(lead, secrets):
    leader = lead()
    join(leader, secrets.trust("tokens")).report_loaded({"weights_digest": "b"})
    leader.server.wait_joined()
    with pytest.raises(NodesError, match=r"node 1 \(.*\) has weights_digest b, the leader has a"):
        leader.server.wait_loaded({"weights_digest": "a"})


def test_a_bad_address_is_a_bind_error(secrets):
    with pytest.raises(node_server.BindError, match=r"--node-listen 192\.0\.2\.1:1: "):
        NodeServer("192.0.2.1:1", secrets.trust("nothing"), 2, 1.0, lambda: None)


# -- hostile connections ----------------------------------------------------------------------------------------------


class Bomb:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (99,)


@pytest.mark.parametrize("security", ["tokens", "certificates"])
def test_hostile_connections_do_not_keep_a_node_from_joining(lead, secrets, monkeypatch, caplog, security):
    """Garbage, silence, long streams, more connections than may shake hands: each is closed within the limit."""
    monkeypatch.setattr(node_server, "HANDSHAKE_S", 0.5)
    threads = set(threading.enumerate())
    leader = lead(security)
    port = int(leader.server.address.rpartition(":")[2])
    contents = (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        pickle.dumps(Bomb()),
        identity.MAGIC,
        b"\xff" * (1 << 20),
    )
    attackers = []
    for content in contents * 10:
        client = socket.create_connection(("127.0.0.1", port), SLACK_S)
        attackers.append(client)
        with contextlib.suppress(OSError):
            client.sendall(content)
    for client in attackers:
        wait_closed(client)
    join(leader, secrets.trust(security))
    leader.server.wait_joined()
    assert leader.ends.empty()
    assert {record.levelno for record in caplog.records} <= {logging.INFO, logging.WARNING}
    deadline = time.monotonic() + SLACK_S
    # Threads of the node that has joined stay.
    while len({thread for thread in threading.enumerate() if "_handshake" in thread.name} - threads) > 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_closed(client: socket.socket) -> None:
    with client, contextlib.suppress(ConnectionError):
        while client.recv(1 << 16):
            pass


def test_a_slow_handshake_has_one_deadline(lead, monkeypatch):
    """Not one per byte."""
    monkeypatch.setattr(node_server, "HANDSHAKE_S", 0.3)
    port = int(lead().server.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), SLACK_S) as client:
        started = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - started < SLACK_S:
                client.sendall(identity.MAGIC[:1])
                time.sleep(0.05)
        assert time.monotonic() - started < SLACK_S / 2


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ({"purpose": "reports", "node_rank": True, "session": "s", "facts": FACTS}, "--node-rank True is not"),
        ({"purpose": "reports", "node_rank": "1", "session": "s", "facts": FACTS}, "--node-rank '1' is not"),
        ({"purpose": "reports", "node_rank": 1, "session": "s", "facts": [1]}, "no facts"),
        ({"purpose": "reports", "node_rank": 1, "session": 5, "facts": FACTS}, "no session"),
        ({"purpose": "shell", "node_rank": 1, "session": "s"}, "no known purpose"),
        ({"purpose": "store", "node_rank": 1, "session": "s"}, "node 1 has not joined"),
        ({"purpose": "steps", "node_rank": 1, "session": "s"}, "node 1 has not joined"),
        ({}, "--node-rank None is not"),
    ],
)
def test_a_known_worker_may_not_send_anything(lead, secrets, first, message):
    leader = lead()
    with shaken(leader, secrets) as connection:
        frames.send_text(connection, first)
        assert message in receive_text(connection)["refused"]
    assert not leader.server._links


@pytest.mark.parametrize("content", [struct.pack("<I", frames.MAX_TEXT + 1), b"\4\0\0\0null", b"\2\0\0\0\xff{"])
def test_bad_first_frames_close_the_connection(lead, secrets, content):
    leader = lead()
    with shaken(leader, secrets) as connection:
        connection.sendall(content)
        assert connection.recv(1) == b""


@pytest.mark.parametrize("content", [b"[" * frames.MAX_TEXT, b"{}x", b"\xff\xfe", b"1"])
def test_a_text_is_a_json_object(content):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=send_frame, args=(theirs, content), daemon=True).start()
        with pytest.raises(LinkError, match="not a JSON object"):
            receive_text(ours)


def test_memory_is_taken_as_bytes_arrive():
    """A frame may announce more than it has."""
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(struct.pack("<I", frames.MAX_MESSAGE) + b"few")
        theirs.close()
        with pytest.raises(LinkError, match="the connection was closed"):
            receive_frame(ours, frames.MAX_MESSAGE)


@contextlib.contextmanager
def shaken(leader: Leader, secrets: Secrets) -> Iterator[socket.socket]:
    host, _, port = leader.server.address.rpartition(":")
    with socket.create_connection((host, int(port)), SLACK_S) as connection:
        yield identity.Identity(secrets.trust("tokens")).connect(connection, time.monotonic() + SLACK_S)


def test_a_link_notices_a_lost_host():
    with socket.socket() as connection:
        frames.prepare(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


HOST_IS_LOST = """
import fcntl, socket, struct, threading
from queue import Queue
from svc_common.security.trust import Trust
from worker_svc.node_links import frames
from worker_svc.node_links.leader_link import LeaderLink
from worker_svc.node_links.node_server import NodeServer

def set_loopback(flags):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", flags))  # SIOCSIFFLAGS

def read():
    try:
        link.recv_bytes()
    except OSError as error:
        ends.put(str(error))

set_loopback(1)
frames.KEEP_ALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 2000}
ends = Queue()
server = NodeServer("127.0.0.1:0", Trust("worker"), 2, 20.0, lambda: None)
server.start(1, {}, lambda reason, exit_code: ends.put(reason))
link = LeaderLink(server.address, Trust("worker"), 1)
link.join({}, 20.0)
server.wait_joined()
threading.Thread(target=read, daemon=True).start()
set_loopback(0)
print(sorted(ends.get(timeout=20) for _ in range(2)))
"""


def may_make_a_network() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0


@pytest.mark.deep
def test_both_ends_notice_a_host_that_is_lost_without_a_fin():
    if not may_make_a_network():
        pytest.skip("takes the loopback interface of its own network down")
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", HOST_IS_LOST], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert re.search(r"\['\[Errno \d+\] .*', 'node 1 \(127.*\) is lost: \[Errno \d+\] ", done.stdout), done.stderr


def test_the_proxy_of_the_store_is_for_this_host_only():
    proxy = tunnel.StoreProxy(lambda: pytest.fail("no connection was made"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", proxy.port), 1.0)
    proxy.close()


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--nnodes", "2"), "--node-listen is required for --node-rank 0 with --nnodes of 2 or more"),
        (("--nnodes", "2", "--node-rank", "1"), "--leader-address is required for --node-rank 1 or more"),
        (
            ("--node-listen", "127.0.0.1:1"),
            "--node-listen 127.0.0.1:1 is only for --node-rank 0 with --nnodes of 2 or more",
        ),
        (
            ("--nnodes", "2", "--node-listen", "127.0.0.1:1", "--leader-address", "a:1"),
            "--leader-address a:1 is only for",
        ),
        (("--nnodes", "2", "--node-listen", "127.0.0.1:1", "--executor", "sim"), "--nnodes 2 needs --executor model"),
    ],
)
def test_addresses_fit_the_number_of_the_node(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_node_flags(make_parser().parse_args(["--model", "m", *flags]))


def test_the_port_is_not_open_to_strangers():
    args = make_parser().parse_args(["--model", "m", "--nnodes", "2", "--node-listen", "0.0.0.0:7"])
    with pytest.raises(TrustError, match=r"other machines can connect to 0\.0\.0\.0:7"):
        check_reach(args, Trust("worker"), args.listen, args.node_listen)


def test_differences_name_both_values():
    assert difference("node 1", FACTS, FACTS) == ""
    assert "node 1 has dtype none, the leader has float32" in difference("node 1", FACTS, {"version": "engine-1"})
