"""A hub on this machine: answers the requests with which huggingface_hub lists and fetches a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "a" * 40
Files = Mapping[str, bytes]


@contextmanager
def serve_hub(repositories: Mapping[str, Files], sizes: Mapping[str, int] | None = None, gated: tuple[str, ...] = ()) -> Iterator[str]:
    """The address of a hub that holds `repositories`; `sizes` are what it claims of files, `gated` asks for a token."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._file(body=False)

        def do_GET(self) -> None:
            if self.path.startswith("/api/models/"):
                self._api(self.path.removeprefix("/api/models/").partition("?")[0])
            else:
                self._file(body=True)

        def _api(self, rest: str) -> None:
            owner, name, *more = rest.split("/")
            repository = f"{owner}/{name}"
            if repository in gated and "Authorization" not in self.headers:
                return self._fail(403, "GatedRepo")
            if repository not in repositories:
                return self._fail(404, "RepoNotFound")
            if len(more) > 1 and more[1] not in ("main", SHA):
                return self._fail(404, "RevisionNotFound")
            files = repositories[repository]
            if more[:1] == ["tree"]:
                return self._json([entry(path, content) for path, content in files.items()])
            return self._json({"id": repository, "sha": SHA, "siblings": [{"rfilename": path} for path in files]})

        def _file(self, body: bool) -> None:
            owner, name, _, _, path = self.path.lstrip("/").split("/", 4)
            content = repositories[f"{owner}/{name}"].get(path)
            if content is None:
                return self._fail(404, "EntryNotFound")
            self.send_response(200)
            self.send_header("ETag", f'"{digest(content)}"')
            self.send_header("X-Repo-Commit", SHA)
            self.send_header("Content-Length", str(claimed(path, content) if not body else len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def _json(self, value: object) -> None:
            text = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _fail(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def claimed(path: str, content: bytes) -> int:
        return (sizes or {}).get(path, len(content))

    def entry(path: str, content: bytes) -> dict[str, object]:
        return {"type": "file", "path": path, "size": claimed(path, content), "oid": digest(content)}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
