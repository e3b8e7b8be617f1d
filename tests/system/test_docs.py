"""Every command of the README and of `docs/`, run as it stands there; sizes come from the
environment."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.tracking.jsonl import read_metrics
from tests.documents import ROOT, commands, write_files
from tests.ports import free_port
from tests.research import chaos, soak
from tests.system.conftest import DEADLINE_S, STREAMRL, script, slow_reward
from tests.system.test_launch import output_of
from tests.waiting import block_until

SCRIPTS = "PYTHONPATH=. .venv/bin/python -m tests.research."

# Every command that the documents show, and the test below that runs it.
RUN_BY = {
    "make quickstart": "make",
    "make test": "make",
    "make gpu-report": "test_gpu_report.py",
    "streamrl get-model --config configs/quickstart.yaml": "daemons",
    "streamrl generator --config configs/quickstart.yaml --id mine": "daemons",
    "streamrl learner --config configs/quickstart.yaml": "daemons",
    "streamrl buffer --config configs/quickstart.yaml": "daemons",
    "streamrl learner --config configs/quickstart.yaml --resume": "test_fresh_start.py",
    "streamrl check configs/quickstart.yaml": "launch",
    "streamrl check configs/quickstart.yaml --deep": "launch",
    "streamrl parity configs/quickstart.yaml": "launch",
    "streamrl plan configs/quickstart.yaml": "plan",
    "streamrl plan configs/quickstart.yaml --json": "plan",
    "streamrl plan configs/quickstart.yaml --gpus 8": "plan",
    "streamrl parity --model runs/models/reverse --score sequences.jsonl "
    "--out logprobs.jsonl": "score",
    "streamrl launch configs/quickstart.yaml --new": "launch",
    "streamrl launch configs/quickstart.yaml --resume": "launch",
    "streamrl evaluate --config configs/quickstart.yaml": "launch",
    "streamrl report runs/quickstart": "launch",
    "streamrl samples runs/quickstart --worst --limit 3": "launch",
    "streamrl samples runs/quickstart --step 10-20 --max-reward 0.5 --grep 9": "launch",
    "streamrl samples runs/quickstart --best --json": "launch",
    "streamrl export runs/quickstart --dtype bfloat16 --output quickstart-bf16": "launch",
    "streamrl buffer audit runs/quickstart": "launch",
    "streamrl status runs/quickstart": "status",
    "streamrl status runs/quickstart --follow": "follow",
    "streamrl status runs/quickstart --json": "follow",
    "streamrl check": "test_machine.py",
    "streamrl buffer inspect runs/quickstart/config.yaml": "inspect",
    "streamrl generators runs/quickstart/config.yaml": "restart",
    "streamrl generators cordon runs/quickstart/config.yaml generator-0": "restart",
    "streamrl generators uncordon runs/quickstart/config.yaml generator-0": "restart",
    "streamrl generators drain runs/quickstart/config.yaml generator-0": "restart",
    "streamrl generator --config runs/quickstart/config.yaml --id generator-0": "restart",
    "streamrl buffer drain runs/quickstart/config.yaml": "drain",
    f"{SCRIPTS}chaos configs/quickstart.yaml --seed 1 --kills 5": "faults",
    f"{SCRIPTS}soak configs/quickstart.yaml --minutes 480 --faults-per-hour 30": "faults",
    f"{SCRIPTS}ablate configs/ablation/stale_bf16.yaml --vary algorithm.rollout_is=metrics_only,"
    "token_is,sequence_clip,token_is_veto --seeds 0,1,2": "ablate",
    f"{SCRIPTS}ablate configs/ablation/lag.yaml --variants "
    "configs/ablation/corrections.variants.yaml --vary buffer.max_staleness=0,1,4,8,16 "
    "--seeds 0,1,2,3,4 --lag even --jobs 2": "lag",
    f"{SCRIPTS}distill configs/ablation/lag.yaml --lags 0,1,8 --seeds 0 --set run.max_steps=120 "
    "--teacher-steps 250": "test_distillation.py",
    f"{SCRIPTS}steer configs/ablation/lag.yaml --set algorithm.rollout_is=token_is": (
        "test_exact_lag.py"
    ),
    "streamrl launch configs/quickstart.yaml --new --set buffer.record=true": "test_replay.py",
    "streamrl replay runs/quickstart": "test_replay.py",
    "streamrl replay runs/quickstart --set algorithm.rollout_is=m2po "
    "--set learner.optimizer.lr=5e-5": "test_replay.py",
    "cd configs/recipes/colors": "test_vision.py",
    "python prompts.py": "first",
    "streamrl check first.yaml": "first",
    "streamrl launch first.yaml --new": "first",
    "streamrl status runs/first": "first",
    "streamrl report runs/first": "first",
    "streamrl buffer audit runs/first": "first",
    "streamrl evaluate --config first.yaml": "first",
    "torchrun --nproc-per-node 2 --no-python streamrl learner --config configs/quickstart.yaml "
    "--resume": "test_ranks.py",
    "cd deploy": "test_compose.py",
    "docker compose --profile cpu up -d --build": "test_compose.py",
    "docker compose --profile cpu exec learner streamrl status /runs/quickstart": "test_compose.py",
    "docker compose --profile cpu up -d --scale generator=3": "test_compose.py",
    "docker compose --profile cpu stop": "test_compose.py",
    "docker compose --profile cpu run --rm --no-deps buffer buffer audit "
    "/runs/quickstart": "test_compose.py",
    "docker compose --profile cpu down --volumes": "test_compose.py",
    "mkdir -m 700 secrets": "test_compose.py",
    "head -c 24 /dev/urandom | base64 > secrets/redis-password": "test_compose.py",
    "docker compose --env-file redis.env up -d": "test_compose.py",
    "docker compose --env-file redis.env stop learner generator buffer": "test_compose.py",
    "docker compose --env-file redis.env run --rm --no-deps learner buffer audit "
    "/runs/quickstart": "test_compose.py",
    "cd configs/recipes/frozen_lake": "frozen_lake",
    "streamrl launch config.yaml --new": "frozen_lake",
    "streamrl check plugins.yaml": "plugins",
    "streamrl launch plugins.yaml --new": "plugins",
}


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run in a folder of its own, on free ports."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    settings = {
        "RUN__MAX_STEPS": 3,
        "MODEL__RECIPE__WARM_START_STEPS": 5,
        "DATA__NUM_EVAL_PROMPTS": 8,
        "GENERATOR__COUNT": 1,
        "LEARNER__GROUPS_PER_STEP": 4,
        "LEARNER__OPTIMIZER__WARMUP_STEPS": 0,
        "BUFFER__URL": f"zmq://127.0.0.1:{free_port()}",
        "WEIGHTS__ADDRESS": f"tcp://127.0.0.1:{free_port()}",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"STREAMRL__{name}", str(value))


@pytest.fixture
def with_model(environment: None) -> None:
    """The model of the recipe, made, in this process, which has imported torch."""
    assert main(["get-model", "--config", "configs/quickstart.yaml"]) == 0


def test_every_command_of_the_documents_is_run_by_a_test():
    assert sorted(commands()) == sorted(RUN_BY)


def test_the_two_commands_of_the_start_are_targets_of_make():
    makefile = (ROOT / "Makefile").read_text()
    for command in _run_by("make"):
        program, target = command.split()
        assert program == "make"
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.usefixtures("environment")
def test_a_plan_is_printed_for_persons_and_programs(capsys):
    as_text, as_json, of_another_machine = _run_by("plan")
    assert main(_words(as_text)[1:]) == 0
    text = capsys.readouterr().out
    assert main(_words(as_json)[1:]) == 0
    processes = json.loads(capsys.readouterr().out)["processes"]
    assert [process["name"] for process in processes] == ["buffer", "learner", "generator-0"]
    assert all(shlex.join(process["command"]) in text for process in processes)
    assert main(_words(of_another_machine)[1:]) == 0
    assert ", GPU 7 of unknown memory, " in capsys.readouterr().out


def test_the_scripts_that_inject_faults_take_what_the_documents_say():
    """Whole runs of them are in test_chaos.py and test_soak.py."""
    for command, module in zip(_run_by("faults"), (chaos, soak), strict=True):
        *_, name = _words(command)[:5]
        assert name == module.__name__
        parsed = module.make_parser().parse_args(_words(command)[5:])
        assert (ROOT / parsed.file).is_file()


@pytest.mark.usefixtures("environment")
def test_the_daemons_find_each_other_in_the_order_of_the_documents():
    make_model, *daemons = _run_by("daemons")
    subprocess.run(_words(make_model), check=True, timeout=DEADLINE_S, capture_output=True)
    running = {
        command.split()[1]: subprocess.Popen(_words(command), env=os.environ) for command in daemons
    }
    try:
        assert running["learner"].wait(DEADLINE_S) == 0
        assert running["generator"].wait(DEADLINE_S) == 0
        # By itself: the run is over, and everybody has left.
        assert running["buffer"].wait(DEADLINE_S) == 0
    finally:
        for process in running.values():
            process.kill()
    assert len(read_metrics(Path("runs/quickstart/metrics.jsonl"))) == 3


@pytest.mark.long
@pytest.mark.usefixtures("with_model")
def test_a_launch_and_what_follows_it(monkeypatch: pytest.MonkeyPatch):
    # One of the commands is `evaluate`; that a launch ends with it is shown in test_launch.py.
    monkeypatch.setenv("STREAMRL__RUN__EVALUATE", "false")
    output = "".join(_output(command) for command in _run_by("launch"))
    assert "the books close" in output
    assert "by position in the response" in output
    assert "\nin order\n" in output
    assert '"title":"What the newest steps' in Path("runs/quickstart/report.html").read_text()
    assert Path("runs/quickstart/evaluation.json").exists()
    assert Path("quickstart-bf16/model.safetensors").exists()


@pytest.mark.long
@pytest.mark.usefixtures("environment")
def test_the_first_run_on_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The recipe stands in for the pretrained model; all else is what the page shows."""
    write_files(tmp_path, "docs/getting-started.md")
    alphabet = '"0123456789+-*/=()., abcdefghijklmnopqrstuvwxyzWR?"'
    monkeypatch.setenv("STREAMRL__MODEL__RECIPE__ALPHABET", alphabet)
    monkeypatch.setenv("STREAMRL__RUN__EVALUATE", "false")
    output = {command: _output(command) for command in _run_by("first")}
    assert "the books close" in output["streamrl report runs/first"]
    assert "\nin order\n" in output["streamrl buffer audit runs/first"]
    assert len(read_metrics(Path("runs/first/metrics.jsonl"))) == 3
    assert Path("runs/first/evaluation.json").exists()


