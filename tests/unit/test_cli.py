"""The command line answers at once, and what it says a person can act on."""

import importlib
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

import msgspec
import pytest
import yaml
from rich.console import Console, RenderableType

from streamrl.checkpoints.find import require_steps_to_launch
from streamrl.cli.arguments.commands import COMMANDS, GONE, GROUPS
from streamrl.cli.buffer.audit import check_folder
from streamrl.cli.display.numbers import sparkline, summary_rows, wait_shares
from streamrl.cli.display.view import headline, render
from streamrl.cli.main import main
from streamrl.cli.processes.run_commands import sole_launch
from streamrl.config import RunConfig, load_config
from streamrl.config.addresses import address_family, host_of, port_of
from streamrl.config.environments import SourceRows
from streamrl.errors import (
    PARENT_VARIABLE,
    ConfigError,
    FencedError,
    Interrupted,
    RolloutError,
    StreamRLError,
    TransportError,
)
from streamrl.run_folder import Rows, are_rows_checked, prepare
from streamrl.types import Books, LearnerActivity, LearnerStatus
from tests.checkpoints import write_checkpoint
from tests.ports import free_port
from tests.research import chaos, soak
from tests.research.script import run_script
from tests.settings import set_options

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")

LIGHT = [
    "streamrl",
    "streamrl.config",
    "streamrl.wire",
    "streamrl.cli.main",
    "buffers",
    "buffers.daemon",
    "buffers.zmq.client",
]


def test_light_modules_load_nothing_heavy():
    code = f"""
import sys
from importlib import import_module
for name in {LIGHT}:
    import_module(name)
    print(name, [m for m in ("torch", "transformers", "vllm") if m in sys.modules])
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.splitlines() == [f"{name} []" for name in LIGHT]


def test_a_mistake_in_the_configuration_is_said_before_long_imports(tmp_path):
    long = {name: row.entry.partition(":")[0] for name, row in COMMANDS.items() if row.imports_much}
    code = f"""
