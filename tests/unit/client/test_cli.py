"""Output and errors of the command against a fake gateway."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import quire_cli as cli
from quire.v1 import inference_pb2 as pb
from quire_cli.arguments import COMMANDS
from quire_cli.commands import doctor
from quire_client.testing import FakeGateway

from gateway_svc.callers.authenticator import ApiKeys

KERNELS = {
    "path": "amx", "instructions": {"bfloat16": "AMX", "int8": "AMX", "float32": "AVX512"},
    "giga_operations": {"bfloat16": 1214.4, "int8": 1890.3, "float32": 120.3}, "read_gb_s": 24.5, "copy_gb_s": 17.0,
    "fastest": "amx", "is_chosen": False, "others": [],
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_probe(monkeypatch):
    """test_probe.py measures the kernels."""
    monkeypatch.setattr(doctor, "probe_kernels", lambda: KERNELS)


@pytest.fixture
def gateway(monkeypatch):
    with FakeGateway({"hi": "hello"}) as gateway:
        monkeypatch.setenv("QUIRE_TARGET", gateway.target)
        yield gateway


def run(capsys, *argv):
    """Exit code, stdout and stderr of one command."""
    try:
        code = cli.main(list(argv))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def type_in(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_generate_streams_text(gateway, capsys):
    assert run(capsys, "generate", "hi") == (0, "hello\n", "")


def test_generate_json_is_one_line(gateway, capsys):
    code, out, err = run(
        capsys, "generate", "--tokens", "104,105", "--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--json"
    )
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out) == {
        "request_id": "fake-1",
        "model": "fake",
        "seed": 0,
        "token_ids": [104, 101, 108, 108, 111],
        "text": "hello",
        "finish_reason": "eos",
        "usage": {
            "prompt_tokens": 2,
            "cached_tokens": 0,
            "output_tokens": 5,
            "recomputed_tokens": 0,
            "reasoning_tokens": 0,
            "discarded_tokens": 0,
            "processor_seconds": 0.0,
            "block_seconds": 0.0,
        },
    }
    request = gateway.requests[-1]
    assert (request.stop.max_tokens, request.stop.ignore_eos) == (8, True)
    assert request.sampling.HasField("temperature")  # 0 is greedy, not "not given"


def test_generate_reads_stdin(gateway, capsys, monkeypatch):
    type_in(monkeypatch, "hi")
    assert run(capsys, "generate")[1] == "hello\n"


def test_sampling_flags_reach_the_request(gateway, capsys):
    flags = "--temperature 0.5 --top-p 0.25 --top-k 3 --min-p 0.125 --seed 9 --model fake --stop a --stop b"
    assert run(capsys, "generate", "hi", *flags.split())[0] == 0
    request = gateway.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert (sampling.min_p, sampling.seed, request.model, list(request.stop.stop)) == (0.125, 9, "fake", ["a", "b"])


def test_chat_once(gateway, capsys):
    assert run(capsys, "chat", "hi", "--system", "Be brief.") == (0, "hello\n", "")
    assert [m.role for m in gateway.requests[-1].prompt.chat.messages] == ["system", "user"]
    assert json.loads(run(capsys, "chat", "hi", "--json")[1])["text"] == "hello"


class Loading(FakeGateway):
    """Has no ready worker at first."""

    num_polls = 2

    def ListModels(self, request, context):
        if self.num_polls:
            self.num_polls -= 1
            return pb.ListModelsResponse()
        return super().ListModels(request, context)


def test_chat_and_generate_wait_for_the_model(capsys, monkeypatch):
    for command in ("chat", "generate"):
        with Loading({"hi": "hello"}) as gateway:
            code, out, err = run(capsys, command, "hi", "--target", gateway.target)
        assert (code, out, err) == (0, "hello\n", "waiting for the model: w0 is ready\n")
        assert gateway.num_polls == 0


def test_conversation_keeps_its_history(gateway, capsys, monkeypatch):
    type_in(monkeypatch, "hi\n\nhow\n/new\nagain\n")
    assert run(capsys, "chat")[1] == "hello\nhow\n(a new conversation)\nagain\n"
    turns = [[m.content for m in request.prompt.chat.messages] for request in gateway.requests]
    assert turns == [["hi"], ["hi", "hello", "how"], ["again"]]


class Moody(FakeGateway):
    """Fails every second request."""

    def Generate(self, request, context):
        if len(self.requests) % 2:
            self.requests.append(request)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "temperature 3 is above 2")
        yield from super().Generate(request, context)


def test_a_failed_turn_does_not_end_the_conversation(capsys, monkeypatch):
    with Moody() as gateway:
        monkeypatch.setenv("QUIRE_TARGET", gateway.target)
        type_in(monkeypatch, "a\nb\nc\n")
        code, out, err = run(capsys, "chat")
    assert (code, out, err) == (0, "a\n\nc\n", "quire: error: temperature 3 is above 2\n")
    assert [m.content for m in gateway.requests[-1].prompt.chat.messages] == ["a", "a", "c"]


def test_ctrl_c_stops_the_answer_only(gateway, capsys, monkeypatch):
    type_in(monkeypatch, "hi\nhi\n")
    shown = []

    def interrupt_first(stream, **_):
        shown.append(stream)
        if len(shown) == 1:
            raise KeyboardInterrupt
        return stream.result()

    monkeypatch.setattr("quire_cli.commands.generate.show_stream", interrupt_first)
    code, out, _ = run(capsys, "chat")
    assert (code, "(stopped)" in out, len(gateway.requests)) == (0, True, 2)
    assert len(gateway.requests[1].prompt.chat.messages) == 1


def test_models(gateway, capsys):
    assert "fake" in run(capsys, "models")[1]
    assert json.loads(run(capsys, "models", "--json")[1])["models"][0]["max_model_len"] == 4096


def test_status(gateway, capsys):
    out = run(capsys, "status")[1]
    assert "w0      ready" in out
    assert "index memory" in out
    worker = json.loads(run(capsys, "status", "--json")[1])["schedulers"][0]["workers"][0]
    assert (worker["blocks_free"], worker["rows_total"], worker["state"]) == (64, 8, "ready")


def test_drain(gateway, capsys):
    assert run(capsys, "drain", "w0") == (0, "w0 is draining: 2 sequences moved\n", "")
    assert json.loads(run(capsys, "drain", "w0", "--json")[1]) == {"worker": "w0", "num_moved": 2}
    assert gateway.drained_ids == ["w0", "w0"]
    assert run(capsys, "drain", "w7") == (1, "", "quire: error: no worker 'w7'; there is 'w0'\n")


def test_every_command_takes_several_targets(gateway, capsys):
    target = f"localhost:1,{gateway.target}"
    for command in ("generate hi", "chat hi", "models", "status", "tokenize hi", "drain w0"):
        assert run(capsys, *command.split(), "--target", target)[0] == 0


def test_doctor_checks_every_target(gateway, capsys):
    code, out, _ = run(capsys, "doctor", "--target", f"{gateway.target},localhost:1", "--json")
    found = [f["state"] for f in json.loads(out)["findings"] if f["name"] == "gateway"][-2:]
    assert (code, found) == (1, ["ok", "missing"])


def test_abort(gateway, capsys):
    assert run(capsys, "abort", "a", "b") == (0, "aborted: a, b\n", "")
    assert gateway.aborted_ids == ["a", "b"]
    assert json.loads(run(capsys, "abort", "a", "--json")[1]) == {"aborted_ids": ["a"], "unknown_ids": []}


class Forgetful(FakeGateway):
    """Knows the request "mine" only."""

    def Abort(self, request, context):
        return pb.AbortResponse(aborted_ids=[i for i in request.request_ids if i == "mine"])


def test_abort_reports_unknown_ids(capsys):
    with Forgetful() as gateway:
        code, out, err = run(capsys, "abort", "mine", "other", "--target", gateway.target)
    assert (code, out) == (1, "aborted: mine\n")
    assert err == "quire: error: no open request other: it has ended, or the id is wrong\n"


class Locked(FakeGateway):
    """Requires an API key for every call."""

    def check(self, context):
        key = dict(context.invocation_metadata()).get("authorization")
        if key != "Bearer secret":
            words = (
                "the API key is not accepted by this gateway"
                if key
                else ("an API key is required; set QUIRE_API_KEY, or api_key=... in the client")
            )
            context.abort(grpc.StatusCode.UNAUTHENTICATED, words)

    def ListModels(self, request, context):
        self.check(context)
        return super().ListModels(request, context)


def test_api_key(capsys, monkeypatch):
    with Locked() as gateway:
        monkeypatch.setenv("QUIRE_TARGET", gateway.target)
        assert run(capsys, "models")[2] == "quire: error: an API key is required; set QUIRE_API_KEY, or --api-key\n"
        assert "is not accepted" in run(capsys, "models", "--api-key", "wrong")[2]
        assert run(capsys, "models", "--api-key", "secret")[0] == 0
        assert "is running, but requires an API key" in run(capsys, "doctor")[1]
        assert run(capsys, "doctor", "--api-key", "secret")[0] == 0
        monkeypatch.setenv("QUIRE_API_KEY", "secret")
        assert run(capsys, "models")[0] == 0


class Strict(FakeGateway):
    """Refuses top_p with the path of the field, as a gateway does."""

    def Generate(self, request, context):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p is 3; must be above 0 and at most 1")
        yield


def test_errors_name_flags(capsys):
    with Strict() as gateway:
        err = run(capsys, "generate", "hi", "--top-p", "3", "--target", gateway.target)[2]
    assert err == "quire: error: --top-p is 3; must be above 0 and at most 1\n"


def test_the_flags_for_users_of_vllm_exist():
    page = Path(__file__).parents[3] / "docs/vllm.md"
    rows = [line.split(" | ") for line in page.read_text().split("## Flags")[1].split("## ")[0].splitlines()]
    known = next(command for command in COMMANDS if command.name == "serve").arguments
    names = {name for row in known for argument in getattr(row, "arguments", [row]) for name in argument.names}
    words = [
        (*re.findall(r"`(--[\w-]+)", row[0]), "|", *re.findall(r"`(--[\w-]+)", row[1])) for row in rows if len(row) == 2
    ]
    assert len(words) > 20
    of_services = {"--tls-cert-file", "--tls-key-file"}
    for row in words:
        divider = row.index("|")
        assert set(row[divider + 1 :]) <= names | of_services
    same = [row.split("|")[1] for row in page.read_text().splitlines() if " | the same" in row and "`--" in row]
    assert set(re.findall(r"`(--[\w-]+)", "".join(same))) <= names


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("quire ge", "generate "),
        ("quire generate --temp", "--temperature "),
        ("quire serve m --max-im", "--max-images"),
    ],
)
def test_commands_and_flags_are_completed(line, expected, tmp_path):
    variables = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "ARGCOMPLETE_USE_TEMPFILES": "1"}
    variables |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"), "_ARGCOMPLETE_IFS": "\n"}
    subprocess.run([sys.executable, "-m", "quire_cli"], env=os.environ | variables, check=True)
    assert expected in (tmp_path / "out").read_text().splitlines()


def test_tokenize(gateway, capsys, monkeypatch):
    assert run(capsys, "tokenize", "hi") == (0, "104,105\n", "[2 tokens; max_model_len is 4096]\n")
    type_in(monkeypatch, "a")
    assert json.loads(run(capsys, "tokenize", "--json", "--chat")[1]) == {"token_ids": [97], "max_model_len": 4096}


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("generate hi --tokens 1", "a prompt or --tokens, not both"),
        ("generate --tokens 1,x", "not a list of token ids"),
        ("generate --tokens -1", "--tokens"),
        ("generate hi --n 0", "--n: 0 is less than 1"),
        ("generate hi --temperature nan", "--temperature: nan is not a finite number"),
        ("generate hi --max-tokens many", "--max-tokens: 'many' is not a whole number"),
        ("generate hi --timeout-s 0", "--timeout-s: 0 is not above 0"),
        ("chat --json", "--json needs a question"),
        ("up --port 70000", "--port: 70000 is above 65535"),
        ("up --workers 0", "--workers: 0 is less than 1"),
        ("up --gateways 0", "--gateways: 0 is less than 1"),
        ("up --max-images 1000", "--max-images: 1000 is above 256"),
        ("up --kv-cache-memory 9GiB", "--kv-cache-memory: '9GiB' is not a size; write 512M or 2G"),
        ("up --allowed-origins [", "--allowed-origins: '[' is not valid JSON"),
        ("serve", "MODEL"),
        ("serve m --revision main", "unrecognized arguments: --revision main"),
        ("drain", "WORKER"),
        ("nonsense", "quire: error: there is no command 'nonsense'; see"),
        ("generte hi", "there is no command 'generte'; did you mean generate?"),
        ("generate hi --temprature 1", "unrecognized arguments: --temprature 1; did you mean --temperature?"),
        ("generate hi --max-token=3", "did you mean --max-tokens?"),
        ("chat hi --zzz", "quire chat: error: unrecognized arguments: --zzz; see `quire chat --help`"),
        ("completion tcsh", "invalid choice: 'tcsh'"),
        ("abort", "ID"),
        ("", "COMMAND"),
    ],
)
def test_wrong_arguments(argv, complaint, capsys):
    code, out, err = run(capsys, *argv.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert complaint in err


def test_errors_are_one_line(capsys, monkeypatch):
    code, out, err = run(capsys, "models", "--target", "localhost:1", "--timeout-s", "0.2")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("quire: error: no gateway answers at localhost:1")
    assert "quire up" in err


# quire doctor


def test_doctor_succeeds(gateway, capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert f"{gateway.target} serves fake (1 worker ready)" in out


def test_doctor_fails_if_a_given_gateway_does_not_answer(capsys):
    code, out, _ = run(capsys, "doctor", "--target", "localhost:1", "--json")
    found = json.loads(out)
    assert (code, found["healthy"]) == (1, False)
    assert [f["name"] for f in found["findings"] if f["state"] == "missing"] == ["gateway"]


@pytest.mark.parametrize("url", ["redis://localhost:1/0", "unix:///nowhere"])
def test_doctor_reports_the_fallback_without_redis(url, gateway, capsys):
    code, out, _ = run(capsys, "doctor", "--redis", url)
    assert code == 0
    assert "does not answer" in out
    assert "services run without it" in out


@pytest.mark.parametrize("url", ["redis://user:secret@localhost:1/0", "unix:///nowhere?db=0&password=secret"])
def test_doctor_hides_the_password_of_redis(url, gateway, capsys):
    assert "secret" not in run(capsys, "doctor", "--redis", url)[1]


def test_doctor_fails_where_the_chosen_path_cannot_run(gateway, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "probe_kernels", lambda: {"error": "QUIRE_CPU_PATH = x", "is_fatal": True})
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "FAIL  kernels    CPU workers do not start: QUIRE_CPU_PATH = x\n" in out


def test_a_new_key_is_accepted_by_its_line(capsys, tmp_path):
    code, out, err = run(capsys, "key", "new", "team-a", "--dir", str(tmp_path / "keys"))
    key, line = (row.split()[1] for row in out.splitlines())
    assert (code, key[:3], len(key)) == (0, "qk-", 46)
    assert f"added to {tmp_path}/keys/team-a" in err
    assert key not in err
    file = tmp_path / "keys" / "team-a"
    assert (file.read_text(), file.stat().st_mode & 0o777) == (f"{line}\n", 0o600)
    second = json.loads(run(capsys, "key", "new", "team-a", "--dir", str(tmp_path / "keys"), "--json")[1])
    assert file.read_text() == f"{line}\n{second['line']}\n"
    assert second["key"] != key
    found = ApiKeys(tmp_path / "keys").find(key)
    assert found is not None
    assert found.owner == "team-a"


def test_the_line_of_a_key_that_exists(capsys, monkeypatch):
    made = json.loads(run(capsys, "key", "new", "me", "--json")[1])
    type_in(monkeypatch, f"{made['key']}\n")
    assert run(capsys, "key", "hash") == (0, f"{made['line']}\n", "")


@pytest.mark.parametrize(
    ("argv", "stdin", "words"),
    [
        (["new"], "", "the owner is None"),
        (["new", "team a"], "", "the owner is 'team a'; give 1 to 64 of the characters"),
        (["new", ".hidden"], "", "the owner is '.hidden'"),
        (["hash"], "short", "stdin has no key"),
        (["hash"], "two keys of some length", "stdin has no key"),
        (["hash", "team-a"], "", "takes no owner"),
    ],
)
def test_mistakes_with_keys(capsys, monkeypatch, argv, stdin, words):
    type_in(monkeypatch, stdin)
    code, out, err = run(capsys, "key", *argv)
    assert (code, out) == (2, "")
    assert words in err
    assert "keys of some length" not in err