@pytest.mark.long
@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("name", ["frozen_lake", "dapo"])
def test_a_recipe_with_a_model_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch):
    folder, launch = _run_by("frozen_lake")
    monkeypatch.chdir(Path(folder.split()[1]).with_name(name))
    monkeypatch.setenv("STREAMRL__RUN__EVALUATE", "false")
    assert "the books close" in _output(launch)
    metrics = read_metrics(Path(f"runs/{name}/metrics.jsonl"))
    assert len(metrics) == 3
    if name == "dapo":
        assert {"actor/pg_clipfrac", "reward/overlong_penalty"} <= metrics[-1].keys()
        assert metrics[-1]["learner/num_updates"] == 4


@pytest.mark.long
@pytest.mark.usefixtures("environment")
def test_a_run_with_five_plug_ins_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pages = [f"docs/extending/{path.name}" for path in (ROOT / "docs/extending").glob("*.md")]
    write_files(tmp_path, *pages)
    monkeypatch.setenv("STREAMRL__RUN__EVALUATE", "false")
    check, launch = (_output(command) for command in _run_by("plugins"))
    assert check.partition("\n#")[0].count(".py:") == 5
    assert "the books close" in launch
    last = read_metrics(Path("runs/plugins/metrics.jsonl"))[-1]
    assert last["step"] == 3
    assert "actor/soft_clip_frac" in last