import sys
from streamrl.cli.main import main
for name, module in {long}.items():
    code = main([*name.split(), "{QUICKSTART}", "--set", "learner.optimizer.lrr=1"])
    print(name, code, [m for m in ("torch", module) if m in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{name} 2 []" for name in long]
    for name in long:
        assert f"streamrl {name}: learner.optimizer.lrr" in done.stderr


def test_the_collector_leaves_out_what_a_command_imports():
    code = """
import gc
from streamrl.cli import main
runs = []
gc.callbacks.append(lambda phase, _: runs.append(phase))
main.import_command("streamrl.cli.check")
print(len(runs), gc.isenabled(), gc.get_freeze_count() > 10_000)
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.split() == ["0", "True", "True"]


def best_of(count: int, *command: str) -> float:
    """Seconds of computing time, which other processes of the machine do not change."""
    times = []
    for _ in range(count):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_import_and_help_cost_little_more_than_python_itself():
    """Ratios, since machines differ: the limits are 0.3 s and 0.5 s where Python needs 0.02 s."""
    python = best_of(3, sys.executable, "-c", "pass")
    assert best_of(3, sys.executable, "-c", "import streamrl") < 15 * python
    assert best_of(3, sys.executable, "-m", "streamrl.cli.main", "--help") < 25 * python


def test_help_lists_every_command_once_and_no_more_than_a_reader_takes_in(capsys):
    """What other commands begin with is listed once, with their second words."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    listed, verbs = [], []
    for line in capsys.readouterr().out.partition("run:")[2].splitlines():
        if line.startswith("  "):
            name, _, summary = line.strip().partition("  ")
            listed.append(name)
            more = summary.strip().removeprefix(COMMANDS[name].summary).removeprefix("; ")
            verbs += [f"{name} {verb}" for verb in more.split(", ") if verb]
    assert len(listed) <= 22
    assert sorted([*listed, *verbs]) == sorted(COMMANDS)
    assert {*GROUPS} == {"run", "look", "use"}


@pytest.mark.parametrize("name", GONE)
def test_a_command_or_option_that_has_gone_says_where_it_is_now(capsys, name):
    words = ["launch", f"{name}=a"] if name.startswith("--") else name.split()
    with pytest.raises(SystemExit) as ended:
        main([*words, "runs/quickstart", "--once"])
    assert ended.value.code == 2
    assert f"{name} has gone: {GONE[name]}" in capsys.readouterr().err
    (given,) = re.findall("`([^`]+)`", GONE[name])
    assert name not in COMMANDS
    if given.startswith("streamrl"):
        words = given.split()
        assert words[1] in COMMANDS
        assert {word for word in words if word.startswith("--")} <= options_of(words[1])
    else:
        module = given.rpartition(" ")[2]
        assert callable(importlib.import_module(module).main)


def options_of(command: str) -> set[str]:
    parser = ArgumentParser()
    for add in COMMANDS[command].option_sets:
        add(parser)
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    assert f"usage: streamrl {name} [-h]" in capsys.readouterr().out


def test_an_unknown_command_is_named_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["lunch"])
    assert ended.value.code == 2
    assert "no command 'lunch': did you mean 'launch'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("launch a.yaml run.name=x", "launch: error: no argument 'run.name=x': a setting is"),
        ("launch a.yaml ++run.name=x", "a setting is changed by --set run.name=x"),
        ("check a.yaml --run.name x", "a setting is changed by --set run.name=VALUE"),
        ("launch a.yaml --reusme", "no argument '--reusme': did you mean '--resume'?"),
        ("buffer inspct runs/a", "'inspct' is no verb of buffer: did you mean 'inspect'?"),
        ("report runs/my run", "no argument 'run': the command takes no more; words with blanks"),
    ],
)
def test_what_a_command_does_not_take_is_said_with_what_was_meant(line, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "streamrl 0.2.0\n"


@pytest.mark.usefixtures("torch_is_known")
def test_check_prints_the_resolved_configuration(capsys):
    assert main(["check", QUICKSTART, "--set", "run.seed=5"]) == 0
    printed = capsys.readouterr().out
    assert "# --set run.seed" in printed
    assert "# default" not in printed
    assert printed.splitlines()[-1].endswith("; looked at: machine, configuration, model, data")
    assert "   ok   " not in printed
    assert yaml.safe_load(printed)["run"].keys() == {"name", "max_steps", "seed"}
    assert main(["check", QUICKSTART, "--set", "run.seed=5", "--all"]) == 0
    printed = capsys.readouterr().out
    assert "# default" in printed
    assert "seed: 5" in printed
    assert "# --set run.seed" in printed
    assert "\n#   ok       data.source: reverse" in printed
    assert yaml.safe_load(printed)["run"]["seed"] == 5


@pytest.mark.usefixtures("torch_is_known")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan"], "give one configuration file"),
        (["check", "--deep"], "give one configuration file"),
        (["check", "--set", "run.seed=1"], "give one configuration file"),
        (["check", QUICKSTART, "--config", QUICKSTART], "give one configuration file"),
        (["check", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["check", QUICKSTART, "--set", "run.sed=1"], "did you mean 'seed'?"),
        (["report", "nowhere"], "nowhere is no run folder"),
    ],
)
def test_a_configuration_that_cannot_work_is_one_sentence_and_exit_code_2(
    capsys, arguments, sentence
):
    assert main(arguments) == 2
    output = capsys.readouterr().err
    assert sentence in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (ConfigError("run.x: is wrong"), 2, "streamrl check: run.x: is wrong\n"),
        (FencedError("another one took over"), 3, "streamrl check: another one took over\n"),
        (RolloutError("no reward"), 4, "streamrl check: no reward\n"),
        (TransportError("Redis is down"), 5, "streamrl check: Redis is down\n"),
        (StreamRLError("no"), 1, "streamrl check: no\n"),
        (ModuleNotFoundError("No module named 'x'"), 2, "streamrl check: No module named 'x'\n"),
        (KeyboardInterrupt(), 130, ""),
        (Interrupted(signal.SIGTERM), 143, ""),
    ],
)
def test_the_exit_code_is_that_of_the_errors_kind(monkeypatch, capsys, error, code, printed):
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("streamrl.cli.check.command.main", fail)
    assert main(["check", QUICKSTART]) == code
    assert capsys.readouterr().err == printed


