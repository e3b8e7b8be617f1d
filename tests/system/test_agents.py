"""Runs whose episodes agents play: scripts that know OpenAI or Anthropic, and not StreamRL."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.cli.main import main
from tests.documents import write_files
from tests.system.conftest import CONFIG, DEADLINE_S, Launched

# What the tiny model knows: the question as it stands, and nothing around it.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

# Takes a task, asks for a completion, and is not heard of again.
DOOMED = """
import json, sys, time, urllib.request

def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    return json.loads(urllib.request.urlopen(request).read())

url = json.load(open(sys.argv[1]))["url"]
task = post(url + "/sessions", {"agent": "doomed", "wait_s": 300})
post(task["session_url"] + "/v1/chat/completions", {"messages": task["messages"]})
print("in its episode", flush=True)
time.sleep(600)
"""


@pytest.fixture
def agent_run(launch, tmp_path: Path, model: Path) -> Callable[..., Launched]:
    """Starts a run on the copy task whose environment is `agent`."""

    def start(agent: dict[str, Any], sections: dict[str, Any], *, strict: bool = True) -> Launched:
        template = tmp_path / "plain.jinja"
        template.write_text(TEMPLATE)
        config = yaml.safe_load(CONFIG.format(folder=tmp_path, model=model))
        config["data"] |= {"chat_template": str(template)}
        config["generator"] |= {"agent": agent, "count": 1, "max_model_len": 40}
        if "environments" not in sections:
            config["generator"] |= {"environment": "agent"}
        # Every token is sampled by the version that is trained, so that the two can be compared. A
        # generator that the machine does not let run for some seconds loses no group.
        config["buffer"] |= {"max_staleness": 0, "lease_ttl_s": 60}
        for name, settings in sections.items():
            config[name] = {**config[name], **settings} if name in config else settings
        file = tmp_path / "agents.yaml"
        file.write_text(yaml.safe_dump(config))
        return launch(file=file, strict=strict)

    return start


@pytest.fixture
def asking() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts processes that ask the run's first generator for tasks."""
    started: list[subprocess.Popen[str]] = []

    def start(run: Launched, program: Path) -> "subprocess.Popen[str]":
        address = run.folder / "gateways" / "generator-0.json"
        run.until(address.exists)
        words = [sys.executable, str(program), str(address)]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def assert_exact(run: Launched) -> None:
    """The learner's log-probabilities of what was recorded are those of what was sampled."""
    gaps = [abs(line["mismatch/staleness_0/kl"]) for line in run.lines]
    assert max(gaps) < 1e-4, gaps
    assert run.lines[-1]["buffer/staleness_max"] == 0
    assert main(["buffer", "audit", str(run.folder)]) == 0


@pytest.mark.long
def test_the_scripts_of_the_documents_train_as_they_stand_there(agent_run, tmp_path):
    write_files(tmp_path, "docs/agents.md")
    entries = []
    for name in ("ask", "ask_anthropic"):
        command = [sys.executable, str(tmp_path / f"{name}.py"), "{prompt}"]
        entries.append({"name": name, "environment": "agent", "kwargs": {"command": command}})
    run = agent_run(
        {"max_agents": 4},
        {
            "run": {"max_steps": 2},
            "environments": entries,
            "generator": {"group_size": 2, "max_num_seqs": 4},
            "learner": {"groups_per_step": 2},
        },
    )
    assert run.end() == 0, run.output
    assert len(run.lines) == 2
    assert_exact(run)
    assert not sum(run.books["dropped"].values()), run.log("generator-0")


@pytest.mark.long
def test_agents_that_ask_train_while_one_of_them_and_the_generator_are_killed(
    agent_run, asking, tmp_path
):
    write_files(tmp_path, "docs/agents.md")
    program = tmp_path / "doomed.py"
    program.write_text(DOOMED)
    run = agent_run({"silence_s": 3.0}, {"data": {"reward": "environment"}}, strict=False)
    doomed = asking(run, program)
    others = [asking(run, tmp_path / "worker.py") for _ in range(3)]
    assert doomed.stdout is not None
    assert doomed.stdout.readline() == "in its episode\n"
    doomed.kill()
    lost = "agent 'doomed' has asked for nothing for generator.agent.silence_s"
    # It holds up the first step until then.
    run.until(lambda: lost in run.log("generator-0"))
    run.kill("generator-0")
    assert run.end() == 0, run.output
    assert len(run.lines) == 12
    assert_exact(run)
    assert [process.wait(DEADLINE_S) for process in others] == [0] * 3
    assert max(line["reward/mean"] for line in run.lines) > 0


def test_a_function_of_the_documents_trains(agent_run, tmp_path):
    write_files(tmp_path, "docs/agents.md")
    run = agent_run(
        {"function": f"{tmp_path / 'solve.py'}:solve"}, {"data": {"reward": "environment"}}
    )
    assert run.end() == 0, run.output
    assert_exact(run)
    # Of two to three digits that a warm start copies every fourth time.
    assert max(line["reward/mean"] for line in run.lines) > 0
