"""`quire batch` against a scripted HTTP server: files, following, retries, errors."""

import json
import threading
from http.server import BaseHTTPRequestHandler

import pytest
import quire_cli as cli

from tests.http_thread import HttpThread

LINES = [{"custom_id": name, "url": "/v1/completions", "body": {"prompt": name}} for name in "abcd"]
ANSWERS = [
    {"custom_id": name, "response": {"status_code": 200, "body": {"usage": {"completion_tokens": 2}}}}
    for name in "abcd"
]


def batch_object(status="completed", failed=0, **more):
    counts = {"total": 4, "completed": 4 - failed, "failed": failed}
    files = {"output_file_id": "out", "error_file_id": "err" if failed else None}
    return {"id": "batch_1", "status": status, "request_counts": counts, "errors": None, **files, **more}


class Server(HttpThread):
    """Keeps one batch, whose states are those of `states` in turn. `script`: statuses of the first answers; 0: none."""

    def __init__(self, states=(), script=(), errors=()):
        super().__init__(Handler)
        self.states = list(states) or [batch_object()]
        self.script = list(script)
        self.files = {"out": ANSWERS[: 4 - len(errors)], "err": list(errors)}
        self.calls = []
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["content-length"])))

    def do_GET(self):
        self.answer(b"")

    def answer(self, body):
        server = self.server
        with server.lock:
            server.calls.append((self.command, self.path, body, self.headers.get("authorization")))
            status = server.script.pop(0) if server.script else 200
            state = server.states.pop(0) if len(server.states) > 1 and self.command == "GET" else server.states[0]
        if status == 0:
            self.close_connection = True
            return
        found = {"id": "file-1"} if self.path == "/v1/files" else state
        data = json.dumps(found).encode()
        if self.path.endswith("/content"):
            data = "".join(json.dumps(one) + "\n" for one in server.files[self.path.split("/")[3]]).encode()
        if status != 200:
            data = json.dumps({"error": {"message": f"status {status}"}}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in LINES))
    return path


@pytest.fixture
def output(tmp_path):
    return tmp_path / "output.jsonl"


def batch(source, output, server, *flags):
    url = server if isinstance(server, str) else server.url
    return cli.main(["batch", str(source), "-o", str(output), "--base-url", url, *flags])


def answered(output):
    return [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]


def test_a_batch_is_started_followed_and_written(source, output, capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "from-environment")
    with Server([batch_object("validating"), batch_object("in_progress"), batch_object()]) as server:
        assert batch(source, output, server, "--json", "--window", "2h") == 0
    (upload, create, *_) = server.calls
    assert source.read_bytes() in upload[2]
    body = {"endpoint": "/v1/completions", "completion_window": "2h", "input_file_id": "file-1"}
    assert json.loads(create[2]) == body
    assert {call[3] for call in server.calls} == {"Bearer from-environment"}
    assert answered(output) == list("abcd")
    summary = json.loads(capsys.readouterr().out)
    assert (summary["num_answered"], summary["output_tokens"], summary["num_errors"]) == (4, 8, 0)
    assert [path.name for path in output.parent.iterdir()] == ["input.jsonl", "output.jsonl"]


OLD = (
    {"choices": [{"message": {"content": "chat"}}]}, {"choices": [{"text": "text"}]}, {"choices": []},
    {"content": [{"type": "text", "text": "mess"}, {"type": "text", "text": "age"}]},
    {"output": [{"type": "reasoning"}, {"type": "message", "content": [{"text": "response"}]}]}, {"error": {}}, None,
)  # fmt: skip


def test_old_answers_are_drafts_of_the_lines_with_their_ids(tmp_path):
    old, source = tmp_path / "old.jsonl", tmp_path / "input.jsonl"
    results = [{"custom_id": str(i), "response": body and {"body": body}} for i, body in enumerate(OLD)]
    old.write_text("".join(json.dumps(one) + "\n" for one in results))
    lines = [{"custom_id": str(i), "url": "/v1/completions", "body": {"prompt": "a"}} for i in range(9)]
    lines[1]["body"]["draft_text"] = "own"
    source.write_text("\n".join(map(json.dumps, lines)))
    with Server() as server:
        assert batch(source, tmp_path / "output", server, "--drafts", str(old)) == 0
        sent = [json.loads(line) for line in server.calls[0][2].splitlines() if line.startswith(b"{")]
        old.write_text("no")
        assert batch(source, tmp_path / "output2", server, "--drafts", str(old)) == 2
    found = [line["body"].pop("draft_text", None) for line in sent]
    assert found == ["chat", "own", None, "message", "response", None, None, None, None]
    assert [line["custom_id"] for line in sent] == list("012345678")


@pytest.mark.parametrize(
    ("response", "code", "words"),
    [
        ({"status_code": 400, "body": {}}, 3, "1 of the answers are errors"),
        (None, 1, "1 not answered: the batch is expired"),
    ],
)
def test_lines_that_fail(source, output, capsys, response, code, words):
    with Server([batch_object("expired", failed=1)], errors=[{"custom_id": "d", "response": response}]) as server:
        assert batch(source, output, server) == code
    assert answered(output) == list("abcd")
    assert words in capsys.readouterr().out


def test_an_invalid_file_is_named(source, output, capsys):
    problem = {"data": [{"line": 2, "message": "custom_id is already in line 1"}]}
    with Server([batch_object("failed", errors=problem)]) as server:
        assert batch(source, output, server) == 2
    assert "line 2: custom_id is already in line 1" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 429, 503])
def test_failures_that_may_pass_are_retried(source, output, status):
    with Server(script=[status, status]) as server:
        assert batch(source, output, server) == 0
    assert answered(output) == list("abcd")


@pytest.mark.parametrize(
    ("status", "words"), [(401, "set --api-key or QUIRE_API_KEY"), (400, "status 400"), (404, "status 404")]
)
def test_other_errors_end_the_command(source, output, capsys, status, words):
    with Server(script=[status]) as server:
        assert batch(source, output, server) == 1
    assert words in capsys.readouterr().err


def test_a_second_server_takes_over(source, output, capsys):
    with Server() as dead:
        url = dead.url
    with Server() as server:
        assert batch(source, output, f"{url},{server.url}/v1") == 0
    assert "trying again" in capsys.readouterr().err
    output.unlink()
    assert batch(source, output, url, "--retry-timeout-s", "0.5") == 1
    assert "Connection refused" in capsys.readouterr().err


def test_files_that_cannot_be_used(source, tmp_path, capsys):
    assert batch(tmp_path / "none.jsonl", tmp_path / "o", "http://localhost:1") == 2
    assert "none.jsonl: No such file or directory" in capsys.readouterr().err
    assert batch(source, tmp_path / "no" / "o", "http://localhost:1") == 2
    assert batch(source, source, "http://localhost:1") == 2
    source.write_text("\n")
    assert batch(source, tmp_path / "o", "http://localhost:1") == 2
    assert "has no requests" in capsys.readouterr().err