@pytest.mark.long
@pytest.mark.usefixtures("with_model")
def test_the_sequences_of_the_page_are_scored(tmp_path: Path):
    write_files(tmp_path, "docs/models.md")
    (command,) = _run_by("score")
    assert "scored 2 sequences, packed, in float32: logprobs.jsonl" in _output(command)
    lines = [json.loads(line) for line in Path("logprobs.jsonl").read_text().splitlines()]
    assert [len(line["logprobs"]) for line in lines] == [2, 1]


@pytest.mark.long
@pytest.mark.usefixtures("environment")
def test_the_ablation_ends_with_a_table_and_a_plot():
    (command,) = _run_by("ablate")
    given = "token_is,sequence_clip,token_is_veto --seeds 0,1,2"
    _output(command.replace(f"metrics_only,{given}", "token_is --seeds 1"), 2 * DEADLINE_S)
    folder = Path("runs/ablation/stale_bf16")
    rows = (folder / "ablation.md").read_text().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["token_is"]
    assert (folder / "ablation.png").exists()


@pytest.mark.long
@pytest.mark.usefixtures("environment")
def test_the_corrections_are_compared_at_several_lags():
    """Two of them at two lags, for one seed."""
    (command,) = _run_by("lag")
    file = Path("configs/ablation/corrections.variants.yaml")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if line.startswith(("none:", "m2po:"))))
    short = command.replace("=0,1,4,8,16", "=0,2").replace("--seeds 0,1,2,3,4", "--seeds 1")
    output = _output(short, 2 * DEADLINE_S)
    *_, head, _, none, m2po = output.strip().splitlines()
    assert head.endswith("| 0 | 2 |")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (none, m2po)]
    assert [row[0] for row in cells] == ["none", "m2po"]
    assert [len(row) for row in cells] == [3, 3]


