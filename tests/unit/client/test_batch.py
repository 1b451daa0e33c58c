"""`quire batch` against a scripted HTTP server: files, retries, errors, continuation."""

import json
import threading
from http.server import BaseHTTPRequestHandler

import pytest
import quire_cli as cli
from quire_batch.command import BatchCounts, Progress
from quire_batch.files import BatchFileError, Response, ResultFile, check_input
from quire_batch.http import parse_servers
from quire_client.errors import InvalidRequest

from tests.http_thread import HttpThread


class Server(HttpThread):
    """Answers with the statuses of `script` first, then with 200; status 0 closes the connection without an answer."""

    def __init__(self, script=()):
        super().__init__(Handler)
        self.script = list(script)
        self.received = []
        self.keys = []
        self.lock = threading.Lock()
        self.num_open = self.max_open = 0
        self.together = 1
        self.arrived = threading.Condition()

    def wait_for_others(self):
        """Wait until `together` requests are open at the same time, so that the concurrency is visible."""
        with self.arrived:
            self.num_open += 1
            self.max_open = max(self.max_open, self.num_open)
            self.arrived.notify_all()
            self.arrived.wait_for(lambda: self.max_open >= self.together, timeout=10)
            self.num_open -= 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.received.append((self.path, body))
            self.server.keys.append(self.headers.get("authorization"))
            status = self.server.script.pop(0) if self.server.script else 200
        self.server.wait_for_others()
        if status == 0:
            self.close_connection = True
            return
        answer = {"usage": {"prompt_tokens": 1, "completion_tokens": 2}, "echo": body.get("prompt")}
        if status != 200:
            answer = {"error": {"message": f"status {status}"}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("x-request-id", f"req-{body.get('prompt')}")
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(data)


def line(custom_id, /, **changes):
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": custom_id}}
    return json.dumps(fields | changes)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_text("".join(f"{line(name)}\n" for name in "abcd"))
    return path


@pytest.fixture
def output(tmp_path):
    return tmp_path / "output.jsonl"


def results(output):
    found = [json.loads(text) for text in output.read_text().splitlines()]
    assert len({fields["custom_id"] for fields in found}) == len(found)
    return {fields["custom_id"]: fields for fields in found}


def batch(source, output, server, *flags):
    url = server if isinstance(server, str) else server.url
    return cli.main(["batch", str(source), "-o", str(output), "--base-url", url, *flags])


def test_a_batch_in_the_openai_format(source, output, capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "from-environment")
    with Server() as server:
        assert batch(source, output, server, "--json") == 0
    found = results(output)
    assert set(found) == set("abcd")
    assert found["b"]["id"].startswith("batch_req_")
    assert found["b"]["error"] is None
    assert found["b"]["response"]["status_code"] == 200
    assert found["b"]["response"]["request_id"] == "req-b"
    assert found["b"]["response"]["body"]["echo"] == "b"
    assert set(server.keys) == {"Bearer from-environment"}
    summary = json.loads(capsys.readouterr().out)
    assert (summary["num_answered"], summary["output_tokens"], summary["num_errors"]) == (4, 8, 0)


def test_requests_have_the_lowest_priority_unless_given(source, output):
    source.write_text(line("a") + "\n" + line("b", body={"prompt": "b", "priority": 3}) + "\n")
    with Server() as server:
        assert batch(source, output, server, "--api-key", "key") == 0
    assert sorted(body["priority"] for _, body in server.received) == [3, 1000]
    assert set(server.keys) == {"Bearer key"}


def test_concurrency_is_bounded_and_used(tmp_path, output):
    source = tmp_path / "many.jsonl"
    source.write_text("".join(f"{line(str(i))}\n" for i in range(12)))
    with Server() as server:
        server.together = 3
        assert batch(source, output, server, "--concurrency", "3") == 0
    assert server.max_open == 3


@pytest.mark.parametrize("status", [0, 429, 503])
def test_failures_that_may_pass_are_retried(source, output, status):
    with Server([status, status]) as server:
        assert batch(source, output, server) == 0
    assert len(server.received) == 6
    assert set(results(output)) == set("abcd")


def test_an_error_is_an_answer(source, output, capsys):
    with Server([400, 500]) as server:
        assert batch(source, output, server, "--concurrency", "1") == 3
        assert "2 of the answers are errors" in capsys.readouterr().out
        found = results(output)
        assert found["a"]["response"]["status_code"] == 400
        assert found["a"]["response"]["body"] == {"error": {"message": "status 400"}}
        assert batch(source, output, server) == 3  # nothing left to send, but the output has errors
    assert len(server.received) == 4


def test_a_wrong_key_stops_the_batch(source, output, capsys):
    with Server([401]) as server:
        assert batch(source, output, server, "--concurrency", "1") == 1
    assert len(server.received) == 1
    assert results(output) == {}
    assert "status 401; set --api-key or QUIRE_API_KEY" in capsys.readouterr().out


def test_an_unknown_path_stops_the_batch(source, output, capsys):
    with Server([404]) as server:
        assert batch(source, output, server, "--concurrency", "1") == 1
    assert "is --base-url an OpenAI-compatible server?" in capsys.readouterr().out


def test_without_a_server_requests_stay_unanswered(source, output, capsys):
    with Server() as server:
        url = server.url
    assert batch(source, output, url, "--retry-timeout-s", "2") == 1
    captured = capsys.readouterr()
    assert "4 not answered: run the same command again" in captured.out
    assert "Connection refused" in captured.out
    assert "no answer yet, trying again" in captured.err


def test_a_second_server_takes_over(source, output):
    with Server() as dead:
        url = dead.url
    with Server() as server:
        assert batch(source, output, f"{url},{server.url}/v1") == 0
    assert len(server.received) == 4
    assert {path for path, _ in server.received} == {"/v1/completions"}


def test_a_second_run_sends_only_what_is_missing(source, output, capsys):
    with Server() as server:
        assert batch(source, output, server) == 0
        lines = output.read_bytes().splitlines(keepends=True)
        kept = [json.loads(text)["custom_id"] for text in lines[:2]]
        output.write_bytes(b"".join(lines[:2]) + lines[2][:-10])  # a crash cut off the third line
        server.received.clear()
        assert batch(source, output, server) == 0
    assert sorted(body["prompt"] for _, body in server.received) == sorted(set("abcd") - set(kept))
    assert set(results(output)) == set("abcd")
    assert "(2 by an earlier run)" in capsys.readouterr().out


@pytest.mark.parametrize("key", [KeyboardInterrupt])
def test_ctrl_c_keeps_the_answers(source, output, capsys, monkeypatch, key):
    shown = []

    def interrupt(progress, counts):
        shown.append(counts.num_answered)
        if counts.num_answered >= 1:
            raise key

    monkeypatch.setattr(Progress, "show", interrupt)
    with Server() as server:
        server.together = 1
        original = server.wait_for_others
        server.wait_for_others = lambda: original() if len(server.received) < 2 else threading.Event().wait(10)
        assert batch(source, output, server, "--concurrency", "1") == 130
    assert "3 not answered: run the same command again" in capsys.readouterr().out
    assert len(results(output)) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no requests"),
        ("{\n", "line 1: not valid JSON"),
        ("[]\n", "line 1: must be a JSON object; got list"),
        (line("a") + "\n\n" + line("a"), "line 3: custom_id 'a' is already used in line 1"),
        (line(""), "custom_id must be a string of 1 to 512 characters; got ''"),
        (line("a", custom_id=7), "got 7"),
        (line("a", method="GET"), "method must be POST; got 'GET'"),
        (line("a", url="/v1/embeddings"), "url must be /v1/chat/completions or /v1/completions; got '/v1/embeddings'"),
        (line("a", body="x"), "body must be a JSON object; got str"),
        (line("a", body={"stream": True}), "body.stream must be false"),
        ("x\n" * 7, "has 7 invalid lines, nothing was sent"),
        ("x\n" * 7, "and 2 more"),
    ],
)
def test_invalid_input_is_refused_before_anything_is_sent(tmp_path, text, complaint, output, capsys):
    source = tmp_path / "input.jsonl"
    source.write_text(text)
    with Server() as server:
        assert batch(source, output, server) == 2
    assert server.received == []
    assert not output.exists()
    assert complaint in capsys.readouterr().err


