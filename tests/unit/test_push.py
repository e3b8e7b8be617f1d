"""`streamrl export --push` with the hub's own client, against a server of this file."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from learners.session import LearnerState
from streamrl.config import RunConfig, to_yaml
from streamrl.durable_files import write_file
from tests.unit.test_checkpoint import make_run, make_trainer, save

STREAMRL = str(Path(sys.executable).with_name("streamrl"))


class Hub(ThreadingHTTPServer):
    """The calls of an upload, https://huggingface.co/docs/hub/api; every file comes inline."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.is_refusing = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(200, {"siblings": [], "id": "me/mine", "sha": "0" * 40})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.tokens.add(self.headers["authorization"])
        if self.server.is_refusing:
            self._answer(403, {"error": "you have no write access"})
        elif self.path.endswith("/repos/create"):
            self.server.created.append(json.loads(body))
            self._answer(200, {"url": f"{self.server.url}/me/mine"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            self._answer(200, {"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            url = f"{self.server.url}/me/mine/commit/{'1' * 40}"
            self._answer(200, {"commitUrl": url, "commitOid": "1" * 40, "success": True})
        else:
            self._answer(200, {})

    def log_message(self, *_: object) -> None:
        """Nothing on the test's output."""

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = make_run(tmp_path_factory.mktemp("run"))
    save(config, make_trainer(config), LearnerState(1))
    write_file(config.run.path / "config.yaml", to_yaml(config))
    return config


def push(
    run: RunConfig, hub: Hub, output: Path, *arguments: str, token: str = "secret"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": token}
    environment |= {"HF_HOME": str(output / "home"), "HF_HUB_OFFLINE": "0"}
    command = [STREAMRL, "export", str(run.run.path), "--output", str(output / "out")]
    return subprocess.run(
        [*command, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_exported_folder_is_uploaded_whole_and_private(run, hub, tmp_path):
    done = push(run, hub, tmp_path, "--push", "me/mine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].endswith("me/mine")
    assert hub.tokens == {"Bearer secret"}
    (made,) = hub.created
    assert made["name"] == "mine"
    # One or the other, by the release of the client.
    assert made.get("visibility") == "private" or made["private"]
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files == written
    assert "model.safetensors" in written


def test_without_a_token_nothing_is_exported(run, hub, tmp_path):
    done = push(run, hub, tmp_path, "--push", "me/mine", token="")
    assert (done.returncode, hub.created) == (2, [])
    assert "--push: needs a token of the hub: set HF_TOKEN" in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_the_hub_refuses_is_said_and_the_export_stays(run, hub, tmp_path):
    hub.is_refusing = True
    done = push(run, hub, tmp_path, "--push", "me/mine")
    assert done.returncode == 2
    assert "--push: me/mine: " in done.stderr
    assert "403" in done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
