"""An episode that is offered is taken, whoever else waits for one."""

import asyncio

from actors.gateway.open_episodes import OpenEpisode, OpenEpisodes
from actors.gateway.session import Session
from streamrl.interfaces import EnvironmentContext, Prompt
from tests.unit.gateway.parts import SAMPLING, PlainRenderer, ScriptedEngine


async def test_an_episode_is_taken_where_the_agent_that_waited_longest_is_gone():
    renderer, episodes = PlainRenderer(), OpenEpisodes()
    context = EnvironmentContext(Prompt("p", ""), (), renderer)
    session = Session(ScriptedEngine(), renderer, SAMPLING, max_model_len=9)
    episode = OpenEpisode(session, context, needs_reward=False)
    first, second = (asyncio.create_task(episodes.take(name, 60)) for name in "ab")
    for _ in range(5):
        await asyncio.sleep(0)
    offering = asyncio.create_task(episodes.offer(episode))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(20):
        await offering
        assert await second is episode
    assert episode.agent == "b"
