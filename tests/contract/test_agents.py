"""Agents that end well, end badly, hang or disappear: each has its sentence, none its way."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from actors.episode_record import Rollout
from actors.episodes.episode import EpisodeRun
from actors.gateway.gateway import Gateway
from streamrl.config import RunConfig
from streamrl.config.generator import EpisodeSettings
from streamrl.errors import ConfigError, LostAgentError, RolloutError, TransportError
from streamrl.interfaces import EnvironmentContext, Prompt
from streamrl.types import FinishReason
from tests.ports import free_port
from tests.unit.gateway.parts import SAMPLING, PlainRenderer, ScriptedEngine, client, text
from tests.waiting import LoopClock, until

PREAMBLE = """
import asyncio, json, os, signal, subprocess, sys, time, urllib.error, urllib.request

def post(url, body, key=""):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=120))

def ask(url, key, content="q"):
    body = {"messages": [{"role": "user", "content": content}]}
    return post(f"{url}/chat/completions", body, key)["choices"][0]["message"]["content"]
"""
CLIENT = "url, key = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']\n"


def config(*, reward: str = "exact_match", **agent: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "policy"},
            "data": {"source": "copy", "reward": reward},
            "generator": {"environment": "agent", "agent": agent},
        }
    )


class Episodes:
    """Runs episodes of the gateway's agents on an engine that answers "a;" to everything."""

    def __init__(self, gateway: Gateway, url: str) -> None:
        self.url = url
        self.engine = ScriptedEngine(*["a;"] * 20_000)
        self._gateway = gateway

    @property
    def num_asking(self) -> int:
        """Agents that wait for a task."""
        return len(self._gateway._episodes._changed._waiters)

    async def run(
        self,
        deadline_s: float = 600.0,
        max_model_len: int = 100,
        max_turns: int | None = None,
    ) -> Rollout:
        episode = EpisodeRun(
            self.engine,
            lambda: self._gateway,
            max_model_len=max_model_len,
            deadline_s=deadline_s,
            settings=EpisodeSettings(max_turns=max_turns),
        )
        assert episode.num_slots == 1, "the agent is about to ask"
        self.latest = episode
        prompt = Prompt("what?", "a", {"id": 5}, origin="row 3 of x", environment="agent")
        async with asyncio.timeout(240):
            return await episode.run(EnvironmentContext(prompt, (), PlainRenderer()), SAMPLING)


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[Episodes]:
    gateway = Gateway(config(**settings))
    url = await gateway.start(PlainRenderer())
    try:
        yield Episodes(gateway, url)
    finally:
        await gateway.close()


@pytest.fixture
def function(tmp_path: Path) -> Callable[[str], str]:
    """A file with the body of `play(task, base_url, api_key)`; the setting that names it."""

    def write(body: str, prefix: str = "") -> str:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        file = tmp_path / "own_agent.py"
        file.write_text(f"{PREAMBLE}\n{prefix}def play(task, base_url, api_key):\n{lines}")
        return f"{file}:play"

    return write


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """A program of this body; its command line."""

    def write(body: str, *words: str) -> list[str]:
        file = tmp_path / "program.py"
        file.write_text(f"{PREAMBLE}\n{CLIENT}\n{body}")
        return [sys.executable, str(file), *words]

    return write


def recorded(rollout: Rollout) -> list[str]:
    return [text(segment.token_ids) for segment in rollout.segments]