def test_ctrl_c_before_a_command_begins_is_no_traceback(monkeypatch, capsys):
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamrl.cli.main.parse", interrupted)
    assert main(["check"]) == 130
    assert capsys.readouterr().err == ""


def test_every_command_can_be_loaded():
    for name, command in COMMANDS.items():
        module, _, function = command.entry.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), name


def test_a_run_folder_is_not_overwritten(tmp_path, capsys):
    config = load_config(
        QUICKSTART,
        [
            f"run.folder={tmp_path}",
            "buffer.url=zmq://127.0.0.1:0",
            "weights.address=tcp://127.0.0.1:0",
        ],
    ).config
    resolved = prepare(config, resume=False, new=False)
    assert not resolved.buffer.url.endswith(":0")
    assert load_config(tmp_path / "quickstart" / "config.yaml", environment={}).config == resolved
    (config.run.path / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="holds a run already: --resume goes on"):
        prepare(config, resume=False, new=False)
    prepare(config, resume=True, new=False)
    prepare(config, resume=False, new=True)
    aside = [path for path in tmp_path.iterdir() if path.name.startswith("quickstart.")]
    assert (aside[0] / "metrics.jsonl").exists()
    assert f"{config.run.path} held is in {aside[0]} now" in capsys.readouterr().err
    assert not (config.run.path / "metrics.jsonl").exists()


@pytest.mark.parametrize("held_out", ["null", "reverse"])
def test_the_learner_of_a_launch_knows_that_a_validator_starts_with_it(tmp_path, held_out):
    ports = ["buffer.url=zmq://127.0.0.1:0", "weights.address=tcp://127.0.0.1:0"]
    settings = [f"run.folder={tmp_path}", *ports, f"data.eval_source={held_out}"]
    config = load_config(QUICKSTART, settings).config
    wanted = "auto" if config.is_validated else None
    assert prepare(config, resume=False, new=False, binds=True).validation.every == wanted
    assert prepare(config, resume=False, new=False, binds=False).validation.every is None


def test_passes_are_over_the_rows_of_a_file_since_they_began(tmp_path):
    rows = Rows(10, (SourceRows("data.source", "a.jsonl", 50, ""),))
    assert (rows.num_passes(10), rows.num_passes(135)) == (0.0, 2.5)
    assert math.isnan(Rows(0, ()).num_passes(135))


@pytest.mark.parametrize("script", [chaos, soak])
def test_a_run_under_way_is_not_moved_aside(tmp_path, capsys, script):
    folder = tmp_path / "quickstart"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    with sole_launch(folder):
        words = [QUICKSTART, "--set", f"run.folder={tmp_path}"]
        assert run_script(script.make_parser(), script.main, words) == 2
    assert f"is a launch of {folder} already" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").exists()


