"""Daemons killed and frozen, older and damaged checkpoints, a full disk: nothing lost, no hang.

On `redis://` the server is killed too, and comes back with its append-only file.
"""

import contextlib
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from redis import Redis

from buffers.journal.journal import read_rows
from buffers.journal.payload_segments import PayloadPlace
from buffers.journal.sqlite import journal_path, open_to_read
from buffers.ledger.state import GROUP
from streamrl.cli.buffer.audit import audit_run
from streamrl.cli.main import main
from streamrl.errors import ConfigError
from streamrl.run_folder import config_of
from streamrl.tracking.jsonl import TRAINED_FILE, read_metrics
from tests.redis_server import RedisServer, named_payloads, redis_server
from tests.research.faults import FaultKind
from tests.settings import set_options
from tests.system.conftest import CONFIG, Launched, RunFolder, script
from tests.system.test_launch import assert_books_close

# A run that hangs is found sooner by the script; one with nine faults takes a busy machine minutes.
pytestmark = pytest.mark.timeout(900)
DEADLINE_S = 800
# No generator loses its leases but that which is killed, whose leases the test waits for.
LEASES = "buffer.lease_ttl_s=10"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture(params=["zmq", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "zmq":
        return "zmq://127.0.0.1:0"
    return str(request.getfixturevalue("redis").url)


def kill_at_steps(server: RedisServer, record: Path, steps: tuple[int, ...]) -> None:
    """Kills the server at these steps and starts it again. Waits for the run's record to grow."""
    deadline = time.monotonic() + DEADLINE_S
    for step in steps:
        while len(read_metrics(record)) < step:
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.02)
        server.kill()
        server.start()


@pytest.mark.long
def test_a_run_under_fire_trains_every_prompt_once(
    tmp_path: Path, model: Path, url: str, request: pytest.FixtureRequest
):
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, model=model))
    command = [*script("chaos"), str(config), "--seed", "5", "--kills", "4"]
    others = ("resume", "damage", "full-disk", "removal", "fresh-start")
    command += [word for kind in others for word in (FaultKind(kind).option, "1")]
    command += set_options("run.max_steps=30", "generator.count=2", f"buffer.url={url}")
    with ThreadPoolExecutor(max_workers=1) as threads:
        record = tmp_path / "run" / TRAINED_FILE
        steps = (4, 16) if url.startswith("redis") else ()
        server = request.getfixturevalue("redis") if steps else None
        killing = threads.submit(kill_at_steps, server, record, steps)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        killing.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert main(["buffer", "audit", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "chaos.json").read_text())
    kinds = Counter(fault["kind"] for fault in result["injected"])
    assert kinds == {"kill": 4, **dict.fromkeys(others, 1)}
    killed = {f["role"].partition("-")[0] for f in result["injected"] if f["kind"] == "kill"}
    assert killed >= {"learner", "generator"}
    assert "and on from step-" in done.stdout
    assert "without --resume: " in done.stdout
    assert "the buffer holds a run run at version " in done.stdout
    assert "is damaged: " in RunFolder(tmp_path / "run").log("learner")
    assert "cannot be saved: " in RunFolder(tmp_path / "run").log("learner")
    run = RunFolder(tmp_path / "run")
    num_steps = len(run.lines)
    assert num_steps >= 30
    assert f"{num_steps} steps trained {num_steps * 4} prompts" in done.stdout
    assert_books_close(run)
    assert run.books["acknowledged"] >= num_steps * 4
    assert "serving at" in run.log("buffer")
    assert "learner: done" in run.log("learner")


@pytest.mark.long
def test_two_ranks_go_on_without_their_checkpoints_within_the_bound(tmp_path: Path, model: Path):
    """Groups of versions that the learner makes anew are of the future for it."""
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, model=model))
    faults = ("--kills", "0", "--losses", "1", "--removals", "1", "--resumes", "1")
    command = [*script("chaos"), str(config), "--seed", "2", *faults]
    command += set_options("run.max_steps=24", "buffer.max_staleness=1", "learner.num_ranks=2")
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 faults were injected" in done.stdout
    assert "removed" in done.stdout
    num_steps = len(RunFolder(tmp_path / "run").lines)
    assert num_steps >= 24
    assert f"{num_steps} steps trained {num_steps * 4} prompts" in done.stdout


UNEVEN = """
import asyncio
import os
from pathlib import Path

from actors.environments import SingleTurn

FOLDER = Path({folder!r})


class Uneven(SingleTurn):
    async def start(self, context):
        self.name = f"{{context.seed}} {{context.episode_index}}"
        while context.episode_index and not (FOLDER / "go").exists():
            await asyncio.sleep(0.05)
        return await super().start(context)

    async def step(self, completion):
        with (FOLDER / "sampled").open("a") as file:
            file.write(f"{{self.name}} {{os.getpid()}}\\n")
        return await super().step(completion)
"""