class TestFunctions:
    @pytest.mark.parametrize("prefix", ["", "async "])
    @pytest.mark.parametrize("reward", ["0.5", "numpy.float32(0.5)"])
    async def test_it_plays_and_returns_the_reward(self, function, prefix, reward):
        play = function(f"import numpy\nask(base_url, api_key)\nreturn {reward}", prefix)
        async with serving(function=play, reward="environment") as episodes:
            rollout = await episodes.run()
        assert recorded(rollout) == ["u:q;>a;"]
        assert [turn.reward for turn in rollout.turns] == [0.5]
        assert rollout.finish_reason is FinishReason.STOP

    async def test_several_play_at_a_time_and_no_more_than_they_may(self, function):
        play = function("ask(base_url, api_key)")
        async with serving(function=play, max_agents=3) as episodes:
            episodes.engine.open.clear()
            running = [asyncio.create_task(episodes.run()) for _ in range(5)]
            while episodes.engine.num_running < 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert episodes.engine.num_running == 3
            episodes.engine.open.set()
            rollouts = await asyncio.gather(*running)
        assert [recorded(rollout) for rollout in rollouts] == [["u:q;>a;"]] * 5

    @pytest.mark.parametrize(
        ("body", "sentence"),
        [
            (
                "raise ValueError('no luck')",
                r"agent .*own_agent.py:play: ValueError: no luck \(own",
            ),
            (
                "ask(base_url, api_key)\nreturn 'good'",
                "returned 'good'; it must be a finite number",
            ),
            ("ask(base_url, api_key)\nreturn float('nan')", "returned nan; it must be a finite"),
            ("ask(base_url, api_key)\nreturn 10**400", "returned 1000.*; it must be a finite"),
            ("ask(base_url, api_key)", "ended without a reward, and data.reward is environment"),
            ("sys.exit(3)", "SystemExit: 3"),
            ("return 1.0", "ended its episode without a completion"),
        ],
    )
    async def test_one_that_fails_costs_its_group(self, function, body, sentence):
        async with serving(function=function(body), reward="environment") as episodes:
            with pytest.raises(RolloutError, match=sentence):
                await episodes.run()

    async def test_at_the_deadline_the_episode_is_truncated_with_what_was_sampled(
        self, function, monkeypatch
    ):
        # No more often than the engine has answers.
        play = function("while True:\n    ask(base_url, api_key)\n    time.sleep(0.001)")
        clock = LoopClock(monkeypatch)
        async with serving(function=play, reward="environment") as episodes:
            running = asyncio.create_task(episodes.run(deadline_s=60.0))
            await until(lambda: len(episodes.engine.calls) > 1)
            clock.ahead_s = 60.0
            rollout = await running
        assert rollout.finish_reason is FinishReason.DEADLINE
        assert recorded(rollout)[0] == "u:q;>a;"

    async def test_one_that_is_async_is_canceled_when_it_hangs(
        self, function, tmp_path, monkeypatch
    ):
        asked, gone = tmp_path / "asked", tmp_path / "gone"
        play = function(
            f"ask(base_url, api_key)\nopen({str(asked)!r}, 'w').close()\n"
            "try:\n    await asyncio.sleep(600)\n"
            f"finally:\n    open({str(gone)!r}, 'w').close()",
            "async ",
        )
        clock = LoopClock(monkeypatch)
        async with serving(function=play) as episodes:
            running = asyncio.create_task(episodes.run(deadline_s=60.0))
            await until(asked.exists)
            # By its grace, too.
            clock.ahead_s = 100.0
            rollout = await running
            await until(gone.exists)
        assert rollout.finish_reason is FinishReason.DEADLINE

    async def test_one_that_fills_the_context_is_truncated(self, function):
        play = function(
            "content = 'q'\nwhile True:\n    content += ask(base_url, api_key, content)"
        )
        async with serving(function=play, reward="environment") as episodes:
            rollout = await episodes.run(max_model_len=8)
        assert rollout.finish_reason is FinishReason.LENGTH
        assert [len(segment.turns) for segment in rollout.segments] == [1, 1, 1]

    async def test_one_that_goes_on_after_its_last_turn_is_truncated(self, function):
        play = function("while True:\n    ask(base_url, api_key)")
        async with serving(function=play, reward="environment") as episodes:
            rollout = await episodes.run(max_turns=3)
        assert rollout.finish_reason is FinishReason.MAX_TURNS
        assert len(rollout.turns) == 3
        assert rollout.messages[-1] == {"role": "assistant", "content": "a"}
        assert rollout.metrics["num_turns"] == 3

    async def test_it_leaves_its_slot_while_it_is_busy_elsewhere(self, function, tmp_path):
        busy, go = tmp_path / "busy", tmp_path / "go"
        play = function(
            f"ask(base_url, api_key)\nopen({str(busy)!r}, 'w').close()\n"
            f"while not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
            "ask(base_url, api_key)"
        )
        async with serving(function=play) as episodes:
            running = asyncio.create_task(episodes.run())
            while not busy.exists():
                await asyncio.sleep(0.01)
            assert (episodes.latest.num_slots, episodes.latest.is_over) == (0, False)
            episodes.engine.open.clear()
            go.touch()
            while not episodes.engine.num_running:
                await asyncio.sleep(0.01)
            assert episodes.latest.num_slots == 1
            episodes.engine.open.set()
            rollout = await running
        assert episodes.latest.num_slots == 0
        assert rollout.metrics["environment_wait_s"] > 0

    async def test_an_engine_that_has_ended_is_no_failure_of_the_agents(self, function):
        """Else each group would fail, and the run lose its prompts, before the generator ends."""
        play = function(
            "ask(base_url, api_key)\ntry:\n    ask(base_url, api_key)\n"
            "except urllib.error.HTTPError as error:\n    assert error.code == 410\nreturn 0.0"
        )
        async with serving(function=play, reward="environment") as episodes:
            episodes.engine.answers = ["a;"]
            episodes.engine.failure = TransportError("the inference server is gone")
            with pytest.raises(TransportError, match="the inference server is gone"):
                await episodes.run()


