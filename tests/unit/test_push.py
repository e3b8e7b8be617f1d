"""`streamrl export --push` with the hub's own client, against a server of this file."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from learners.session import LearnerState
from streamrl.cli.main import main
from streamrl.config import RunConfig, to_yaml
from streamrl.durable_files import write_file
from tests.unit.test_checkpoint import make_run, make_trainer, save


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


@pytest.fixture(autouse=True)
def environment(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client takes from HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE as it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "secret")


def push(run: RunConfig, output: Path) -> int:
    command = ["export", str(run.run.path), "--output", str(output / "out")]
    return main([*command, "--push", "me/mine"])


def test_the_exported_folder_is_uploaded_whole_and_private(run, hub, tmp_path, capsys):
    assert push(run, tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("me/mine")
    assert hub.tokens == {"Bearer secret"}
    (made,) = hub.created
    assert made["name"] == "mine"
    # One or the other, by the release of the client.
    assert made.get("visibility") == "private" or made["private"]
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files == written
    assert "model.safetensors" in written


def test_without_a_token_nothing_is_exported(run, hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")
    assert (push(run, tmp_path), hub.created) == (2, [])
    assert "--push: needs a token of the hub: set HF_TOKEN" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_the_hub_refuses_is_said_and_the_export_stays(run, hub, tmp_path, capsys):
    hub.is_refusing = True
    assert push(run, tmp_path) == 2
    error = capsys.readouterr().err
    assert "--push: me/mine: " in error
    assert "403" in error
    assert (tmp_path / "out" / "model.safetensors").exists()
