"""A whole run on two kinds of engines: learner, buffer, one HF and one vLLM generator."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port
from tests.settings import set_options
from tests.system.conftest import CONFIG, DEADLINE_S, STREAMRL, Launched
from tests.waiting import block_until

pytestmark = pytest.mark.timeout(900)
NUM_STEPS = 60
# vLLM imports itself three times over before it serves.
START_DEADLINE_S = 240.0
# vLLM's CPU kernels take no heads narrower than 32.
SMALL_TASK = CONFIG.replace("num_heads: 2", "num_heads: 1")
# Synchronous, so that no completion is of two versions and every token is of staleness 0: a token
# of the newest version whose context was read by an older one is no measure of the engine.
SIZES = (
    "buffer.max_staleness=0",
    "learner.groups_per_step=16",
    "generator.group_size=8",
    "generator.max_num_seqs=64",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    path = folder / "config.yaml"
    path.write_text(SMALL_TASK.format(folder=folder, model=folder / "model"))
    subprocess.run([STREAMRL, "get-model", "--config", str(path)], check=True, capture_output=True)
    return folder / "model"


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    """The small task with ports known beforehand."""
    text = SMALL_TASK.format(folder=tmp_path, model=model)
    for _ in ("buffer.url", "weights.address"):
        text = text.replace("127.0.0.1:0", f"127.0.0.1:{free_port()}", 1)
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts `streamrl`; whatever is left in the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [STREAMRL, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.communicate()


until = partial(block_until, deadline_s=START_DEADLINE_S)


def test_a_run_with_a_vllm_and_an_hf_generator_learns_from_both(
    config: Path, start: Callable[..., "subprocess.Popen[str]"]
):
    steps = f"run.max_steps={NUM_STEPS}"
    as_vllm = set_options("generator.engine=vllm", steps, *SIZES)
    generator = start("generator", "--config", str(config), "--id", "vllm-0", *as_vllm)
    folder = config.parent / "run"
    run = Launched(generator, folder)
    until(lambda: "serves" in run.log("vllm-0"), explain=lambda: run.log("vllm-0")[-3000:])
    launch = start("launch", str(config), "--no-view", *set_options(steps, *SIZES))
    output = launch.communicate(timeout=DEADLINE_S)[0]
    assert launch.returncode == 0, output
    assert generator.wait(timeout=DEADLINE_S) == 0, run.log("vllm-0")[-3000:]

    lines = run.lines
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert run.books["balanced"] is True
    assert run.books["dropped"].get("failed", 0) == 0
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-15:]) > sum(rewards[:15]) + 15 * 0.1, rewards
    for name in ("vllm-0", "generator-0"):
        versions = {line.get(f"generator/{name}/policy_version", 0) for line in lines}
        assert len(versions) > 3, (name, versions)
        assert max(line.get(f"generator/{name}/tokens_per_s") or 0 for line in lines) > 0, name
    gaps = [abs(line["mismatch/staleness_0/kl"]) for line in lines]
    assert max(gaps) < 1e-4, gaps
    for extreme in ("mismatch/rollout_is_max", "mismatch/rollout_is_min"):
        assert max(abs(line[extreme] - 1) for line in lines) < 1e-3, "a single token's ratio"
    assert {line["buffer/staleness_max"] for line in lines} == {0}


def test_a_killed_vllm_generator_leaves_no_process_behind(
    config: Path, start: Callable[..., "subprocess.Popen[str]"]
):
    as_vllm = set_options("generator.engine=vllm")
    generator = start("generator", "--config", str(config), "--id", "vllm-0", *as_vllm)
    run = Launched(generator, config.parent / "run")
    until(lambda: "serves" in run.log("vllm-0"), explain=lambda: run.log("vllm-0")[-3000:])
    family = psutil.Process(generator.pid).children(recursive=True)
    assert len(family) >= 2, "vLLM's engine core and its worker"
    generator.send_signal(signal.SIGKILL)
    generator.wait()
    _, alive = psutil.wait_procs(family, timeout=DEADLINE_S)
    assert not alive, [process.cmdline() for process in alive]
