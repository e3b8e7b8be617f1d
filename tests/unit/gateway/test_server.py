"""The gateway's server ends in time, whoever waits at it."""

import asyncio
from urllib.parse import urlsplit

from actors.gateway import server
from actors.gateway.open_episodes import OpenEpisodes
from actors.gateway.server import GatewayServer
from streamrl.config.generator import AgentSettings


async def test_an_agent_that_waits_for_a_task_does_not_hold_the_close_up(monkeypatch):
    monkeypatch.setattr(server, "_CLOSE_S", 0.02)
    episodes, asked = OpenEpisodes(), asyncio.Event()

    async def wait(agent: str, wait_s: float) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(episodes, "take", wait)
    gateway = GatewayServer(
        AgentSettings(port=0), episodes, lambda episode: {}, is_pulled=True, model="model"
    )
    place = urlsplit(await gateway.start(1))
    answer, request = await asyncio.open_connection(place.hostname, place.port)
    request.write(
        b"POST /sessions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        b"Content-Length: 0\r\n\r\n"
    )
    async with asyncio.timeout(120):
        await asked.wait()
        await gateway.close()
    assert await answer.read() == b""
    request.close()
