"""A small OpenAI-compatible server: real HTTP and server-sent events, invented tokens."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_thread import HttpThread

TOKENS_PER_CHUNK = 2


class OpenAIServer(HttpThread):
    """Answers every prompt with `max_tokens` words, two per chunk. `requests` holds the bodies that it received."""

    def __init__(self, *, takes_token_ids: bool = True, fails_at: int | None = None) -> None:
        super().__init__(_Handler)
        self.takes_token_ids = takes_token_ids
        self.fails_at = fails_at  # requests after this number get an error; None: no errors
        self.requests: list[dict[str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OpenAIServer

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log."""

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            return self._reply(404, {"error": {"message": f"no such path: {self.path}"}})
        return self._reply(200, {"data": [{"id": "tiny", "max_model_len": 2048}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and not self.server.takes_token_ids:
            return self._reply(400, {"error": {"message": "prompt must be a string"}})
        if self.server.fails_at is not None and len(self.server.requests) > self.server.fails_at:
            return self._reply(429, {"error": {"message": "too many requests"}})
        return self._stream(body, is_chat="messages" in body)

    def _reply(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, body: dict[str, Any], *, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, body["max_tokens"], TOKENS_PER_CHUNK):
            ids = list(range(start, min(start + TOKENS_PER_CHUNK, body["max_tokens"])))
            text = "".join(f"word{i} " for i in ids)
            choice: dict[str, Any] = {"index": 0, "delta": {"content": text}} if is_chat else {"index": 0, "text": text}
            if body.get("return_token_ids"):
                choice["token_ids"] = ids
            self._event(json.dumps({"choices": [choice]}))
        usage = {
            "prompt_tokens": len(body.get("prompt") or body["messages"][0]["content"].split()),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        self._event(json.dumps({"choices": [], "usage": usage}))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, payload: str) -> None:
        content = f"data: {payload}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