@pytest.mark.parametrize("option", ["--new", "--resume"])
def test_a_second_launch_of_a_run_is_refused(tmp_path, capsys, monkeypatch, option):
    monkeypatch.setattr("streamrl.cli.processes.fork_server._can_fork", lambda: False)
    folder = tmp_path / "quickstart"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    with sole_launch(folder):
        words = [option, "--no-view", "--set", f"run.folder={tmp_path}"]
        ports = ("buffer.url=zmq://127.0.0.1:0", "weights.address=tcp://127.0.0.1:0")
        assert main(["launch", QUICKSTART, *words, *set_options(*ports)]) == 2
    us = f"process {os.getpid()} of {socket.gethostname()}"
    assert capsys.readouterr().err.endswith(
        f"streamrl launch: run.name: {us} is a launch of {folder} already: stop it, or choose "
        "another run.name\n"
    )
    assert (folder / "metrics.jsonl").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_launch_waits_for_what_one_that_was_killed_has_started(tmp_path, capsys, monkeypatch):
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / ".launches").mkdir()
    lock = tmp_path / ".launches" / "run"
    lock.write_text(f"process {gone.pid} of {socket.gethostname()}")
    environment = {**os.environ, PARENT_VARIABLE: str(gone.pid)}
    daemon = subprocess.Popen(["sleep", "60"], env=environment)
    # Reaps it, as the system does with one whose parent is gone.
    monkeypatch.setattr(time, "sleep", lambda _: (daemon.kill(), daemon.wait()))
    with sole_launch(tmp_path / "run", orphans_s=60.0):
        assert daemon.returncode == -signal.SIGKILL
        assert lock.read_text() == f"process {os.getpid()} of {socket.gethostname()}"
    assert lock.read_text() == ""
    assert f"the end of what it has started ({daemon.pid}), 60 s" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["", "metrics.jsonl", "checkpoints", "buffer"])
@pytest.mark.parametrize("binds", [True, False])
def test_a_launch_that_finds_no_run_to_resume_says_so_and_starts(tmp_path, capsys, state, binds):
    ports = ["buffer.url=zmq://127.0.0.1:0", "weights.address=tcp://127.0.0.1:0"]
    config = load_config(QUICKSTART, [f"run.folder={tmp_path}", *ports]).config
    if state:
        (config.run.path / state).mkdir(parents=True)
    prepare(config, resume=True, new=False, binds=binds)
    said = f"run.name: {config.run.path} holds no run: --resume starts a new one"
    elsewhere = "" if binds else ", unless its hosts hold it"
    assert capsys.readouterr().err == ("" if state else f"{said}{elsewhere}\n")
    assert (config.run.path / "config.yaml").exists()