class TestCommands:
    async def test_it_plays_in_its_own_process(self, command):
        words = command(
            "assert sys.argv[1:] == ['what?', 'a-5', '${else}'], sys.argv\n"
            "task = json.load(urllib.request.urlopen(os.environ['STREAMRL_SESSION_URL']))\n"
            "assert task['messages'][-1]['content'] == 'what?'\n"
            "answer = ask(url, key)\n"
            "url = os.environ['STREAMRL_SESSION_URL'] + '/reward'\n"
            "post(url, {'reward': 2, 'metrics': {'x': 3}})",
            *("{prompt}", "{answer}-{id}", "${else}"),
        )
        async with serving(command=words, reward="environment") as episodes:
            rollout = await episodes.run()
        assert recorded(rollout) == ["u:q;>a;"]
        assert [turn.reward for turn in rollout.turns] == [2.0]
        assert rollout.metrics["x"] == 3.0

    async def test_without_a_reward_its_answer_alone_is_scored(self, command):
        async with serving(command=command("ask(url, key)")) as episodes:
            rollout = await episodes.run()
        assert [turn.reward for turn in rollout.turns] == [0.0]

    @pytest.mark.parametrize(
        ("body", "how"),
        [
            ("ask(url, key)\nos.kill(os.getpid(), signal.SIGKILL)", "by SIGKILL after 1 comp"),
            (
                "ask(url, key)\nprint('no disk')\nsys.exit(7)",
                "with exit code 7 after 1 .*: no disk",
            ),
            ("raise OSError('bad')", r"with exit code 1 after 0 completions \(row 3.*OSError: bad"),
        ],
    )
    async def test_one_that_dies_is_lost_and_named(self, command, body, how):
        async with serving(command=command(body)) as episodes:
            with pytest.raises(LostAgentError, match=rf"agent `.*program.py` ended {how}"):
                await episodes.run()

    async def test_what_leaves_its_group_with_its_output_open_holds_nobody_up(
        self, command, tmp_path
    ):
        words = command(
            "ask(url, key)\n"
            "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
            f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
        )
        try:
            async with serving(command=words) as episodes, asyncio.timeout(120):
                rollout = await episodes.run()
        finally:
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert recorded(rollout) == ["u:q;>a;"]

    async def test_a_program_that_is_not_there_is_named(self):
        async with serving(command="no-such-program") as episodes:
            with pytest.raises(
                LostAgentError, match="No such file or directory: 'no-such-program'"
            ):
                await episodes.run()

    async def test_a_limit_ends_the_process_and_all_that_it_started(self, command, tmp_path):
        pids = tmp_path / "pids"
        words = command(
            "ask(url, key)\n"
            "child = subprocess.Popen(['sleep', '600'])\n"
            f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
            "time.sleep(600)"
        )
        async with serving(command=words) as episodes:
            running = asyncio.create_task(episodes.run())
            async with asyncio.timeout(120):
                while not (pids.exists() and len(pids.read_text().split()) == 2):
                    await asyncio.sleep(0.01)
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
                while any(map(is_alive, pids.read_text().split())):
                    await asyncio.sleep(0.01)


