"""Whole runs on a real SGLang: one that the generator starts, and one elsewhere."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from actors.engines.served.process import ServerProcess
from actors.engines.sglang.server import launch_command
from tests.engines import ENVIRONMENT, run_config
from tests.ports import free_port
from tests.settings import set_options
from tests.system.conftest import Launched

NUM_STEPS = 20
# Synchronous, so that every token's log-probability can be compared with the learner's.
SIZES = ("generator.engine=sglang", "generator.count=1", "buffer.max_staleness=0")


def servers_of(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(words := process.info["cmdline"] or [])
        and "sglang.launch_server" in words
    ]


def start(
    launch: Callable[..., Launched],
    *overrides: str,
    num_steps: int = NUM_STEPS,
    strict: bool = True,
) -> Launched:
    words = (*SIZES, f"run.max_steps={num_steps}", *overrides)
    return launch(*set_options(*words), strict=strict)


def assert_learned_from_the_newest_weights(run: Launched, num_steps: int = NUM_STEPS) -> None:
    assert run.end() == 0, run.output
    assert [line["step"] for line in run.lines] == list(range(1, num_steps + 1))
    assert run.books["balanced"] is True
    assert run.books["dropped"].get("failed", 0) == 0
    gaps = [abs(line["mismatch/staleness_0/kl"]) for line in run.lines]
    assert max(gaps) < 1e-4, gaps
    assert {line["buffer/staleness_max"] for line in run.lines} == {0}, "an update was not loaded"


def test_a_run_with_a_server_of_its_own(launch, model):
    run = start(launch)
    run.until_step(1)
    assert servers_of(model)
    assert_learned_from_the_newest_weights(run)
    assert not servers_of(model)
    (log,) = (run.folder / "logs").glob("sglang-*.log")
    assert "Traceback" not in log.read_text()


@pytest.fixture
def start_server(model: Path, tmp_path: Path) -> Iterator[Callable[[], ServerProcess]]:
    """Starts the server at always the same address, `port`."""
    port = free_port()
    config = run_config(model, max_num_seqs=16, max_model_len=40)
    words = launch_command(config, host="127.0.0.1", port=port, seed=0)
    started: list[ServerProcess] = []

    def start() -> ServerProcess:
        started.append(ServerProcess(words, tmp_path / "sglang.log", ENVIRONMENT))
        return started[-1]

    start.url = f"http://127.0.0.1:{port}"
    start.log = tmp_path / "sglang.log"
    yield start
    for process in started:
        process.close()


def test_a_server_elsewhere_that_is_started_again_samples_with_the_newest_weights(
    launch, start_server
):
    server = start_server()
    where = (f"generator.sglang.url={start_server.url}", "weights.bucket_bytes=4096")
    run = start(launch, *where, strict=False)
    run.until_step(3)
    server.close()
    server = start_server()
    assert_learned_from_the_newest_weights(run)
    server.require_alive()


def test_two_generators_share_a_server_whose_owner_is_killed(launch, start_server):
    """The other one alone makes forty steps while the one that was killed starts again."""
    server, num_steps = start_server(), 10 * NUM_STEPS
    where = (f"generator.sglang.url={start_server.url}", "generator.count=2")
    own = ("buffer.lease_ttl_s=30", "weights.deadline_s=30")
    run = start(launch, *where, *own, num_steps=num_steps, strict=False)
    run.until_step(5)
    run.child("generator-0").send_signal(signal.SIGKILL)
    assert_learned_from_the_newest_weights(run, num_steps)
    log = start_server.log.read_text()
    num_loads = log.count('"POST /end_weight_update')
    assert num_loads <= num_steps + 3, "each version once, not once for each generator"
    num_formed = log.count('"POST /init_weights_update_group')
    assert num_formed <= 4, "a generator that ends while its group is formed blocks the server"
    for name in ("generator-0", "generator-1"):
        versions = {line.get(f"generator/{name}/policy_version", 0) for line in run.lines}
        assert len(versions) > 3, (name, versions)
    server.require_alive()
