"""The Hugging Face hub as far as `snapshot_download` asks it: folders as repositories."""

import json
import threading
from collections.abc import Mapping
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "1" * 40


class Hub:
    """Serves the folders, by OWNER/NAME, on a free loopback port while the block runs."""

    def __init__(self, repositories: Mapping[str, Path]) -> None:
        self.stopped = threading.Event()
        self._repositories = repositories
        self._going_on = threading.Event()
        self._stops_within = ""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()
        self._server.shutdown()
        self._server.server_close()

    def stop_within(self, name: str) -> None:
        """Send half of this file, then set `stopped` and wait for `go_on`."""
        self._stops_within = name

    def go_on(self) -> None:
        self._stops_within = ""
        self._going_on.set()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                half, rest = self._answer()
                self.wfile.write(half)
                if rest and hub._stops_within and self.path.endswith(hub._stops_within):
                    self.wfile.flush()
                    hub.stopped.set()
                    hub._going_on.wait()
                self.wfile.write(rest)

            def _answer(self) -> tuple[bytes, bytes]:
                """Sends the head; the halves of the body."""
                found = hub._find(self.path.partition("?")[0].strip("/"))
                body = b"{}" if found is None else found
                self.send_response(404 if found is None else 200)
                if found is None:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("ETag", f'"{sha256(body).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                return body[: len(body) // 2], body[len(body) // 2 :]

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is logged."""

        return Handler

    def _find(self, path: str) -> bytes | None:
        """The body of an answer: a description, a list of files, or a file."""
        for name, folder in self._repositories.items():
            files = sorted(file.name for file in folder.iterdir())
            if path.startswith(f"api/models/{name}/tree/"):
                sizes = ((f, (folder / f).stat().st_size) for f in files)
                tree = [{"type": "file", "path": f, "size": n, "oid": "0"} for f, n in sizes]
                return json.dumps(tree).encode()
            if path.startswith(f"api/models/{name}"):
                siblings = [{"rfilename": file} for file in files]
                return json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            file = path.removeprefix(f"{name}/resolve/{COMMIT}/")
            if file in files:
                return (folder / file).read_bytes()
        return None