@pytest.mark.parametrize("url", ["zmq://127.0.0.1:0", "redis://127.0.0.1:1/0"])
def test_a_run_goes_on_with_its_own_prompts_or_is_left_as_it_is(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    fixed = [f"run.folder={tmp_path}", f"buffer.url={url}", "weights.address=tcp://127.0.0.1:0"]

    def config(*overrides: str) -> RunConfig:
        return load_config(QUICKSTART, [*fixed, "data.source=rows.jsonl", *overrides]).config

    run = prepare(config(), resume=False, new=False).run.path
    (run / "metrics.jsonl").write_text("{}")
    before = (run / "config.yaml").read_text()
    changes = {
        "run.seed=9": "0",
        "data.source=addition": str(tmp_path),
        "data.shuffle=false": "true",
    }
    for setting, was in changes.items():
        name, _, value = setting.partition("=")
        with pytest.raises(ConfigError, match=rf"{name}: was {value}, and the run in .* has {was}"):
            prepare(config(setting), resume=True, new=False)
    assert (run / "config.yaml").read_text() == before
    prepare(config(f"data.source={tmp_path}/rows.jsonl"), resume=True, new=False)
    prepare(config("run.seed=9"), resume=False, new=True)


def test_generators_do_not_check_again_what_their_launch_has_checked(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    fixed = [f"run.folder={tmp_path}", "buffer.url=zmq://127.0.0.1:0", f"data.source={rows}"]
    config = load_config(QUICKSTART, [*fixed, "weights.address=tcp://127.0.0.1:0"]).config
    assert not are_rows_checked(config), "a daemon without a launch"
    for by_launch in (True, False):
        run = prepare(config, resume=by_launch, new=False, are_rows_checked=by_launch).run.path
        started = load_config(run / "config.yaml", environment={}).config
        assert are_rows_checked(started) == by_launch
    prepare(config, resume=False, new=False, are_rows_checked=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "another")
        assert not are_rows_checked(started), "which may lack the images of the rows"
    assert not are_rows_checked(started.with_values(data={"prompt_key": "answer"}))
    rows.write_text('{"prompt": "c", "answer": "b"}\n')
    with pytest.raises(
        ConfigError, match=r"data\.source: .*rows\.jsonl \(1 rows\) is not the file that the launch"
    ):
        are_rows_checked(started)
    assert not are_rows_checked(started.with_values(data={"prompt_key": "answer"}))


def test_a_run_goes_on_with_its_own_rows_or_with_an_epoch_of_others(tmp_path):
    rows, more = tmp_path / "rows.jsonl", '{"prompt": "c", "answer": "d"}\n'
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    fixed = [f"run.folder={tmp_path}", "buffer.url=zmq://127.0.0.1:0", f"data.source={rows}"]

    def resumed(*overrides: str) -> RunConfig:
        config = load_config(QUICKSTART, ["weights.address=tcp://127.0.0.1:0", *fixed, *overrides])
        return prepare(config.config, resume=True, new=False, next_prompt_index=lambda _: 7)

    run = resumed().run.path
    (run / "metrics.jsonl").write_text("{}")
    assert resumed().data.first_prompt_index == 0
    rows.write_text(rows.read_text() + more)
    with pytest.raises(ConfigError, match=r"data\.source: .*rows\.jsonl has 2 rows, and .* read 1"):
        resumed()
    assert resumed("data.changed=allow").data.first_prompt_index == 7
    assert resumed().data.first_prompt_index == 7, "they are the run's own now"
    rows.write_text(more * 2)
    with pytest.raises(ConfigError, match=r"as many others, .* data\.changed: allow"):
        resumed()
    with pytest.raises(ConfigError, match=r"data\.shuffle: .* data\.changed: allow"):
        resumed("data.shuffle=false")
    with pytest.raises(ConfigError, match=r"run\.seed: was 9"):
        resumed("run.seed=9", "data.changed=allow")
    sums = check_folder(run, None, None).findings
    assert any(f"1 rows of {rows} until there, then an epoch of 2 rows" in line for line in sums)
    rows.unlink()
    assert resumed().data.first_prompt_index == 7, "other machines have them"
    (run / "data.json").unlink()
    rows.write_text(more)
    assert resumed().data.first_prompt_index == 0


def test_two_ports_that_are_picked_are_two_that_no_connection_gets(tmp_path, monkeypatch):
    any_port = ["buffer.url=zmq://127.0.0.1:0", "weights.address=tcp://127.0.0.1:0"]
    config = load_config(QUICKSTART, [f"run.folder={tmp_path}", *any_port]).config
    picked = []

    def sample(ports, _):
        picked.append(ports)
        return ports[100:140]

    monkeypatch.setattr("streamrl.config.addresses.random.sample", sample)
    resolved = prepare(config, resume=False, new=False)
    ports = [port_of(resolved.buffer.url), port_of(resolved.weights.address)]
    assert ports[0] != ports[1]
    assert {*ports} <= {*picked[0]}
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if given.exists():
        assert max(ports) < int(given.read_text().split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="a bound port can be listened at on Linux")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_two_launches_never_pick_the_same_ports(tmp_path, monkeypatch, host):
    """The daemons of the first one do not listen yet when the second one picks."""
    given = [f"buffer.url=zmq://{host}:0", f"weights.address=tcp://{host}:0"]
    two = [free_port(), free_port()]
    monkeypatch.setattr("streamrl.config.addresses._PICKED_PORTS", two)
    monkeypatch.setattr("streamrl.config.addresses._PICKS", 2)
    runs = []
    for name in "first", "second":
        config = load_config(QUICKSTART, [f"run.folder={tmp_path / name}", *given]).config
        runs.append(prepare(config, resume=False, new=False))
    ports = [{port_of(run.buffer.url), port_of(run.weights.address)} for run in runs]
    assert ports[0] == {*two}
    assert ports[0].isdisjoint(ports[1])
    for url in (url for run in runs for url in (run.buffer.url, run.weights.address)):
        for _start in range(2):
            with socket.socket(address_family(host_of(url))) as daemon:
                daemon.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                daemon.bind((host_of(url), port_of(url)))
                daemon.listen()


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"zmq://127.0.0.1:{taken.getsockname()[1]}"
        config = load_config(QUICKSTART, [f"run.folder={tmp_path}", f"buffer.url={url}"]).config
        with pytest.raises(ConfigError, match=r"buffer\.url: cannot listen at .* another run"):
            prepare(config, resume=False, new=False)


def test_a_launch_that_is_refused_leaves_the_folder_as_it_was(tmp_path):
    settings = [f"run.folder={tmp_path}", "run.max_steps=3", "learner.optimizer.warmup_steps=0"]
    ports = ["buffer.url=zmq://127.0.0.1:0", "weights.address=tcp://127.0.0.1:0"]
    config = load_config(QUICKSTART, [*settings, *ports]).config
    config.run.path.mkdir(parents=True)
    (config.run.path / "metrics.jsonl").write_text("{}")
    (config.run.path / "config.yaml").write_text("as it was")
    buffer = config.buffer.model_copy(update={"url": "zmq://127.0.0.1:99999"})
    with pytest.raises(ConfigError, match=r"buffer\.url: cannot listen"):
        prepare(config.model_copy(update={"buffer": buffer}), resume=False, new=True)
    assert [path.name for path in tmp_path.iterdir()] == ["quickstart"]
    assert (config.run.path / "config.yaml").read_text() == "as it was"


def test_a_launch_beyond_the_last_step_is_refused(tmp_path):
    settings = [f"run.folder={tmp_path}", "run.max_steps=3", "learner.optimizer.warmup_steps=0"]
    config = load_config(QUICKSTART, settings).config
    older, newest = (write_checkpoint(config.run.path, version, Books()) for version in (2, 13))

    def launch(continues: bool, anew: bool, **of_run: object) -> None:
        run = config.run.model_copy(update=of_run)
        changed = config.model_copy(update={"run": run})
        require_steps_to_launch(changed, resume=continues, new=anew)

    beyond = r"run\.max_steps: was 3, and .*step-00000013 is of step 13: it must be above 13"
    with pytest.raises(ConfigError, match=beyond):
        launch(True, False)
    with pytest.raises(ConfigError, match=beyond):
        launch(False, False, resume="auto")
    with pytest.raises(ConfigError, match=beyond):
        launch(False, True, resume=newest)
    launch(True, False, max_steps=13)
    launch(False, True)
    launch(False, True, resume="auto")
    launch(True, False, resume=older)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    settings = [f"run.folder={tmp_path}/file", "buffer.url=zmq://127.0.0.1:0"]
    config = load_config(QUICKSTART, [*settings, "weights.address=tcp://127.0.0.1:0"]).config
    with pytest.raises(ConfigError, match=r"run\.folder: cannot write .*: Not a directory"):
        prepare(config, resume=False, new=False)


LINES = [
    {
        "step": step,
        "time_s": float(step),
        "reward/mean": step / 40,
        "buffer/staleness_mean": 1.0,
        "buffer/staleness_max": 2,
        "mismatch/rollout_is_eff_sample_size": 0.9,
        "generator/tokens_per_s": 1000.0,
        "learner/tokens_per_s": 2000.0,
        "learner/wait_s": 0.1,
        "learner/step_s": 0.5,
        **{f"fairness/{name}_length_mean": 10.0 + step for name in ("sampled", "trained")},
        "fairness/dropped_length_mean": 40.0,
        "fairness/dropped_tokens_frac": 0.25 if step > 15 else 0.0,
    }
    for step in range(1, 31)
]


def test_the_view_says_where_the_run_is(tmp_path):
    config = load_config(QUICKSTART, ["run.max_steps=150", f"run.folder={tmp_path}"]).config
    line = headline(config, LINES)
    assert line.startswith("step 30/150  training reward 0.637 (mean of the last 10 steps)  ")
    recent = "staleness 1.00, ESS 0.900, wait 0.10 s, 1,000 generated tokens/s"
    assert f"  mean of the last 20 steps: {recent}  " in line
    assert line.endswith("ETA 1:00")
    run = config.run.model_copy(update={"max_steps": 20})
    assert "ETA" not in headline(config.model_copy(update={"run": run}), LINES)
    rewards = [
        dict(summary_rows(config, LINES[:count]))["training reward"] for count in (30, 9, 2, 1)
    ]
    assert rewards == [
        "0.075 -> 0.637 (mean of the first 5 and the last 10 steps)",
        "0.050 -> 0.200 (mean of the first 3 and the last 3 steps)",
        "0.025 -> 0.050 (the first and the last step)",
        "0.025 -> 0.025 (1 step)",
    ]


WAITS = "waits 20 %, due groups 10 %"


def printed(view: RenderableType) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(view)
    return [line.rstrip() for line in capture.get().splitlines()]


def write_learner(folder: Path, **fields: object) -> None:
    known = {"policy_version": 30, "learner_term": 1, "activity": LearnerActivity.WAITING}
    status = LearnerStatus(**{**known, "activity_s": 2.0, "time_s": time.time(), **fields})
    content = msgspec.to_builtins(status, str_keys=True)
    (folder / "learner.json").write_text(json.dumps(content))


def test_the_view_names_what_the_run_waits_for_and_its_part_of_the_step_time(tmp_path):
    config = load_config(QUICKSTART, [f"run.folder={tmp_path}"]).config
    config.run.path.mkdir()
    lines = [{**line, "learner/wait_due_s": 0.05} for line in LINES]
    *_, learner = printed(render(config, lines, {"learner": "runs"}))
    assert learner.split(maxsplit=4) == ["learner", "runs", "2000", "30", WAITS]
    write_learner(config.run.path, waits_for="step 31 waits for prompt 812")
    view = printed(render(config, lines, {"learner": "runs"}))
    assert view[1] == "step 31 waits for prompt 812"
    assert view[0].startswith("quickstart  step 30/550  checkpoint 100 in 0:35  ETA ")
    assert view[2].startswith("5 % done")
    parts = [" ".join(text.split()) for text in view]
    recent = "staleness 1.00, ESS 0.900, wait 0.10 s, 1,000 generated tokens/s"
    assert parts[5] == f"mean of the last {recent}"
    assert parts[6] == "20 steps 0.50 s a step: other 80 %, wait 20 %"
    assert len(view) == 9
    assert wait_shares(lines) == WAITS
    assert wait_shares(LINES) == "waits 20 %"


def test_the_summary_names_the_lengths_and_what_was_dropped(tmp_path):
    name = "response length, last steps"
    config = load_config(QUICKSTART, [f"run.folder={tmp_path}"]).config
    rows = dict(summary_rows(config, LINES))
    assert rows[name] == "40 sampled, 40 trained, 25.0 % of tokens dropped"
    assert dict(summary_rows(config, LINES[:15]))[name] == "25 sampled, 25 trained"
    resumed = {**LINES[-1], "fairness/sampled_length_mean": 0.0}
    assert name not in dict(summary_rows(config, [resumed]))
    assert name not in dict(summary_rows(config, [{"step": 1, "reward/mean": 0.5}]))


def test_a_sparkline_shows_the_shape():
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == " ▄█"
    assert sparkline([-1.0, -0.5, 0.0]) == sparkline([-1.0, 0.0, 1.0]) == " ▄█"
    assert sparkline([0.0]) == " "
    assert len(sparkline(list(range(1000)))) <= 60


@pytest.mark.parametrize(
    ("command", "wanted"),
    [("learner", ["1", None]), ("status", [None, None]), ("get-model", ["1", "1"])],
)
def test_progress_bars_of_libraries_stay_out_of_logs(monkeypatch, command, wanted):
    variables = ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
    for variable in variables:
        monkeypatch.setenv(variable, "to be restored")
        monkeypatch.delenv(variable)
    assert main([command, "nothing.yaml"]) == 2
    assert [os.environ.get(variable) for variable in variables] == wanted


def test_a_command_may_open_as_many_files_as_the_hard_limit_allows(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        main(["samples", str(tmp_path / "none")])
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
