"""A small Hugging Face Hub: serves one repository from a folder with the endpoints that `huggingface_hub` uses."""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.http_thread import HttpThread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(HttpThread):
    """Serves `folder` as the repository `repo`. `downloaded` has the names of the files that were sent."""

    def __init__(self, repo: str, folder: Path) -> None:
        super().__init__(_Handler)
        self.repo = repo
        self.folder = folder
        self.downloaded: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: object) -> None:
        """Write no access log."""

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        files = sorted(file for file in self.server.folder.iterdir() if file.is_file())
        api = f"/api/models/{self.server.repo}"
        if path.startswith((f"{api}/tree/", f"{api}/revision/")):
            if path.rpartition("/")[2] not in ("main", COMMIT):
                return self._error("RevisionNotFound")
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _etag(f)} for f in files]
            siblings = [{"rfilename": file.name} for file in files]
            info = {"id": self.server.repo, "modelId": self.server.repo, "sha": COMMIT, "siblings": siblings}
            return self._send(json.dumps(tree if "/tree/" in path else info).encode(), is_head)
        found = [
            file
            for file in files
            if path.startswith(f"/{self.server.repo}/resolve/") and path.rpartition("/")[2] == file.name
        ]
        if not found:
            return self._error(
                "RepoNotFound" if not path.startswith((api, f"/{self.server.repo}/")) else "EntryNotFound"
            )
        if not is_head:
            self.server.downloaded.append(found[0].name)
        return self._send(found[0].read_bytes(), is_head, etag=_etag(found[0]))

    def _send(self, data: bytes, is_head: bool, *, etag: str = "") -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.send_header("x-repo-commit", COMMIT)
        if etag:
            self.send_header("etag", f'"{etag}"')
        self.end_headers()
        if not is_head:
            self.wfile.write(data)

    def _error(self, code: str) -> None:
        self.send_response(404)
        self.send_header("content-length", "0")
        self.send_header("x-error-code", code)
        self.end_headers()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
