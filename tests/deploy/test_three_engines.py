"""One learner, three generators: an HF, a vLLM and an SGLang engine, each killed and started again.

vLLM and SGLang pin other versions of the same packages, so each has an environment of its own, and
its generator is started from there.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.cli.buffer.audit import audit_run
from streamrl.cli.main import main
from streamrl.run_folder import config_of
from tests.engines import ENVIRONMENT, ROOT
from tests.ports import free_port
from tests.settings import set_options
from tests.system.conftest import CONFIG, STREAMRL, Launched

pytestmark = pytest.mark.timeout(900)
DEADLINE_S = 400.0
ELSEWHERE = {"vllm": ROOT / ".venv-vllm/bin/streamrl", "sglang": ROOT / ".venv-sglang/bin/streamrl"}
# vLLM's CPU kernels take no heads narrower than 32.
SMALL_TASK = CONFIG.replace("num_heads: 2", "num_heads: 1")
# Synchronous, so that every token is of staleness 0 and can be compared with the learner's.
SIZES = (
    "buffer.max_staleness=0",
    # Whoever serves first waits for the others, and then for the launch.
    "buffer.deadline_s=300",
    "learner.groups_per_step=16",
    "generator.group_size=8",
    "generator.max_num_seqs=16",
    "run.max_steps=100000",
    "learner.optimizer.lr=3e-4",
)


@dataclass
class Run:
    """The learner's launch, with its HF generator, and two generators beside it."""

    config: Path
    generators: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)
    launched: Launched | None = None

    @property
    def folder(self) -> Path:
        return self.config.parent / "run"

    def log(self, role: str) -> str:
        path = self.folder / "logs" / f"{role}.log"
        return path.read_text() if path.exists() else ""

    def start(self, *words: str) -> "subprocess.Popen[str]":
        overrides = set_options(*SIZES)
        with (self.config.parent / "output.txt").open("a") as output:
            return subprocess.Popen(
                [*words, *overrides],
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT},
            )

    def start_generator(self, engine: str) -> None:
        command = [str(ELSEWHERE[engine]), "generator", "--config", str(self.config)]
        self.generators[engine] = self.start(
            *command, "--id", f"{engine}-0", "--set", f"generator.engine={engine}"
        )

    def until(self, condition: Callable[[], bool], role: str) -> None:
        """Waits for the condition; unblocked by it, by the learner's end or the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.log(role)[-3000:]
            if self.launched is not None:
                assert self.launched.process.poll() is None, self.log("learner")[-3000:]
            time.sleep(0.05)

    def until_serving(self, num_starts: int) -> None:
        for role in (f"{engine}-0" for engine in ELSEWHERE):
            self.until(lambda role=role: self.log(role).count("serves") == num_starts, role)

    def until_trained(self, generator: str, num_versions: int = 3) -> None:
        """The generator reports so many further versions, and tokens of its own."""
        assert self.launched is not None
        first = len(self.launched.lines)

        def has_advanced() -> bool:
            lines = self.launched.lines[first:]
            versions = {line.get(f"generator/{generator}/policy_version", 0) for line in lines}
            tokens = [line.get(f"generator/{generator}/tokens_per_s") or 0 for line in lines]
            return len(versions) > num_versions and max(tokens, default=0) > 0

        self.until(has_advanced, generator)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    for engine, command in ELSEWHERE.items():
        stamp = f"{command.parents[1].name}/{engine}.stamp"
        made = subprocess.run(["make", "-C", str(ROOT), stamp], capture_output=True, text=True)
        if made.returncode != 0:
            pytest.skip(f"make {stamp} failed: {made.stderr[-300:]}")
    text = SMALL_TASK.format(folder=tmp_path, model=tmp_path / "model")
    for _ in ("buffer.url", "weights.address"):
        text = text.replace("127.0.0.1:0", f"127.0.0.1:{free_port()}", 1)
    config = tmp_path / "run.yaml"
    config.write_text(text)
    assert main(["get-model", "--config", str(config)]) == 0
    made = Run(config)
    yield made
    started = [*made.generators.values(), *([made.launched.process] if made.launched else [])]
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def has_learned(lines: Sequence[Mapping[str, Any]]) -> bool:
    rewards = [line["reward/mean"] for line in lines]
    return sum(rewards[-15:]) > sum(rewards[:15]) + 15 * 0.1


def test_a_run_learns_from_three_engines_each_killed_once(run: Run):
    for engine in ELSEWHERE:
        run.start_generator(engine)
    run.until_serving(num_starts=1)
    run.launched = Launched(run.start(STREAMRL, "launch", str(run.config), "--no-view"), run.folder)
    launched = run.launched
    launched.until_step(20)
    for name in ("generator-0", "vllm-0", "sglang-0"):
        run.until_trained(name)

    launched.child("generator-0").send_signal(signal.SIGKILL)
    for engine in ELSEWHERE:
        run.generators[engine].kill()
        run.generators[engine].wait()
        run.start_generator(engine)
    run.until_serving(num_starts=2)
    for name in ("generator-0", "vllm-0", "sglang-0"):
        run.until_trained(name)

    launched.until(lambda: has_learned(launched.lines))
    for generator in run.generators.values():
        generator.send_signal(signal.SIGTERM)
    for generator in run.generators.values():
        assert generator.wait(timeout=DEADLINE_S) == 0
    launched.process.send_signal(signal.SIGINT)
    assert launched.process.wait(timeout=DEADLINE_S) == 130
    lines = launched.lines
    gaps = [abs(line["mismatch/staleness_0/kl"]) for line in lines]
    assert max(gaps) < 1e-4, gaps
    assert {line["buffer/staleness_max"] for line in lines} == {0}
    assert launched.books["balanced"] is True
    config = config_of(run.folder)
    ended = config.run.model_copy(update={"max_steps": lines[-1]["step"]})
    complete = config.model_copy(update={"run": ended})
    assert audit_run(run.folder, complete=complete).faults == ()
    assert main(["buffer", "audit", str(run.folder)]) == 0
