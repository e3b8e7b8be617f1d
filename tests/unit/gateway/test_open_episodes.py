"""An episode that is offered is taken, whoever else waits for one; and ends once."""

import asyncio
from types import SimpleNamespace

import pytest

from actors.gateway import open_episodes, session
from actors.gateway.agent import AgentResult
from actors.gateway.open_episodes import OpenEpisode, OpenEpisodes
from actors.gateway.session import Session, SessionEndedError
from streamrl.interfaces import EnvironmentContext, Prompt
from tests.unit.gateway.parts import SAMPLING, PlainRenderer, ScriptedEngine


def make_episode() -> OpenEpisode:
    renderer = PlainRenderer()
    context = EnvironmentContext(Prompt("p", ""), (), renderer)
    session = Session(ScriptedEngine(), renderer, SAMPLING, max_model_len=9)
    return OpenEpisode(session, context, needs_reward=False)


async def test_another_reward_than_the_first_is_refused():
    episode = make_episode()
    episode.close(AgentResult(1.0))
    episode.close(AgentResult(1.0))
    with pytest.raises(SessionEndedError, match="its first result stands"):
        episode.close(AgentResult(0.5))
    assert episode.result.result().reward == 1.0


async def test_an_episode_is_taken_where_the_agent_that_waited_longest_is_gone():
    episodes, episode = OpenEpisodes(), make_episode()
    first, second = (asyncio.create_task(episodes.take(name, 60)) for name in "ab")
    for _ in range(5):
        await asyncio.sleep(0)
    offering = asyncio.create_task(episodes.offer(episode))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(120):
        await offering
        assert await second is episode
    assert episode.agent == "b"


async def test_a_process_that_was_stopped_hears_the_agent_out_before_it_calls_it_silent(
    monkeypatch,
):
    now_s, slept_s = 0.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        is_stopped = not slept_s
        slept_s.append(seconds)
        now_s += 1000 if is_stopped else seconds

    for module in (open_episodes, session):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    episode = make_episode()
    episode.take("me")
    await episode.wait_for_silence(5.0)
    assert slept_s == [5.0, 5.0]
