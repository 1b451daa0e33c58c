"""SMG in front of the gateway as a vLLM engine over gRPC: whole and streamed chats. Usage: ... ADDRESS MODEL"""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

address, model = sys.argv[1:]
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as metrics:
    port, metrics_port = server.getsockname()[1], metrics.getsockname()[1]
command = [Path(sys.executable).parent / "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
command += ["--worker-urls", f"grpc://{address}", "--prometheus-port", str(metrics_port)]
BODY = {
    "model": model, "messages": [{"role": "user", "content": "What does os.path.join do?"}], "max_tokens": 12,
    "temperature": 0, "ignore_eos": True,
}  # fmt: skip


def post(path, body):
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read().decode()


def first_answer(deadline):
    """The answer of a router that has found its worker."""
    while True:
        try:
            return json.loads(post("/v1/chat/completions", BODY))
        except (OSError, urllib.error.HTTPError) as error:
            words = error.read().decode() if isinstance(error, urllib.error.HTTPError) else str(error)
            assert time.monotonic() < deadline, words
            assert router.poll() is None, words
            time.sleep(0.5)


router = subprocess.Popen(command)
try:
    answer = first_answer(time.monotonic() + 90)
    text = answer["choices"][0]["message"]["content"]
    assert text, answer
    assert answer["usage"]["completion_tokens"] == 12, answer
    events = [
        line[6:] for line in post("/v1/chat/completions", {**BODY, "stream": True}).splitlines() if line[:6] == "data: "
    ]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == text, (deltas, text)
    assert len([delta for delta in deltas if delta]) > 2, deltas
finally:
    router.terminate()
    router.wait(30)
