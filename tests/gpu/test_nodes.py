"""The ranks of a host other than the leader's: a lost leader or rank ends the host's process; all messages arrive."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest

from tests.gpu.test_runner import HEADS_4_2, SMALL
from tests.unit.engine.models import make_model
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.collectives.rendezvous import make_store
from worker_svc.engine.gpu.messages import RESET_ROWS, STOP
from worker_svc.engine.gpu.ranks import node as node_module
from worker_svc.engine.gpu.ranks.local import EXIT_RANK_LOST, LocalRanks
from worker_svc.engine.gpu.ranks.node import _Node
from worker_svc.engine.gpu.ranks.parallel_runner import start_facts
from worker_svc.engine.nodes import difference

CONFIG = EngineConfig(Path(), backend="cuda", tensor_parallel_size=4, nnodes=2, node_rank=1)


class FakeLeader:
    """Sends the given messages; an error is raised."""

    def __init__(self, *messages):
        self.messages = list(messages)
        self.ended = []
        self._store = make_store(4)  # ends with its object
        self.store_port = self._store.port

    def recv_bytes(self):
        message = self.messages.pop(0)
        if isinstance(message, BaseException):
            raise message
        return message

    def report_end(self, *end):
        self.ended.append(end)


@pytest.fixture
def make_node(monkeypatch):
    """A node without child processes whose end is a SystemExit."""
    monkeypatch.setattr(os, "_exit", sys.exit)

    def make(leader):
        return _Node(replace(CONFIG, tensor_parallel_size=2), leader)

    return make


def test_messages_go_to_all_ranks_of_the_host(make_node):
    node = make_node(FakeLeader(b"first", RESET_ROWS, EOFError()))
    inbox, outbox = Pipe(duplex=False)
    node._others.outboxes.append(outbox)
    node._is_loaded = True
    node._has_finished.set()
    node._relay()
    for receive in (node._messages.recv_bytes, inbox.recv_bytes):
        assert [receive() for _ in range(3)] == [b"first", RESET_ROWS, STOP]


def test_a_lost_leader_ends_the_host(make_node, caplog):
    with pytest.raises(SystemExit) as left:
        make_node(FakeLeader(OSError("the connection was closed")))._relay()
    assert left.value.code == EXIT_RANK_LOST
    assert "the leader is lost: the connection was closed; this node exits with code 70" in caplog.text


@pytest.mark.parametrize(
    ("is_loaded", "exit_code", "message"),
    [(False, 0, "was still loading"), (True, EXIT_RANK_LOST, "a step did not finish within 0.01 s")],
)
def test_a_stopped_leader_never_leaves_a_host_waiting(make_node, monkeypatch, caplog, is_loaded, exit_code, message):
    """Its rank waits in a collective for ranks that are gone."""
    caplog.set_level("INFO")
    monkeypatch.setattr(node_module, "JOIN_TIMEOUT_S", 0.01)
    node = make_node(FakeLeader(EOFError()))
    node._is_loaded = is_loaded
    with pytest.raises(SystemExit) as left:
        node._relay()
    assert left.value.code == exit_code
    assert message in caplog.text


def test_a_lost_rank_is_reported_and_ends_the_host(make_node, monkeypatch):
    monkeypatch.setattr(LocalRanks, "end_within", lambda ranks, timeout_s: ("rank-3 ended (exit code -9)", 70))
    leader = FakeLeader()
    with pytest.raises(SystemExit):
        make_node(leader)._watch()
    assert leader.ended == [("rank-3 ended (exit code -9)", 70)]


def test_ranks_are_divided_among_hosts(make_node, monkeypatch):
    made = []
    monkeypatch.setattr(LocalRanks, "__init__", lambda self, config, ranks, store: made.append(list(ranks)))
    node = _Node(CONFIG, FakeLeader())
    assert (node._first, made) == (2, [[3]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"node_rank": 2}, "node_rank must be from 0 to nnodes - 1 = 1, got 2"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size must be a multiple of nnodes 2, got 3"),
        ({"backend": "cpu"}, "backend with nnodes=2 must be one of cuda, got 'cpu'"),
    ],
)
def test_bad_numbers_of_hosts_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **settings)


def test_hosts_compare_settings_and_models(tmp_path):
    """Paths, names and the number of the host may differ."""
    folders = [make_model(tmp_path / name, "qwen3", **(SMALL | HEADS_4_2 | more))
               for name, more in (("a", {}), ("b", {}), ("c", {"num_hidden_layers": 1}))]  # fmt: skip
    config = replace(CONFIG, model_dir=folders[0])
    expected = start_facts(replace(config, node_rank=0, model_name="m"))
    assert difference("node 1", expected, start_facts(replace(config, model_dir=folders[1], threads=2))) == ""
    assert "has block_size 32" in difference("node 1", expected, start_facts(replace(config, block_size=32)))
    assert "has config.json " in difference("node 1", expected, start_facts(replace(config, model_dir=folders[2])))
