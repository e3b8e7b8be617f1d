"""A run on a Redis with a password: nothing that it writes, prints or starts shows the password."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from streamrl.config.secrets import REDIS_PASSWORD
from tests.redis_server import RedisServer, redis_server
from tests.settings import set_options
from tests.system.conftest import DEADLINE_S, STREAMRL, slow_reward
from tests.system.test_launch import Launch

PASSWORD = "pass-w0rd-of-redis"


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    with redis_server(folder, f"requirepass {PASSWORD}") as server:
        yield server


def words_of_children(pid: int) -> list[str]:
    """The arguments of every process below this one."""
    words: list[str] = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            words += child.cmdline()
        except psutil.NoSuchProcess:
            continue
    return words


def files_with(folder: Path, text: str) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if text.encode() in path.read_bytes()]


def streamrl(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != REDIS_PASSWORD}
    return subprocess.run(
        [STREAMRL, *words],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.long
def test_a_password_is_in_nothing_that_a_run_leaves_or_shows(
    launch: Launch, redis: RedisServer, tmp_path: Path
):
    url = redis.url.replace("://", f"://:{PASSWORD}@")
    reward = f"data.reward={slow_reward(tmp_path, seconds=0.2)}"
    run = launch(
        *set_options(f"buffer.url={url}", "run.max_steps=100000", "tracking.wandb=offline", reward)
    )
    run.until_step(2)
    words = words_of_children(run.process.pid)
    assert {"learner", "generator"} <= set(words)
    assert [word for word in words if PASSWORD in word] == []

    resolved = str(run.folder / "config.yaml")
    with_it = {REDIS_PASSWORD: PASSWORD}
    outputs = [
        streamrl(*command, resolved, **with_it)
        for command in (["status"], ["generators"], ["buffer", "inspect"], ["check", "--quiet"])
    ]
    assert outputs[1].returncode == 0, outputs[1].stderr
    assert "generator-0" in outputs[1].stdout
    assert outputs[3].returncode == 0, outputs[3].stderr
    bare = streamrl("generators", resolved)
    assert bare.returncode == 2
    assert f"give it in the environment, as {REDIS_PASSWORD}" in bare.stderr
    wrong = streamrl("check", resolved, **{REDIS_PASSWORD: "wr0ng"})
    assert wrong.returncode == 2
    assert "buffer.url redis://:***@" in wrong.stderr

    run.process.send_signal(signal.SIGINT)
    run.end()
    assert "***@" in Path(resolved).read_text()
    shown = [run.output, *(text for o in (*outputs, bare, wrong) for text in (o.stdout, o.stderr))]
    assert not any(secret in text for secret in (PASSWORD, "wr0ng") for text in shown)
    assert list(run.folder.glob("wandb/offline-run-*/*.wandb"))
    assert files_with(run.folder, PASSWORD) == []
    assert streamrl("buffer", "audit", str(run.folder), **with_it).returncode == 0
