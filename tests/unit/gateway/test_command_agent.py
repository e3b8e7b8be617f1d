"""A command that cannot be started for one row costs that row's group."""

import pytest

from actors.gateway.open_episodes import OpenEpisode
from actors.gateway.session import Session
from actors.gateway.started_agents import CommandAgent
from streamrl.errors import LostAgentError
from streamrl.interfaces import EnvironmentContext, Prompt
from tests.unit.gateway.parts import SAMPLING, PlainRenderer, ScriptedEngine


@pytest.mark.parametrize(
    ("word", "prompt", "reason"),
    [
        ("{prompt}", "a\0b", "null byte"),
        ("{prompt}", "a" * 2**18, "Argument list too long"),
        ("{promt}", "a", r"\{promt\}: its row has no column 'promt'; did you mean 'prompt'\?"),
    ],
)
async def test_a_row_that_no_argument_holds_costs_its_group(word: str, prompt: str, reason: str):
    renderer = PlainRenderer()
    context = EnvironmentContext(Prompt(prompt, "", origin="row 3 of x"), (), renderer)
    session = Session(ScriptedEngine(), renderer, SAMPLING, max_model_len=9)
    episode = OpenEpisode(session, context, needs_reward=False)
    urls = dict.fromkeys(("base_url", "anthropic_base_url", "session_url", "api_key"), "x")
    task = {**urls, "messages": renderer.messages(context.prompt), "row": {}, "answer": ""}
    sentence = rf"^agent `true .*` cannot be started \(row 3 of x, episode 0\): .*{reason}"
    with pytest.raises(LostAgentError, match=sentence):
        await CommandAgent(["true", word]).run(episode, task)
