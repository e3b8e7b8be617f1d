"""deploy/multi_node.sh on machines made of namespaces: a real sshd and a real Ray on each.

What the script does whatever a run does is tested with a stand-in of `streamrl`; one run is real.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from streamrl.cli.launchers import LAUNCHERS
from streamrl.tracking.jsonl import read_metrics
from tests.deploy import namespaces
from tests.deploy.namespaces import Machine
from tests.system.conftest import CONFIG

SCRIPT = namespaces.ROOT / "deploy" / "multi_node.sh"
BIN = Path(sys.executable).parent
DEADLINE_S = 240.0
# Says how many nodes there are, then does what the copied file says, and saves when it is stopped.
STREAMRL = f"""#!{sys.executable}
import signal, sys, time
import ray

def stop(*_):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(143)

ray.init(address=sys.argv[-1], log_to_driver=False, logging_level="ERROR")
signal.signal(signal.SIGTERM, stop)
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.2)
print("two nodes,", *sys.argv[1:-1], flush=True)
exec(open("data/what.py").read())
"""


@pytest.fixture(scope="module", autouse=True)
def machines() -> None:
    """Once they run: processes that collect beside each other would install beside each other, and
    who finds the lock of apt taken would collect other tests."""
    if why := namespaces.missing():
        pytest.skip(f"ssh: {why}")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Machine]]:
    """`desk` runs the script, which starts Ray on `a` and `b`."""
    with namespaces.network(tmp_path_factory.mktemp("machines"), "desk", "a", "b") as found:
        (found["desk"].home / "hosts").write_text(
            f"# the head\nroot@{found['a'].address}\n\n{found['b'].address} {found['b'].address}\n"
            "10.77.0.9 # is not there\n"
        )
        yield found


class Script:
    """A call of the script on `desk`, seen from outside."""

    def __init__(self, hosts: Mapping[str, Machine], folder: Path, *words: str) -> None:
        self.hosts, self.output_file = hosts, hosts["desk"].home / "output.txt"
        start = ["--num-cpus=2", "--object-store-memory=80000000"]
        environment = {
            "STREAMRL_BIN": str(folder),
            "STREAMRL_SSH": "ssh -o LogLevel=ERROR",
            "RAY_START": " ".join(start),
        }
        given = [f"{name}={value}" for name, value in environment.items()]
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                hosts["desk"].command("env", *given, "sh", str(SCRIPT), *words),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def until_said(self, text: str) -> None:
        """Waits for the text; unblocked by it, by the script's end, or the deadline."""
        self._until(lambda: text in self.output_file.read_text(), text)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline_s or self.process.poll() is not None:
                assert condition(), f"{what}: {self.described()}"
            time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        """To the script alone: what it has started in the background ignores Ctrl-C."""
        nsenter = psutil.Process(self.process.pid)
        nsenter.children()[0].send_signal(number)

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)

    def described(self) -> str:
        logs = sorted((self.hosts["desk"].home / "logs").glob("*.log"))
        files = (self.output_file, *logs)
        return "".join(f"\n== {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def assert_nothing_is_left(self, but: Collection[int] = ()) -> None:
        """Of Ray or a run, on any machine, but these processes. Waits for what ends by itself."""
        deadline_s = time.monotonic() + DEADLINE_S
        while left := dict(_others(self.hosts, but)):
            assert time.monotonic() < deadline_s, left
            time.sleep(0.2)


def _others(hosts: Mapping[str, Machine], but: Collection[int]) -> Iterator[tuple[int, str]]:
    for host in hosts.values():
        yield from ((pid, words) for pid, words in host.processes().items() if pid not in but)


@pytest.fixture
def programs(tmp_path: Path, hosts: Mapping[str, Machine]) -> Path:
    """A folder with the real `ray` and the stand-in of `streamrl`."""
    (tmp_path / "ray").symlink_to(BIN / "ray")
    (tmp_path / "streamrl").write_text(STREAMRL)
    (tmp_path / "streamrl").chmod(0o755)
    home = hosts["desk"].home
    (home / "run.yaml").write_text("{}")
    (home / "data").mkdir(exist_ok=True)
    return tmp_path


def what(hosts: Mapping[str, Machine], code: str) -> None:
    (hosts["desk"].home / "data" / "what.py").write_text(code)


def test_the_code_and_the_options_of_a_run_go_through_and_nothing_is_left(hosts, programs):
    what(hosts, "sys.exit(4)")
    script = Script(hosts, programs, "-c", "data", "hosts", "run.yaml", "--set", "run.name=it's")
    assert script.end() == 4, script.described()
    said = "two nodes, launch run.yaml --set run.name=it's --ray\n"
    assert said in script.output_file.read_text(), script.described()
    lost = "multi_node.sh: no Ray on 10.77.0.9: see logs/ray-10.77.0.9.log\n"
    assert lost in script.output_file.read_text(), script.described()
    script.assert_nothing_is_left()


def test_a_run_saves_after_ctrl_c_and_another_cluster_of_a_machine_stays(hosts, programs):
    what(hosts, "time.sleep(600)")
    other = hosts["b"].command(
        *("env", f"PATH={BIN}:{os.environ['PATH']}", "ray", "start", "--head", "--block"),
        *("--port=7001", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats"),
        *(f"--node-ip-address={hosts['b'].address}", "--object-store-memory=80000000"),
    )
    with subprocess.Popen(other, stdout=subprocess.PIPE, text=True) as ray:
        assert ray.stdout is not None
        next(line for line in ray.stdout if "block forever" in line)
        stays = hosts["b"].processes().keys()
        script = Script(hosts, programs, "-c", "data", "hosts", "run.yaml")
        script.until_said("two nodes, ")
        script.signal(signal.SIGINT)
        assert script.end() == 130, script.described()
        assert script.output_file.read_text().endswith("saved\n"), script.described()
        script.assert_nothing_is_left(stays)
        assert stays <= hosts["b"].processes().keys()
        for pid, words in hosts["b"].processes().items():
            if "ray start" in words:
                os.kill(pid, signal.SIGTERM)
    script.assert_nothing_is_left()


def test_a_second_ctrl_c_does_not_wait(hosts, programs):
    deaf = "signal.signal(signal.SIGTERM, lambda *_: print('deaf', flush=True))"
    what(hosts, f"{deaf}\nwhile True:\n    time.sleep(1)")
    script = Script(hosts, programs, "-c", "data", "hosts", "run.yaml")
    script.until_said("two nodes, ")
    known = hosts["a"].home / "streamrl-run" / "ray.token"
    assert known.stat().st_mode & 0o777 == 0o600
    assert known.read_text() not in script.described()
    head = f"--address={hosts['a'].address}:6379"
    with pytest.raises(subprocess.CalledProcessError):
        hosts["b"].run(str(BIN / "ray"), "health-check", head)
    script.signal(signal.SIGINT)
    script.until_said("deaf")
    script.signal(signal.SIGINT)
    assert script.end() == 130, script.described()
    script.assert_nothing_is_left()


def test_nothing_is_left_of_a_script_that_is_killed(hosts, programs):
    what(hosts, "time.sleep(600)")
    script = Script(hosts, programs, "-c", "data", "hosts", "run.yaml")
    script.until_said("two nodes, ")
    script.signal(signal.SIGKILL)
    script.assert_nothing_is_left()


def test_a_head_without_ray_is_said(hosts, programs, tmp_path):
    (programs / "ray").unlink()
    (programs / "ray").write_text("#!/bin/sh\necho no Ray here\nexit 1\n")
    (programs / "ray").chmod(0o755)
    script = Script(hosts, programs, "hosts", "run.yaml")
    assert script.end() == 2
    log = f"logs/ray-{hosts['a'].address}.log"
    assert f"no Ray on root@{hosts['a'].address}: see {log}" in script.output_file.read_text()
    assert "no Ray here" in (hosts["desk"].home / log).read_text()
    script.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("none", "run.yaml"), "multi_node.sh: cannot read none"),
        (("hosts", "none.yaml"), "multi_node.sh: cannot read none.yaml"),
        (("/dev/null", "hosts"), "multi_node.sh: /dev/null names no machine"),
        (("-c", "none", "hosts", "run.yaml"), "multi_node.sh: -c: there is no none"),
        (("hosts",), "deploy/multi_node.sh [-c PATH]... HOSTFILE run.yaml"),
    ],
)
def test_what_cannot_be_meant_so_is_said(hosts, words, sentence):
    script = Script(hosts, BIN, *words)
    assert script.end() == 2
    assert sentence in script.output_file.read_text()


@pytest.mark.skipif("ray" not in LAUNCHERS, reason="`streamrl launch` has no --ray here")
def test_a_run_of_two_machines_ends_with_its_books_closed(hosts, model, tmp_path):
    text = CONFIG.format(folder=tmp_path, model=model).replace("count: 1", "count: 2")
    (hosts["desk"].home / "run.yaml").write_text(text)
    script = Script(hosts, BIN, "hosts", "run.yaml", "--no-view")
    assert script.end() == 0, script.described()
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 12
    assert len([*(tmp_path / "run" / "logs").glob("generator-*.log")]) == 2
    hosts["desk"].run(str(BIN / "streamrl"), "buffer", "audit", str(tmp_path / "run"))
    script.assert_nothing_is_left()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("file", [*sorted(namespaces.ROOT.glob("deploy/**/*.sh"))], ids=str)
def test_shellcheck_finds_nothing(file):
    done = subprocess.run(["shellcheck", str(file)], capture_output=True, text=True)
    assert done.stdout == ""
