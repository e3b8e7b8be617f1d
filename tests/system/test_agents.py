"""Runs whose episodes agents play: scripts that know OpenAI or Anthropic, and not StreamRL."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.cli.main import main
from tests.system.conftest import CONFIG, Launched

# What the tiny model knows: the question as it stands, and nothing around it.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

OPENAI = """
import sys
from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(2):
    answer = client.chat.completions.create(model="gpt-5", messages=messages)
    said = answer.choices[0].message
    messages = [*messages, said, {"role": "user", "content": sys.argv[1]}]
print(said.content)
"""
ANTHROPIC = """
import sys
import anthropic

client = anthropic.Anthropic()
with client.messages.stream(
    model="claude", max_tokens=100, messages=[{"role": "user", "content": sys.argv[1]}]
) as stream:
    print("".join(stream.text_stream))
"""
# Asks for its tasks, in the way of a program of any language: by HTTP and JSON.
ASKING = """
import http.client, json, sys, time

name, dies, url = sys.argv[1], sys.argv[2] == "dies", json.load(open(sys.argv[3]))["url"]

def call(method, url, body=None):
    _, _, rest = url.partition("//")
    host, _, path = rest.partition("/")
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request(method, "/" + path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    return response.status, json.loads(content) if content else None

while True:
    try:
        status, task = call("POST", url + "/sessions", {"agent": name, "wait_s": 20})
    except OSError:
        break
    if status != 200:
        continue
    body = {"messages": task["messages"], "stream": False}
    status, answer = call("POST", task["session_url"] + "/v1/chat/completions", body)
    if status != 200:
        continue
    if dies:
        print("in its episode", flush=True)
        time.sleep(600)
    said = answer["choices"][0]["message"]["content"]
    reward = float(said == task["answer"])
    call("POST", task["session_url"] + "/reward", {"reward": reward, "metrics": {"played": 1}})
"""


@pytest.fixture
def agent_run(launch, tmp_path: Path, model: Path) -> Callable[..., Launched]:
    """Starts a run on the copy task whose environment is `agent`."""

    def start(agent: dict[str, Any], sections: dict[str, Any]) -> Launched:
        template = tmp_path / "plain.jinja"
        template.write_text(TEMPLATE)
        config = yaml.safe_load(CONFIG.format(folder=tmp_path, model=model))
        config["data"] |= {"chat_template": str(template)}
        config["generator"] |= {"environment": "agent", "agent": agent, "count": 1}
        config["generator"] |= {"max_model_len": 40}
        # Every token is sampled by the version that is trained, so that the two can be compared.
        config["buffer"] |= {"max_staleness": 0}
        for name, settings in sections.items():
            config[name] = {**config[name], **settings} if name in config else settings
        file = tmp_path / "agents.yaml"
        file.write_text(yaml.safe_dump(config))
        return launch(file=file)

    return start


@pytest.fixture
def asking(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts processes that ask the run's first generator for tasks."""
    program = tmp_path / "asking.py"
    program.write_text(ASKING)
    started: list[subprocess.Popen[str]] = []

    def start(run: Launched, name: str, how: str = "plays") -> "subprocess.Popen[str]":
        address = run.folder / "gateways" / "generator-0.json"
        run.until(address.exists)
        words = [sys.executable, str(program), name, how, str(address)]
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


def test_unchanged_scripts_train(agent_run, tmp_path):
    entries = []
    for name, script in (("openai", OPENAI), ("anthropic", ANTHROPIC)):
        program = tmp_path / f"{name}_script.py"
        program.write_text(script)
        command = [sys.executable, str(program), "{prompt}"]
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


def test_agents_that_ask_train_while_one_of_them_is_killed(agent_run, asking):
    run = agent_run({"silence_s": 3.0}, {"data": {"reward": "environment"}})
    doomed = asking(run, "doomed", "dies")
    others = [asking(run, f"agent-{i}") for i in range(3)]
    assert doomed.stdout is not None
    assert doomed.stdout.readline() == "in its episode\n"
    doomed.kill()
    assert run.end() == 0, run.output
    assert len(run.lines) == 12
    assert_exact(run)
    assert [process.wait(60) for process in others] == [0] * 3
    log = run.log("generator-0")
    assert "agent 'doomed' has asked for nothing for generator.agent.silence_s" in log
    assert run.lines[-1]["generator/num_lost_agents"] >= 1
    assert run.lines[-1]["buffer/dropped_failed"] >= 1
    rewards = [line["reward/mean"] for line in run.lines]
    assert max(rewards) > 0
