"""Real vLLM servers elsewhere: one that two generators share, and two that one generator has."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from transformers import LlamaForCausalLM

from actors.engines import make_engine
from actors.engines.served.process import ServerProcess
from actors.engines.vllm.arguments import IN_ONE_PROCESS
from actors.engines.vllm.server import serve_options
from streamrl.cli.buffer.audit import audit_run
from streamrl.cli.main import main
from streamrl.run_folder import config_of
from streamrl.types import SamplingParams
from tests.engines import ENVIRONMENT, run_config, update_to
from tests.ports import free_port
from tests.settings import set_options
from tests.system.conftest import CONFIG, STREAMRL, Launched

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
DEADLINE_S = 400.0
# vLLM's CPU kernels take no heads narrower than 32.
SMALL_TASK = CONFIG.replace("num_heads: 2", "num_heads: 1")
# Synchronous, so that every token is of staleness 0 and can be compared with the learner's.
SIZES = (
    "generator.engine=vllm",
    "buffer.max_staleness=0",
    "buffer.lease_ttl_s=30",
    "weights.deadline_s=30",
    "run.max_steps=100000",
    "learner.groups_per_step=16",
    "generator.vllm.start_timeout_s=300",
)


@dataclass
class Server:
    """At always the same address; `log` is of all its processes."""

    model: Path
    log: Path
    port: int
    process: ServerProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Unless it runs."""
        if self.process is not None and self.process._process.poll() is None:
            return
        url = {"url": self.url}
        config = run_config(self.model, max_num_seqs=16, max_model_len=40, vllm=url)
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        on_cpu = ["--enforce-eager", "--kv-cache-memory-bytes", str(64 * 2**20)]
        on_cpu += ["--distributed-executor-backend", IN_ONE_PROCESS]
        where = ["--model", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)]
        words = [*program, *where, *serve_options(config), *on_cpu]
        self.process = ServerProcess(words, self.log, ENVIRONMENT)

    def kill(self) -> None:
        assert self.process is not None
        guard = psutil.Process(self.process._process.pid)
        for child in guard.children(recursive=True):
            child.kill()
        guard.wait(DEADLINE_S)

    def posts(self, path: str) -> int:
        """How many such requests it has answered."""
        text = self.log.read_text() if self.log.exists() else ""
        return len(re.findall(rf'"POST {re.escape(path)}[? ]', text))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    path = folder / "config.yaml"
    path.write_text(SMALL_TASK.format(folder=folder, model=folder / "model"))
    assert main(["get-model", "--config", str(path)]) == 0
    return folder / "model"


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """They go on from test to test: whoever comes gives a server weights of its own."""
    folder = tmp_path_factory.mktemp("servers")
    made = [Server(model, folder / f"vllm-{i}.log", free_port()) for i in range(2)]
    yield made
    for server in made:
        if server.process is not None:
            server.process.close()


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[..., Launched]]:
    """Starts the run; whatever is left of it is killed in the end."""
    started: list[subprocess.Popen[str]] = []
    path = tmp_path / "run.yaml"
    path.write_text(SMALL_TASK.format(folder=tmp_path, model=model))

    def run(*overrides: str) -> Launched:
        words = set_options(*SIZES, *overrides)
        with (tmp_path / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [STREAMRL, "launch", str(path), "--no-view", *words],
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT},
            )
        started.append(process)
        return Launched(process, tmp_path / "run")

    yield run
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def until(run: Launched, condition: Callable[[], bool]) -> None:
    """Waits for the condition; unblocked by it, by the run's end or the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        logs = "\n".join(p.read_text()[-1500:] for p in (run.folder / "logs").glob("*.log"))
        assert time.monotonic() < deadline, logs
        assert run.process.poll() is None, logs
        time.sleep(0.1)


def until_trained(run: Launched, *generators: str, num_versions: int = 3) -> None:
    """Each of the generators reports so many further versions."""
    first = len(run.lines)

    def versions(name: str) -> set[float]:
        lines = run.lines[first:]
        return {line.get(f"generator/{name}/policy_version", 0) for line in lines}

    until(run, lambda: all(len(versions(name)) > num_versions for name in generators))


def assert_right_to_the_token(run: Launched) -> None:
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=DEADLINE_S) == 130
    lines = run.lines
    gaps = [abs(line["mismatch/staleness_0/kl"]) for line in lines]
    assert max(gaps) < 1e-4, gaps
    for extreme in ("mismatch/rollout_is_max", "mismatch/rollout_is_min"):
        assert max(abs(line[extreme] - 1) for line in lines) < 1e-3, "a single token's ratio"
    assert {line["buffer/staleness_max"] for line in lines} == {0}
    assert run.books["balanced"] is True
    assert run.books["dropped"].get("failed", 0) == 0, run.books
    config = config_of(run.folder)
    ended = config.run.model_copy(update={"max_steps": lines[-1]["step"]})
    assert audit_run(run.folder, complete=config.model_copy(update={"run": ended})).faults == ()


def test_two_generators_share_a_server_whose_owner_is_killed(servers, start):
    server = servers[0]
    server.start()
    before = server.posts("/finish_weight_update")
    run = start(f"generator.vllm.url={server.url}", "generator.count=2")
    until(run, lambda: len(run.lines) >= 2)
    until_trained(run, "generator-0", "generator-1")
    loaded = [server.posts("/finish_weight_update") - before]
    steps = [run.lines[-1]["step"]]

    # The one that loads is the first by name.
    run.child("generator-0").send_signal(signal.SIGKILL)
    until_trained(run, "generator-1")
    until_trained(run, "generator-0", "generator-1")
    assert_right_to_the_token(run)
    loaded.append(server.posts("/finish_weight_update") - before)
    steps.append(run.lines[-1]["step"])
    assert loaded[0] <= steps[0] + 3, "each version once, not once for each generator"
    assert loaded[1] <= steps[1] + 3
    assert "serves somebody else" not in run.log("generator-1")


def test_a_generator_outlives_one_of_its_two_servers(servers, start):
    for server in servers:
        server.start()
    before = [server.posts("/inference/v1/generate") for server in servers]
    urls = ",".join(f'"{server.url}"' for server in servers)
    run = start(f"generator.vllm.url=[{urls}]", "generator.count=1")
    until(run, lambda: len(run.lines) >= 2)
    for server, count in zip(servers, before, strict=True):
        until(run, lambda s=server, n=count: s.posts("/inference/v1/generate") > n + 20)

    servers[1].kill()
    until_trained(run, "generator-0")
    asked = servers[1].posts("/inference/v1/generate")
    servers[1].start()
    until(run, lambda: servers[1].posts("/inference/v1/generate") > asked + 20)
    until_trained(run, "generator-0")
    assert_right_to_the_token(run)
    after = servers[1].log.read_text().rpartition("Application startup complete")[2]
    first_load, first_request = (
        after.index('"POST /finish_weight_update'),
        [m.start() for m in re.finditer('"POST /inference/v1/generate', after)][1],
    )
    assert first_load < first_request, "but for the probe, no request before the newest weights"
    assert run.log("generator-0").count("serves") == 1, "the generator went on"


async def test_a_server_whose_owner_ends_inside_a_pause_samples_again(
    servers, model, tmp_path, monkeypatch
):
    """The next owner is sent the same version."""
    servers[0].start()
    settings = {"url": servers[0].url, "start_timeout_s": 240.0}
    config = run_config(model, engine="vllm", max_num_seqs=16, max_model_len=40, vllm=settings)
    shapes = LlamaForCausalLM.from_pretrained(model)
    for version, last in ((3, "/pause"), (4, "/finish_weight_update")):
        update = update_to(shapes, version, tmp_path / f"{version}.safetensors")
        killed = make_engine(config, seed=0, is_shared=True)
        http = killed._server.http
        monkeypatch.setattr(http, "send", _until(last, http.send))
        with pytest.raises(asyncio.CancelledError):
            await killed.load_weights(update)
        await killed.close()

        successor = make_engine(config, seed=0, is_shared=True)
        await successor.load_weights(update)
        async with asyncio.timeout(120):
            sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
            answer = await successor.generate([5], sampling)
        assert answer.policy_versions.tolist() == 3 * [version]
        await successor.close()


def _until(last: str, send: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """`send`, whose process ends once it has sent `last`."""

    async def until_last(path: str, body: object, **options: object) -> None:
        await send(path, body, **options)
        if path.partition("?")[0] == last:
            raise asyncio.CancelledError

    return until_last