def test_the_finished_siblings_of_a_generator_that_is_killed_are_trained_and_not_sampled_again(
    launch: Callable[..., Launched], tmp_path: Path, url: str
):
    """Of each group one is finished; the others wait until another process has the group."""
    file = tmp_path / "uneven.py"
    file.write_text(UNEVEN.format(folder=str(tmp_path)))
    environment = f"generator.environment={file}:Uneven"
    settings = ("run.max_steps=3", environment, f"buffer.url={url}", LEASES)
    run = launch(*set_options(*settings), strict=False)
    run.until(lambda: num_kept_siblings(run.folder, url) == 12)
    run.child("generator-0").kill()
    run.until(lambda: run.log("generator-0").count("goes on with 1 siblings") == 12)
    (tmp_path / "go").touch()
    assert run.end() == 0, run.output
    lines = [line.split() for line in (tmp_path / "sampled").read_text().splitlines()]
    sampled = Counter((seed, index) for seed, index, _ in lines)
    assert (len(sampled), set(sampled.values())) == (12 * 4, {1})
    processes = {index: {pid for _, i, pid in lines if i == index} for _, index, _ in lines}
    assert len(processes["0"]) == 1
    assert processes["0"].isdisjoint(processes["1"])
    assert run.books["dropped"] == {"expired": 12}
    assert main(["buffer", "audit", str(run.folder)]) == 0


def num_kept_siblings(run: Path, url: str) -> int:
    if url.startswith("redis"):
        with closing(Redis.from_url(url)) as server:
            return sum(sibling != GROUP for _, sibling in named_payloads(server, "run"))
    with contextlib.suppress(ConfigError), open_to_read(journal_path(run)) as journal:
        places = read_rows(journal.execute("SELECT * FROM entry"), PayloadPlace).places
        return sum(sibling != GROUP for _, sibling in places)
    return 0


TURNS = """
import asyncio
import os
from pathlib import Path

from streamrl.interfaces import Observation, Transition

FOLDER = Path({folder!r})


class Turns:
    async def start(self, context):
        self.context, self.turn = context, 0
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion):
        while self.turn and not (FOLDER / "go").exists():
            await asyncio.sleep(0.05)
        self.turn += 1
        with (FOLDER / "steps").open("a") as file:
            name = f"{{self.context.seed}} {{self.context.episode_index}}"
            file.write(f"{{name}} {{self.turn}} {{os.getpid()}}\\n")
        again = Observation(token_ids=self.context.prompt_token_ids)
        return Transition(observation=again, done=self.turn == 3)

    async def snapshot(self):
        return {{"turn": self.turn}}

    async def restore(self, context, snapshot):
        self.context, self.turn = context, snapshot["turn"]
"""


def test_an_episode_of_a_generator_that_is_killed_goes_on_with_its_next_turn(
    launch: Callable[..., Launched], tmp_path: Path
):
    """Each has finished its first turn, and waits for the answer to what it sampled of its second.

    So all but the third was sampled by a process that is gone before the first group is trained.
    """
    file = tmp_path / "turns.py"
    file.write_text(TURNS.format(folder=str(tmp_path)))
    lengths = ("generator.max_new_tokens=4", "generator.min_new_tokens=4")
    places = ("generator.max_model_len=64", "learner.max_tokens_per_micro_batch=256")
    environment = f"generator.environment={file}:Turns"
    settings = ("run.max_steps=3", environment, *lengths, *places, LEASES)
    run = launch(*set_options(*settings), strict=False)
    run.until(lambda: kept_tokens(run.folder) == [8] * 48)
    run.child("generator-0").kill()
    goes_on = "goes on with 0 siblings, and 4 unfinished ones"
    run.until(lambda: run.log("generator-0").count(goes_on) == 12)
    (tmp_path / "go").touch()
    assert run.end() == 0, run.output
    lines = [line.split() for line in (tmp_path / "steps").read_text().splitlines()]
    steps = Counter((seed, index, turn) for seed, index, turn, _ in lines)
    assert (len(steps), set(steps.values())) == (12 * 4 * 3, {1})
    processes = {turn: {pid for *_, t, pid in lines if t == turn} for turn in "123"}
    assert processes["1"].isdisjoint(processes["2"])
    assert len(processes["1"]) == 1
    assert run.books["dropped"] == {"expired": 12}
    assert main(["buffer", "audit", str(run.folder)]) == 0


def kept_tokens(run: Path) -> list[int]:
    """Of each sibling that the journal has before its group."""
    with contextlib.suppress(ConfigError), open_to_read(journal_path(run)) as journal:
        packed = journal.execute("SELECT siblings FROM entry WHERE siblings IS NOT NULL").fetchall()
        siblings = [msgspec.msgpack.decode(row[0]) for row in packed]
        return [sibling["num_tokens"] for group in siblings for sibling in group]
    return []


def test_a_generator_frozen_past_its_leases_costs_those_only(launch: Callable[..., Launched]):
    settings = ("run.max_steps=100000", "generator.count=2", "buffer.lease_ttl_s=1.5")
    run = launch(*set_options(*settings))
    run.until_generators(2)
    frozen = run.child("generator-1")
    frozen.send_signal(signal.SIGSTOP)
    try:
        run.until_generators(1)
        step = len(run.lines)
        run.until_step(step + 3)
    finally:
        frozen.send_signal(signal.SIGCONT)
    run.until_generators(2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    config = config_of(run.folder)
    ended = config.run.model_copy(update={"max_steps": run.lines[-1]["step"]})
    complete = config.model_copy(update={"run": ended})
    assert audit_run(run.folder, complete=complete).faults == ()
    assert run.books["leased"] == 0
    assert "generator-1: done" in run.log("generator-1")
    assert main(["buffer", "audit", str(run.folder)]) == 0