def is_alive(pid: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    return False


class TestAgentsThatAsk:
    async def test_one_plays_over_http_alone(self):
        async with (
            serving(reward="environment") as episodes,
            client() as http,
        ):
            running = asyncio.create_task(episodes.run())
            taken = await http.post(f"{episodes.url}/sessions", json={"agent": "me", "wait_s": 60})
            task = taken.json()
            body = {"messages": [{"role": "user", "content": "q"}]}
            key = {"Authorization": f"Bearer {task['api_key']}"}
            await http.post(f"{task['base_url']}/chat/completions", json=body, headers=key)
            for wrong in ({}, {"reward": "x"}, {"reward": 1, "metrics": {"a": None}}, {"rewrd": 1}):
                answer = await http.post(f"{task['session_url']}/reward", json=wrong)
                assert answer.status_code == 400, answer.text
            assert not running.done()
            good = {"reward": 0.25, "metrics": {"steps": 4}}
            assert (await http.post(f"{task['session_url']}/reward", json=good)).is_success
            rollout = await running
        assert [turn.reward for turn in rollout.turns] == [0.25]
        assert rollout.metrics["steps"] == 4.0

    async def test_one_that_falls_silent_is_lost_and_its_late_call_is_refused(self):
        async with serving(silence_s=0.3) as episodes, client() as http:
            running = asyncio.create_task(episodes.run())
            taken = await http.post(f"{episodes.url}/sessions", json={"agent": "me", "wait_s": 60})
            with pytest.raises(
                LostAgentError,
                match=r"agent 'me' has asked for nothing for generator.agent.silence_s, which is "
                r"0.3 s \(row 3 of x, episode 0\)",
            ):
                await running
            late = await http.post(f"{taken.json()['session_url']}/reward", json={"reward": 1})
            assert late.status_code == 410
            message = late.json()["error"]["message"]
            assert message.startswith("the episode is over: agent 'me' has asked for nothing")

    async def test_waiting_for_a_completion_is_no_silence(self):
        async with serving(silence_s=5.0) as episodes, client() as http:
            episodes.engine.open.clear()
            running = asyncio.create_task(episodes.run())
            taken = await http.post(f"{episodes.url}/sessions", json={"wait_s": 60})
            url = f"{taken.json()['session_url']}/v1/chat/completions"
            body = {"messages": [{"role": "user", "content": "q"}]}
            asking = asyncio.create_task(http.post(url, json=body))
            await asyncio.sleep(5.5)
            assert not running.done()
            episodes.engine.open.set()
            assert (await asking).is_success
            await http.post(f"{taken.json()['session_url']}/reward", json={"reward": 1})
            assert recorded(await running) == ["u:q;>a;"]

    async def test_one_may_give_up(self):
        async with serving() as episodes, client() as http:
            running = asyncio.create_task(episodes.run())
            taken = await http.post(f"{episodes.url}/sessions", json={"agent": "me", "wait_s": 60})
            await http.delete(taken.json()["session_url"])
            with pytest.raises(LostAgentError, match="agent 'me' gave up"):
                await running

    async def test_without_a_task_there_is_no_content(self):
        async with serving() as episodes, client() as http:
            for wait_s in (0, 0.1):
                nothing = await http.post(f"{episodes.url}/sessions", json={"wait_s": wait_s})
                assert nothing.status_code == 204
            wrong = await http.post(f"{episodes.url}/sessions", json={"wait_s": 1e9})
            assert "wait_s: was 1e+09; it must be from 0 to 300" in wrong.text

    async def test_an_agent_that_goes_away_while_it_waits_gets_no_task(self):
        async with serving() as episodes, client() as http:
            asking = http.post(f"{episodes.url}/sessions", json={"agent": "first", "wait_s": 60})
            first = asyncio.create_task(asking)
            await until(lambda: episodes.num_asking == 1)
            first.cancel()
            await until(lambda: episodes.num_asking == 0)
            running = asyncio.create_task(episodes.run())
            second = await http.post(f"{episodes.url}/sessions", json={"wait_s": 60})
            assert second.status_code == 200
            await http.delete(second.json()["session_url"])
            with pytest.raises(LostAgentError):
                await running

    async def test_a_canceled_episode_is_not_offered_any_more(self):
        async with serving() as episodes, client() as http:
            running = asyncio.create_task(episodes.run())
            await asyncio.sleep(0.05)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            nothing = await http.post(f"{episodes.url}/sessions", json={"wait_s": 0})
            assert nothing.status_code == 204

    async def test_an_agent_that_is_started_leaves_none_to_take(self, function):
        async with (
            serving(function=function("return 0")) as episodes,
            client() as http,
        ):
            refused = await http.post(f"{episodes.url}/sessions", json={})
            assert "generator.agent starts its agents itself" in refused.text

    async def test_a_token_is_asked_for(self, monkeypatch):
        monkeypatch.setenv("AGENTS", "tok")
        async with serving(token_env="AGENTS") as episodes, client() as http:
            url = f"{episodes.url}/sessions"
            for headers in ({}, {"Authorization": "Bearer other"}, {"x-api-key": "tök".encode()}):
                refused = await http.post(url, json={"wait_s": 0}, headers=headers)
                assert refused.status_code == 401
            right = {"Authorization": "Bearer tok"}
            assert (await http.post(url, json={"wait_s": 0}, headers=right)).status_code == 204


async def test_generators_of_one_machine_take_ports_beside_each_other():
    with socket.socket() as taken:
        port = free_port(3)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(TransportError, match=f"other processes listen at {port} to {port}"):
            async with serving(port=port):
                pass
        two = config(port=port).model_dump(exclude_unset=True)
        two["generator"]["count"] = 3
        gateway = Gateway(RunConfig.model_validate(two))
        url = await gateway.start(PlainRenderer())
        await gateway.close()
        assert int(url.rpartition(":")[2]) in (port + 1, port + 2)


async def test_an_address_of_another_machine_is_refused(monkeypatch):
    monkeypatch.setenv("AGENTS", "tok")
    with pytest.raises(ConfigError, match=r"generator\.agent\.host: .*assign"):
        async with serving(host="203.0.113.7", token_env="AGENTS"):
            pass


def test_a_token_that_is_not_there_is_missed():
    with pytest.raises(ConfigError, match="there is no NO_SUCH_VARIABLE in the environment"):
        Gateway(config(token_env="NO_SUCH_VARIABLE"))


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        ({"host": "0.0.0.0"}, "which other machines can reach; that needs a token"),
        ({"host": "here"}, "must be an IP address or localhost"),
        ({"function": "a.py:b", "command": "c"}, r"function: is an agent, and command another"),
        ({"function": "agents"}, "code of your own is named PATH.py:NAME"),
        ({"command": ""}, "command: is empty"),
        ({"silence_s": 0}, "greater than 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(agent, sentence):
    with pytest.raises(ValueError, match=sentence):
        config(**agent)


def test_a_command_may_be_a_line():
    assert config(command="python 'my agent.py' {prompt}").generator.agent.command == (
        "python",
        "my agent.py",
        "{prompt}",
    )
