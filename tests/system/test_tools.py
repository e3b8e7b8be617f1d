"""A run goes on while every completion calls tools that attack, raise and hang."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.isolation import find_isolation
from tests.settings import set_options
from tests.system.conftest import Launched
from tests.system.test_launch import assert_books_close, assert_every_step_once

pytestmark = pytest.mark.skipif(find_isolation() is None, reason="no isolation on this machine")

Launch = Callable[..., Launched]

NUM_STEPS = 3
NAMES = ("num_calls", "num_errors")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ATTACKS = (
    "import os\nwhile True: os.fork()",
    "eaten = []\nwhile True: eaten.append(bytearray(10**7))",
    "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    "while True: print('flood' * 1000)",
    "while True: pass",
    "import subprocess\nsubprocess.Popen(['/bin/sleep', '1000'], start_new_session=True)\n1 / 0",
)
OWN = '''
import threading

def raises():
    """Raises."""
    raise LookupError("of the tool itself")

def hangs():
    """Never returns."""
    threading.Event().wait()
'''


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run's folder for temporary files, open to the user that root's programs become."""
    with tempfile.TemporaryDirectory(prefix="tools-") as name:
        Path(name).chmod(0o755)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.mark.long
def test_a_run_goes_on_while_its_tools_attack_raise_and_hang(
    launch: Launch, tmp_path: Path, temporary: Path
):
    outside = (tmp_path / name for name in ("written", "run.yaml"))
    attacks = [*ATTACKS, *(f"open({str(path)!r}, 'w')" for path in outside)]
    parser, template, own = (tmp_path / name for name in ("all.json", "plain.jinja", "own.py"))
    parser.write_text(json.dumps(_every_completion_calls(attacks)))
    template.write_text(TEMPLATE)
    own.write_text(OWN)
    before = {*tmp_path.iterdir()}
    tools = [
        {"tool": "python", "time_limit_s": 1, "kwargs": {"memory_bytes": 2**28}},
        {"tool": f"{own}:raises"},
        {"tool": f"{own}:hangs", "time_limit_s": 0.2},
    ]
    run = launch(
        *set_options(
            f"data.tool_parser={parser}",
            f"data.chat_template={template}",
            "data.tool_schemas=omit",
            "generator.environment=tools",
            f"generator.tools={json.dumps(tools)}",
            "generator.episode.max_turns=1",
            "generator.group_size=2",
            "generator.max_num_seqs=2",
            "learner.groups_per_step=2",
            "buffer.max_staleness=0",
            f"run.max_steps={NUM_STEPS}",
        )
    )
    assert run.end() == 0, run.output
    lines = assert_every_step_once(run, NUM_STEPS)
    assert_books_close(run)
    assert not run.books["dropped"].get("failed"), run.log("generator-0")
    # An episode makes all calls or, where its completion was cut, none.
    assert sum(line["episode/tools/num_tool_calls"] for line in lines) > 0
    for line in lines:
        num_rounds = line["episode/tools/num_tool_calls"] / (len(attacks) + 2)
        for tool, num_calls in (("python", len(attacks)), ("raises", 1), ("hangs", 1)):
            values = [line[f"episode/tools/tool/{tool}/{name}"] for name in NAMES]
            assert values == pytest.approx([num_calls * num_rounds] * 2), tool
    assert _processes_of(temporary) == []
    assert [*temporary.iterdir()] == []
    # The generator has imported `own.py`.
    compiled = tmp_path / "__pycache__"
    made = {run.folder, tmp_path / ".launches"}
    assert {*tmp_path.iterdir()} - before - {compiled} == made


def _every_completion_calls(programs: list[str]) -> dict[str, object]:
    """A response template under which any text is these calls of `python`, and the own tools'."""
    calls = [("python", {"code": program}) for program in programs]
    calls += [("raises", {}), ("hangs", {})]
    transform = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    field = {"open_pattern": r"\A", "transform": transform}
    return {"start_anchor_pattern": r"\A", "fields": {"tool_calls": field, "content": {}}}


def _processes_of(folder: Path) -> list[list[str]]:
    """Command lines of those that were told of the folder: the daemons and the programs are."""
    found = []
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), *process.environ().values()]
            if any(str(folder) in word for word in told):
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found