def test_files_that_cannot_be_used(source, tmp_path, capsys):
    assert batch(tmp_path / "none.jsonl", tmp_path / "o", "http://localhost:1") == 2
    assert "none.jsonl: No such file or directory" in capsys.readouterr().err
    assert batch(source, source, "http://localhost:1") == 2
    assert "the same file" in capsys.readouterr().err
    assert batch(source, tmp_path / "no" / "o", "http://localhost:1") == 2
    assert "cannot write" in capsys.readouterr().err
    (tmp_path / "o").write_text("something else\n")
    assert batch(source, tmp_path / "o", "http://localhost:1") == 2
    assert "line 1 of" in capsys.readouterr().err
    assert (tmp_path / "o").read_text() == "something else\n"


def test_one_process_writes_an_output(output):
    with ResultFile(output) as first:
        first.write("a", Response(200, "r", {"text": "\ud800"}))  # not valid Unicode
        with pytest.raises(BatchFileError, match="is locked by another process"):
            ResultFile(output)
    with ResultFile(output) as again:
        assert again.done == {"a"}


def test_check_input_returns_the_ids_in_order(source):
    assert check_input(source) == list("abcd")


@pytest.mark.parametrize(
    ("urls", "found"),
    [
        ("http://a:8000", ["http://a:8000"]),
        ("http://a:8000/v1/", ["http://a:8000"]),
        ("a:8000", ["http://a:8000"]),
        ("https://a/proxy/v1, http://[::1]:9", ["https://a:443/proxy", "http://[::1]:9"]),
    ],
)
def test_base_urls(urls, found):
    assert [str(server) for server in parse_servers(urls)] == found


@pytest.mark.parametrize("urls", ["", "ftp://a", "http://", "http://a:x", "http://a:99999"])
def test_wrong_base_urls(urls):
    with pytest.raises(InvalidRequest, match="--base-url"):
        parse_servers(urls)


def test_a_grpc_port_is_named(source, output, capsys):
    from quire_client.testing import FakeGateway

    with FakeGateway() as gateway:
        assert batch(source, output, f"http://{gateway.target}") == 1
    assert "if it is a gateway's gRPC port, use its HTTP port" in capsys.readouterr().out


def test_progress_names_counts_and_rates(capsys):
    counts = BatchCounts(8, num_answered=3, num_errors=1, num_retries=2, output_tokens=60, last_error="refused")
    text = Progress(2).text(counts, elapsed_s=3.0)
    assert text == (
        "5/10 [############............] 50 %, 1.0 requests/s, 20 tokens/s, 0:05 left, 1 error, 2 retries: refused"
    )
