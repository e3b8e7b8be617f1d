"""Commands that read a run: of one that has ended, of one that is not there, of what is no run."""

import argparse
import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from streamrl import __version__
from streamrl.cli.buffer import target as module
from streamrl.cli.main import main
from streamrl.cli.processes.run_commands import launching
from streamrl.cli.report import reported
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.errors import ConfigError, Interrupted, RolloutError, TransportError
from streamrl.run_folder import Launch, note_launch, prepare
from streamrl.types import Books, BufferStats, LearnerActivity
from tests.checkpoints import write_checkpoint
from tests.unit.test_diagnosis import buffer
from tests.unit.test_displays import AHEAD_S, make_run

JUST_ENDED = {"activity": LearnerActivity.ENDED, "time_s": AHEAD_S}
LOOK = [
    ["generators"],
    ["buffer", "inspect"],
    ["buffer", "drain"],
    ["generators", "cordon", "ID"],
    ["generators", "uncordon", "ID"],
    ["generators", "drain", "ID"],
]


def call(command: list[str], target: object) -> int:
    words = [word for word in command if word != "ID"]
    return main([*words, str(target), *(["g"] if "ID" in command else [])])


def at_port(config: RunConfig, port: int, max_steps: int = 6) -> RunConfig:
    """The run's configuration with a buffer at this port, in its folder."""
    buffer = config.buffer.model_copy(update={"url": f"zmq://127.0.0.1:{port}"})
    run = config.run.model_copy(update={"max_steps": max_steps})
    optimizer = config.learner.optimizer.model_copy(update={"warmup_steps": 0})
    learner = config.learner.model_copy(update={"optimizer": optimizer})
    config = config.model_copy(update={"buffer": buffer, "run": run, "learner": learner})
    (config.run.path / "config.yaml").write_text(to_yaml(config))
    # By the launch, before all reports.
    os.utime(config.run.path / "config.yaml", (0, 0))
    return config


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def other_server() -> Iterator[socket.socket]:
    """Of another run, which has the port of the one that has ended."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        yield server


@pytest.fixture(autouse=True)
def no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client waits for its buffer for seconds: none is made for one that is gone."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a client was made for a run that has ended")

    monkeypatch.setattr(module, "connect", refuse)
    monkeypatch.setattr(module, "ZmqBuffer", refuse)


@pytest.mark.parametrize("command", LOOK)
def test_a_finished_run_is_known_from_its_folder_alone(tmp_path, capsys, other_server, command):
    config = make_run(tmp_path, activity=LearnerActivity.ENDED, time_s=AHEAD_S)
    config = at_port(config, other_server.getsockname()[1])
    assert call(command, config.run.path) == 1
    error = capsys.readouterr().err
    assert f"no buffer of {config.run.path} is running: finished with step 6 of 6, 0 s ago" in error
    assert call(command, config.run.path / "config.yaml") == 1
    with pytest.raises(BlockingIOError):
        other_server.accept()


@pytest.mark.parametrize("command", LOOK[:3])
def test_a_run_that_ends_while_its_buffer_is_asked_is_said_to_have_ended(
    tmp_path, capsys, monkeypatch, command
):
    config = at_port(make_run(tmp_path, time_s=AHEAD_S), 1)

    class EndingBuffer:
        async def stats(self) -> None:
            make_run(tmp_path, **JUST_ENDED)
            raise TransportError("the buffer has not answered")

        drain = stats

        async def close(self) -> None:
            pass

    monkeypatch.setattr(module, "connect", lambda _: EndingBuffer())
    assert call(command, config.run.path) == 1
    assert "is running: finished with step 6 of 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("learner", "sentence"),
    [
        ({"activity": LearnerActivity.ENDED}, "stopped at step 6 of 9, "),
        (
            {"activity": LearnerActivity.SAVING, "time_s": 0.0},
            "(saves a checkpoint) and its buffer does not answer",
        ),
    ],
)
@pytest.mark.parametrize("command", LOOK[:3])
def test_a_run_whose_processes_are_gone_is_said_to_be_so(
    tmp_path, capsys, closed_port, command, learner, sentence
):
    config = at_port(make_run(tmp_path, **learner), closed_port, max_steps=9)
    assert call(command, config.run.path) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("learner", "max_steps", "code", "state", "line"),
    [
        (JUST_ENDED, 6, 0, "finished", "--resume --set run.max_steps=N goes on with it"),
        (JUST_ENDED, 6, 0, "finished", "learner  has ended, 0 s ago"),
        (JUST_ENDED | {"ended_early": "no better"}, 6, 0, "finished", "no better, 0 s ago\n"),
        ({"activity": LearnerActivity.ENDED}, 9, 0, "stopped", "--resume goes on with it"),
        ({"time_s": 0.0}, 9, 1, "dead", "! nothing listens at zmq://127.0.0.1:"),
    ],
)
def test_status_says_how_a_run_ended(
    tmp_path, capsys, closed_port, learner, max_steps, code, state, line
):
    config = at_port(make_run(tmp_path, **learner), closed_port, max_steps)
    assert main(["status", str(config.run.path)]) == code
    output = capsys.readouterr().out
    assert line in output
    assert "healthy" not in output
    # Whom the weights reached is of a run that goes on.
    assert "weights " not in output
    assert main(["status", str(config.run.path), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["state"] == state


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (None, "steps 1 to 6 are in no checkpoint; --resume goes on from the start"),
        (3, "steps 4 to 6 are in no checkpoint; --resume goes on from step 3"),
        (5, "step 6 is in no checkpoint; --resume goes on from step 5"),
        (6, ""),
    ],
)
def test_steps_that_no_checkpoint_has_are_named_when_the_run_has_ended(
    tmp_path, capsys, closed_port, saved, said
):
    config = at_port(make_run(tmp_path, activity=LearnerActivity.SAVING), closed_port, 9)
    if saved is not None:
        write_checkpoint(config.run.path, saved, Books())
    with pytest.raises(Interrupted), reported(config, argparse.Namespace(), Console()):
        raise Interrupted(signal.SIGINT)
    summary = capsys.readouterr().out
    assert main(["status", str(config.run.path)]) == 0
    for output in (summary, capsys.readouterr().out):
        rows = " ".join(output.replace("│", " ").split())
        assert (f"unsaved {said}" in rows) == bool(said)
        assert ("in no checkpoint" in rows) == bool(said)


@pytest.mark.parametrize("has_reported", [True, False])
@pytest.mark.parametrize("ray", [None, "auto", "head:6379"])
def test_status_says_how_the_launch_ended(
    tmp_path, capsys, closed_port, monkeypatch, has_reported, ray
):
    """With the launch's own sentence; a learner that ended in order, or never began, has none."""
    monkeypatch.chdir(tmp_path)
    ended = {"activity": LearnerActivity.ENDED, "policy_version": 0, "time_s": time.time() - 2}
    config = at_port(make_run(Path("runs"), **ended), closed_port, max_steps=9)
    (config.run.path / "metrics.jsonl").unlink()
    if not has_reported:
        (config.run.path / "learner.json").unlink()
    os.utime(config.run.path / "config.yaml")
    launch = argparse.Namespace(ray=ray, slurm=False)
    sentence = "generator-0: reward rewards.py:score: KeyError: 'label' (rewards.py:2)"
    with pytest.raises(RolloutError), reported(config, launch, Console()):
        raise RolloutError(sentence)
    summary = capsys.readouterr().out
    # The launch says it last.
    assert "launch failed" not in summary
    assert "runs/run/report.html" in summary
    assert main(["report", "runs/run"]) == 0
    assert "launch failed" in capsys.readouterr().out
    assert (config.run.path / "report.html").exists()
    assert main(["status", "runs/run"]) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"! failed: {sentence}"
    assert main(["status", "runs/run", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["healthy"]) == ("failed", False)
    assert [f["sentence"] for f in found["findings"]] == [f"failed: {sentence}"]
    assert main(["generators", "runs/run"]) == 1
    assert f"no buffer of runs/run is running: failed: {sentence}" in capsys.readouterr().err
    assert main(["status", "runs/run", "--follow"]) == 0

    with pytest.raises(Interrupted), reported(config, launch, Console()):
        raise Interrupted(signal.SIGINT)
    capsys.readouterr()
    assert main(["status", "runs/run"]) == 0
    where = {None: "", "auto": " --ray", "head:6379": " --ray head:6379"}[ray]
    command = f"streamrl launch runs/run/config.yaml{where} --resume"
    said = f"stopped before the first step; {command} goes on with it"
    assert capsys.readouterr().out.splitlines()[1] == said
    assert main(["status", "runs/run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "stopped"


def test_a_run_that_was_moved_goes_on_where_it_is_now(tmp_path, capsys):
    config = at_port(make_run(tmp_path, **JUST_ENDED), 1)
    moved = tmp_path / "of others" / "20240101"
    moved.parent.mkdir()
    config.run.path.rename(moved)
    main(["status", str(moved)])
    words = shlex.split(capsys.readouterr().out)
    options = words[words.index("--resume") :]
    settings = [options[i + 1] for i, word in enumerate(options) if word == "--set"]
    settings = [s for s in settings if "=N" not in s]
    run = load_config(moved / "config.yaml", settings).config.run
    assert run.path == moved
    # Without them another run would begin where it was.
    for command in (["launch"], ["learner", "--config"]):
        assert main([*command, str(moved / "config.yaml"), "--resume"]) == 2
        assert f"--set 'run.folder=\"{moved.parent}\"'" in capsys.readouterr().err
    assert not config.run.path.exists()


def test_a_run_that_is_finished_without_its_validator_is_not_in_order(tmp_path, capsys):
    config = at_port(make_run(tmp_path, activity=LearnerActivity.ENDED), 1)
    launch = argparse.Namespace()
    with pytest.raises(RolloutError), reported(config, launch, Console()):
        raise RolloutError("validator: no reward has the row")
    capsys.readouterr()
    assert main(["status", str(config.run.path)]) == 1
    assert "! failed: validator: no reward has the row" in capsys.readouterr().out
    assert main(["status", str(config.run.path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_a_launch_that_begins_and_daemons_after_one_are_not_what_ended_before(tmp_path):
    config = at_port(make_run(tmp_path, time_s=AHEAD_S), 1, max_steps=9)
    note_launch(config.run.path, Launch(ended_s=time.time(), failure="generator-0: oops"))
    reading = module.read_folder(config)
    assert (reading.failure, reading.is_launch_over) == ("", False)
    (config.run.path / "learner.json").unlink()
    assert module.read_folder(config).failure == "generator-0: oops"
    with reported(config, argparse.Namespace(), Console()):
        assert not module.read_folder(config).is_launch_over
    assert module.read_folder(config).is_launch_over
    prepare(config, resume=True, new=False)
    assert not module.read_folder(config).is_launch_over


@pytest.mark.parametrize(
    ("launched_s", "max_steps", "state", "goes_on"),
    [(1, 9, "starting", True), (-1, 9, "stopped", False), (1, 6, "finished", False)],
)
def test_a_run_that_is_launched_again_starts_until_its_learner_reports(
    tmp_path, capsys, monkeypatch, closed_port, launched_s, max_steps, state, goes_on
):
    """Its buffer is there at once; the report in the folder is that of the launch before."""

    async def read_stats(*_: object) -> tuple[BufferStats, str]:
        return buffer(), ""

    monkeypatch.setattr("streamrl.cli.status.read_stats", read_stats)
    ended_s = time.time() - 3600.0
    learner = {"activity": LearnerActivity.ENDED, "time_s": ended_s}
    config = at_port(make_run(tmp_path, **learner), closed_port, max_steps)
    os.utime(config.run.path / "config.yaml", (0, ended_s + launched_s))
    assert main(["status", str(config.run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == state
    assert main(["status", str(config.run.path)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert state in line
    if state == "stopped":
        command = f"{config.run.path}/config.yaml --resume goes on with it"
        assert f"streamrl learner --config {command}" in line, "a launch has a buffer of its own"
        (config.run.path / "data.json").touch()
        assert main(["status", str(config.run.path)]) == 0
        assert f"streamrl launch {command}" in capsys.readouterr().out
    monkeypatch.setattr("streamrl.cli.status.time.sleep", interrupt)
    assert main(["status", "--follow", str(config.run.path)]) == (130 if goes_on else 0)


SCALING = (
    *("steps_per_s", "steps_per_s_generator_added", "steps_per_s_rank_added"),
    *("num_generators_wanted", "rest_frac"),
)


def test_a_run_whose_generators_are_gone_is_not_healthy_and_gets_no_hint_to_add_one(
    tmp_path, capsys, monkeypatch, closed_port
):
    """At once it waits for one, which may be starting; after two minutes that is a finding."""
    age_s = 0.0
    hints = {f"scaling/{name}": 1.0 for name in SCALING} | {"generator/idle_frac": 0.1}

    async def read_stats(*_: object) -> tuple[BufferStats, str]:
        return buffer(last_heartbeat_age_s=age_s), ""

    monkeypatch.setattr("streamrl.cli.status.read_stats", read_stats)
    config = at_port(make_run(tmp_path, activity=LearnerActivity.WAITING), closed_port, 9)
    line = {"step": 6, "time_s": time.time(), "generator/count": 1, **hints}
    (config.run.path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for age_s, code in ((20.0, 0), (121.0, 1)):
        assert main(["status", str(config.run.path)]) == code
        output = capsys.readouterr().out
        sentence = f"no generator reports to the buffer, for {age_s:.0f} s"
        assert output.splitlines()[1].startswith(f"{'!' if code else 'waiting:'} {sentence}")
        assert "healthy" not in output
        assert "another generator would" not in output
        assert main(["status", str(config.run.path), "--json"]) == code
        record = json.loads(capsys.readouterr().out)
        assert (record["healthy"], record["scaling"]) == (False, None)
        found = record["findings" if code else "pending"]
        assert [finding["cause"] for finding in found] == ["no_generator"]


def test_a_run_that_a_launch_starts_just_now_is_starting_and_not_wrong(
    tmp_path, capsys, closed_port
):
    config = at_port(make_run(tmp_path), closed_port)
    (config.run.path / "learner.json").unlink()
    for launched_s, code in ((5.0, 0), (125.0, 1)):
        launched = time.time() - launched_s
        os.utime(config.run.path / "config.yaml", (launched, launched))
        assert main(["status", str(config.run.path)]) == code
        prefix = "!" if code else "starting:"
        assert capsys.readouterr().out.splitlines()[1].startswith(f"{prefix} nothing listens at")


def test_a_stopped_run_that_a_launch_goes_on_with_is_starting_before_its_buffer_answers(
    tmp_path, capsys, closed_port
):
    run = make_run(tmp_path, activity=LearnerActivity.ENDED, time_s=time.time() - 900)
    config = at_port(run, closed_port, max_steps=9)
    launched = time.time() - 5.0
    os.utime(config.run.path / "config.yaml", (launched, launched))
    assert main(["status", str(config.run.path)]) == 0
    output = capsys.readouterr().out
    assert "\nstarting\n" in output
    assert "learner  has not reported since the launch began" in output


def interrupt(_: float) -> None:
    raise KeyboardInterrupt


def test_a_run_without_a_learner_yet_is_not_waited_for(tmp_path, capsys, closed_port):
    config = at_port(make_run(tmp_path), closed_port)
    (config.run.path / "learner.json").unlink()
    assert main(["generators", str(config.run.path)]) == 1
    assert "no learner has reported, and nothing listens" in capsys.readouterr().err
    for url in (f"zmq://127.0.0.1:{closed_port}", "zmq://no..name:9", f"zmq://{'a' * 70}:9"):
        assert main(["generators", url]) == 5
        assert f"nothing listens at {url}" in capsys.readouterr().err


READ = [
    *(["status"], ["status", "--follow"], ["report"], ["buffer", "audit"], ["buffer", "inspect"]),
    *(
        ["buffer", "drain"],
        ["buffer", "books", "--forget"],
        ["generators"],
        ["generators", "drain", "ID"],
    ),
    ["evaluate"],
]


@pytest.mark.parametrize("command", READ)
def test_a_run_that_is_not_there_is_refused_with_the_nearest_and_makes_no_folder(
    tmp_path, capsys, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs"))
    files = set(tmp_path.rglob("*"))
    assert call(command, "runs/rum") == 2
    error = capsys.readouterr().err
    assert "did you mean 'runs/run'?" in error
    assert len(error.splitlines()) == 1
    assert set(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("command", READ[:4])
def test_a_run_that_is_like_none_is_refused_with_what_there_is(
    tmp_path, capsys, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    assert call(command, "runs/nothing") == 2
    assert "; `streamrl launch CONFIG` starts a run" in capsys.readouterr().err
    for time_s, name in enumerate(("older", "newer")):
        make_run(Path("runs")).run.path.rename(Path("runs", name))
        os.utime(Path("runs", name, "config.yaml"), (time_s, time_s))
    assert call(command, "runs/thing") == 2
    assert "; the newest runs are runs/newer, runs/older\n" in capsys.readouterr().err


def test_a_file_of_a_run_names_the_run(tmp_path, capsys):
    run = make_run(tmp_path).run.path
    (run / "samples.jsonl").touch()
    assert main(["samples", str(run / "samples.jsonl")]) == 0
    assert f"{run} has no such" in " ".join(capsys.readouterr().out.split())
    assert main(["replay", str(run / "config.yaml")]) == 2
    assert "is no run folder" not in capsys.readouterr().err
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "learner.log").touch()
    assert main(["samples", str(run / "logs" / "learner.log")]) == 0
    assert main(["samples", str(run / "nothing.txt")]) == 2
    assert "nothing.txt" in capsys.readouterr().err


def test_a_run_of_another_release_is_refused_with_the_release(tmp_path, capsys):
    run = make_run(tmp_path).run.path
    text = (run / "config.yaml").read_text() + "old: 1\n"
    for first, said in (
        (f"# StreamRL {__version__}", None),
        ("# StreamRL 9.0", "was written by StreamRL 9.0, and this is StreamRL"),
        ("#", "was written by an earlier release, and this is StreamRL"),
        (f"\ufeff# mine\n\n# StreamRL {__version__}", None),
    ):
        (run / "config.yaml").write_text(first + "\n" + text.partition("\n")[2])
        assert main(["samples", str(run)]) == 2
        refused, *more = capsys.readouterr().err.splitlines()
        assert "old: unknown key" in refused
        assert [said in line for line in more] == ([] if said is None else [True])
    (run / "config.yaml").write_text(text.removesuffix("old: 1\n").partition("\n")[2])
    with pytest.raises(ConfigError) as refusal:
        load_config(run, ["buffer.max_stalenes=1"], {})
    assert "release" not in str(refusal.value)


@pytest.mark.parametrize("command", READ)
@pytest.mark.parametrize("kind", ["empty folder", "file"])
def test_what_is_no_run_is_one_sentence(tmp_path, capsys, command, kind):
    path = tmp_path / "it"
    path.mkdir() if kind == "empty folder" else path.write_bytes(b"\xff\x00")
    assert call(command, path) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1
    assert str(path) in error


@pytest.mark.parametrize(("max_steps", "is_said"), [(6, True), (7, False)])
def test_a_launch_of_a_run_that_has_made_its_last_step_says_how_to_make_more(
    tmp_path, capsys, max_steps, is_said
):
    config = make_run(tmp_path)
    config = config.model_copy(
        update={"run": config.run.model_copy(update={"max_steps": max_steps})}
    )
    write_checkpoint(config.run.path, 6, Books())
    arguments = argparse.Namespace(resume=True, new=False, ray=None, slurm=False)
    with launching(config, arguments, Console()):
        said = capsys.readouterr().out
    assert ("--resume --set run.max_steps=N goes on to step N" in said) is is_said


def test_evaluate_of_a_run_that_was_not_made_scores_nothing(tmp_path, capsys, monkeypatch):
    """Not the model that it would start from, whose score would be taken for the run's."""
    monkeypatch.chdir(tmp_path)
    config = make_run(Path("runs"))
    given = ["evaluate", "--config", str(config.run.path / "config.yaml")]
    assert main([*given, "--set", "run.name=rum"]) == 2
    assert "run.name: runs/rum is no run folder: there is none; did you" in capsys.readouterr().err
    assert main(given) == 2
    assert "runs/run has no checkpoint yet; --checkpoint" in capsys.readouterr().err
    assert main([*given, "--checkpoint", "nowhere"]) == 2
    assert "--checkpoint: there is no folder nowhere" in capsys.readouterr().err
    assert [path.name for path in Path("runs").iterdir()] == ["run"]


@pytest.mark.parametrize(("of_the_run", "is_kept"), [(True, True), (False, False)])
def test_the_score_of_another_model_is_not_kept_as_the_runs(
    tmp_path, capsys, monkeypatch, of_the_run: bool, is_kept: bool
):
    config = make_run(tmp_path)
    folder = (config.run.path if of_the_run else tmp_path) / "export"
    folder.mkdir()

    async def evaluate(_: RunConfig, model: Path, report: object) -> dict[str, str]:
        return {"model": str(model)}

    monkeypatch.setattr("streamrl.cli.evaluate.evaluate", evaluate)
    file = config.run.path / "config.yaml"
    assert main(["evaluate", "--config", str(file), "--checkpoint", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": str(folder)}
    assert (config.run.path / "evaluation.json").exists() is is_kept