@pytest.mark.long
@pytest.mark.usefixtures("with_model")
def test_a_running_buffer_is_inspected_and_drained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (status,), (inspect,), (drain,) = map(_run_by, ("status", "inspect", "drain"))
    monkeypatch.setenv("STREAMRL__RUN__MAX_STEPS", "100000")
    monkeypatch.setenv("STREAMRL__DATA__REWARD", slow_reward(tmp_path, seconds=0.3))
    launch = [STREAMRL, "launch", "configs/quickstart.yaml", "--new", "--no-view", "--strict"]
    running = subprocess.Popen(launch, stdout=subprocess.DEVNULL)
    folder = Path("runs/quickstart")
    try:
        block_until(lambda: len(read_metrics(folder / "metrics.jsonl")) >= 3, DEADLINE_S)
        assert "\nhealthy\n" in _output_once_healthy(status)
        follow, record = _run_by("follow")
        (generator,) = json.loads(_output_once_healthy(record))["buffer"]["generators"]
        assert generator["generator_id"] == "generator-0"
        output = _output(inspect)
        assert "leased" in output
        assert "the books close" in output
        assert "generator-0" in output
        assert "trained/s" in output
        _restart_a_generator()
        assert "drained at version" in _output(drain)
        assert "0 groups, at most 8; draining" in _output(inspect)
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(DEADLINE_S)
    assert "stopped at step" in _output(follow)


def _output_once_healthy(command: str) -> str:
    """A machine may keep a daemon from reporting for a while."""
    printed = io.StringIO()

    def is_healthy() -> bool:
        printed.seek(0)
        printed.truncate()
        with contextlib.redirect_stdout(printed):
            return main(_words(command)[1:]) == 0

    block_until(is_healthy, DEADLINE_S)
    return printed.getvalue()


def _restart_a_generator() -> None:
    listing, cordon, uncordon, drain, start = _run_by("restart")
    assert "generator-0" in _output(listing)
    assert "granted no leases" in _output(cordon)
    assert "cordoned" in _output(listing)
    assert "is granted leases" in _output(uncordon)
    assert "generator-0 has left" in _output(drain)
    again = subprocess.Popen(_words(start))
    try:
        log = Path("runs/quickstart/logs/generator-0.log")
        block_until(lambda: log.read_text().count("generator-0 serves") == 2, DEADLINE_S)
        block_until(lambda: _output(listing).count(" active ") == 1, DEADLINE_S)
    finally:
        again.send_signal(signal.SIGTERM)
        assert again.wait(DEADLINE_S) == 0


def _run_by(name: str) -> list[str]:
    return [command for command, runs_it in RUN_BY.items() if runs_it == name]


def _words(command: str) -> list[str]:
    if command.startswith(SCRIPTS):
        name, *words = command.removeprefix(SCRIPTS).split()
        return [*script(name), *words]
    program, *words = command.split()
    return [{"streamrl": STREAMRL, "python": sys.executable}[program], *words]


def _output(command: str, deadline_s: float = DEADLINE_S) -> str:
    words = _words(command)
    if "launch" in words[:2]:
        words.append("--strict")
    elif words[0] == STREAMRL:
        return output_of(*words[1:])
    done = subprocess.run(words, capture_output=True, text=True, timeout=deadline_s, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
