"""An episode goes on in another environment that was restored from a snapshot of the first."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from actors.environments import BUILT_IN, BY_ID, UserEnvironment, make_environment
from actors.make_model import make_tokenizer
from actors.rendering.renderer import ChatRenderer
from actors.tools.toolset import ToolEnvironment, Toolset, make_sources
from streamrl.config.data import DataSettings
from streamrl.config.generator import GeneratorSettings, ToolSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import EnvironmentContext, Prompt, RestorableEnvironment, Transition
from streamrl.types import Completion, FinishReason
from tests.documents import write_files
from tests.unit.environments.test_games import entry
from tests.unit.tools.test_environment import call, renderer as chat_renderer

SOKOBAN = ("[up]", "[left]", "[down]", "[down]", "[right]")
HANOI = ("[A C]", "[A B]", "A to C, please", "[C B]", "[A C]", "[B A]")
GAMES: dict[str, tuple[dict[str, object], Sequence[str]]] = {
    "frozen_lake": ({"is_slippery": True, "frozen": 1.0}, ("right", "down", "no", "right", "up")),
    "gymnasium:Taxi-v4": ({}, ("0", "3", "7", "1", "2", "0")),
    "textarena:TowerOfHanoi-v0": ({}, HANOI),
    "textarena:Sokoban-v0": ({"num_boxes": 1}, SOKOBAN),
    "textarena:Bandit-v0": ({}, ("[red]", "[blue]", "red", "[red]", "[green]")),
}
NOT_RESTORED = {
    "single_turn": "its first turn is its last, and a first turn begins with `start`",
    "agent": "a program of its own, which asks for its turns by itself",
}


def made(name: str) -> RestorableEnvironment:
    if name == "tools":
        tools = GeneratorSettings(tools=("calculator",))  # type: ignore[arg-type]
        return ToolEnvironment(Toolset(make_sources(tools)))
    return make_environment(entry(name, **GAMES[name][0]))  # type: ignore[return-value]


def answers_of(name: str) -> Sequence[str]:
    if name == "tools":
        sums = ("1+1", "1/0", "2*21")
        return (*(call("calculator", expression=text) for text in sums), call("none"), "42")
    return GAMES[name][1]


def context_of(name: str) -> EnvironmentContext:
    if name == "tools":
        return EnvironmentContext(Prompt("What?", "42"), (), chat_renderer())
    ascii_alone = "".join(map(chr, range(32, 127))) + "\n"
    renderer = ChatRenderer(make_tokenizer(ascii_alone), DataSettings(source="copy"))
    return EnvironmentContext(Prompt("", "", {"seed": 5}), (), renderer)


async def answered(
    environment: RestorableEnvironment, context: EnvironmentContext, text: str
) -> Transition:
    """Without the time that tools take."""
    ids = np.array(context.renderer.encode_text(text), np.int32)
    zeros = np.zeros(len(ids))
    transition = await environment.step(
        Completion(
            token_ids=ids,
            logprobs=zeros.astype(np.float32),
            policy_versions=zeros.astype(np.int32),
            finish_reason=FinishReason.STOP,
        )
    )
    known = {k: v for k, v in transition.metrics.items() if not k.endswith("/time_s")}
    return replace(transition, metrics=known)


def test_each_built_in_environment_is_restored_or_says_why_not():
    kinds = {name.partition(":")[0] for name in (*GAMES, "tools")}
    assert kinds | NOT_RESTORED.keys() == BUILT_IN.keys() | BY_ID.keys()


@pytest.mark.parametrize("name", [*GAMES, "tools"])
async def test_a_restored_environment_goes_on_as_the_first_does(name: str):
    context, answers = context_of(name), answers_of(name)
    first = made(name)
    await first.start(context)
    expected, snapshots = [], []
    for text in answers:
        expected.append(await answered(first, context, text))
        if expected[-1].done:
            break
        snapshots.append(msgspec.msgpack.encode(await first.snapshot()))
    await first.close()
    assert len(snapshots) >= 2
    for number, snapshot in enumerate(snapshots, start=1):
        again = made(name)
        await again.restore(context, msgspec.msgpack.decode(snapshot))
        rest = [await answered(again, context, text) for text in answers[number : len(expected)]]
        assert rest == expected[number:]
        await again.close()


async def test_the_example_of_the_documents_is_restored(tmp_path: Path):
    file, *_ = write_files(tmp_path, "docs/extending/environment.md")
    context = context_of("single_turn")
    first, again = (make_environment(entry(f"{file}:Retry")) for _ in range(2))
    await first.start(context)
    assert not (await answered(first, context, "no")).done
    await again.restore(context, await first.snapshot())
    transition = await answered(again, context, "no")
    assert (transition.done, transition.metrics) == (True, {"num_tries": 2.0})


async def test_a_game_that_goes_otherwise_is_not_restored():
    name = "textarena:TowerOfHanoi-v0"
    context = context_of(name)
    first, again = made(name), made(name)
    await first.start(context)
    await answered(first, context, "[A C]")
    snapshot = await first.snapshot()
    with pytest.raises(RolloutError, match="went otherwise when its answers were played again"):
        await again.restore(context, {**snapshot, "answers": ["[A B]"]})


STATEFUL = """
class Count:
    def __init__(self):
        self.calls = 0

    async def call(self) -> str:
        \"\"\"Counts.\"\"\"
        self.calls += 1
        return str(self.calls)
"""


async def test_a_tool_that_may_know_earlier_calls_is_not_restored(tmp_path: Path):
    (tmp_path / "tool.py").write_text(STATEFUL)
    tool = ToolSettings(tool=f"{tmp_path / 'tool.py'}:Count")
    environment = ToolEnvironment(Toolset(make_sources(GeneratorSettings(tools=(tool,)))))
    await environment.start(context_of("tools"))
    assert await environment.snapshot() is None
    await environment.close()


OWN = """
class Own:
    async def start(self, context): ...
    async def step(self, completion): ...
    {methods}
"""


@pytest.mark.parametrize(
    ("methods", "refusal"),
    [
        ("async def snapshot(self): ...", "has no method 'restore'"),
        ("async def restore(self, context, snapshot): ...", "has no method 'snapshot'"),
        ("def snapshot(self): ...", "snapshot is not `async def`"),
        ("snapshot = restore = 3", "has no method 'snapshot'"),
    ],
)
def test_a_user_s_own_has_both_methods_or_neither(
    tmp_path: Path, methods: str, refusal: str, request: pytest.FixtureRequest
):
    file = tmp_path / f"own_{request.node.callspec.indices['methods']}.py"
    file.write_text(OWN.format(methods=methods))
    with pytest.raises(ConfigError, match=refusal):
        make_environment(entry(f"{file}:Own"))


async def test_a_user_s_own_that_has_lost_its_methods_is_not_taken_for_restored(tmp_path: Path):
    file = tmp_path / "edited_since.py"
    file.write_text(OWN.format(methods=""))
    environment = UserEnvironment(entry(f"{file}:Own"))
    assert await environment.snapshot() is None
    with pytest.raises(RolloutError, match="has no attribute 'restore'"):
        await environment.restore(context_of("single_turn"), {})
