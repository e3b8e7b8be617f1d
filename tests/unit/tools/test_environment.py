"""Episodes with tools: a scripted engine, the real renderer, the real environment."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from actors.episode_record import Rollout
from actors.episodes.episode import EpisodeRun
from actors.rendering.renderer import ChatRenderer
from actors.tools.toolset import ToolEnvironment, Toolset, make_sources
from streamrl.config.data import DataSettings
from streamrl.config.generator import GeneratorSettings, ToolSettings
from streamrl.interfaces import CompletionHandle, EnvironmentContext, Prompt
from streamrl.types import INVALID_TURNS, Completion, FinishReason, SamplingParams
from tests.isolation import find_isolation
from tests.unit.episodes.test_replies import byte_level_tokenizer

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
END = "<|im_end|>"


@cache
def renderer() -> ChatRenderer:
    settings = DataSettings(
        source="addition",
        chat_template=TEMPLATES / "qwen3.jinja",
        system_prompt="Use the tools.",
        tool_parser="hermes",
    )
    return ChatRenderer(byte_level_tokenizer(), settings)


class ScriptedEngine:
    """Samples the texts in their order, and keeps what it read."""

    def __init__(self, *texts: str, finish_reason: FinishReason = FinishReason.STOP) -> None:
        self._texts = list(texts)
        self._finish_reason = finish_reason
        self.read: list[str] = []

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        self.read.append(byte_level_tokenizer().decode(list(prompt)))
        ids = np.array(renderer().encode_text(self._texts.pop(0)), np.int32)
        return Completion(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            policy_versions=np.zeros(len(ids), np.int32),
            finish_reason=self._finish_reason,
        )


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play(engine: ScriptedEngine, *tools: str | ToolSettings, **kwargs: object) -> Rollout:
    toolset = Toolset(make_sources(GeneratorSettings(tools=tools)))  # type: ignore[arg-type]
    prompt = Prompt("What is 37*48?", "1776")
    context = EnvironmentContext(prompt, renderer().encode(prompt), renderer())
    run = EpisodeRun(
        engine,  # type: ignore[arg-type]
        lambda: ToolEnvironment(toolset, **kwargs),  # type: ignore[arg-type]
        max_model_len=10_000,
        deadline_s=60.0,
    )
    return await run.run(context, SamplingParams(max_new_tokens=100))


class TestEpisodes:
    async def test_a_call_is_answered_and_the_next_completion_ends(self) -> None:
        engine = ScriptedEngine(call("calculator", expression="37*48") + END, "It is 1776." + END)
        rollout = await play(engine, "calculator")
        assert "Use the tools." in engine.read[0]
        assert '"name": "calculator"' in engine.read[0]
        (segment,) = rollout.segments
        assert [turn.num_tool_calls for turn in segment.turns] == [1, 0]
        reply = engine.read[1].removeprefix(engine.read[0])
        assert "<tool_response>\n1776\n</tool_response>" in reply
        assert rollout.metrics["tool/calculator/num_calls"] == 1
        assert INVALID_TURNS not in rollout.metrics

    async def test_calls_of_one_completion_are_answered_in_their_order(self) -> None:
        calls = "\n".join(call("calculator", expression=f"{i}+{i}") for i in range(1, 4))
        engine = ScriptedEngine(calls + END, "Done." + END)
        rollout = await play(engine, "calculator")
        reply = engine.read[1].removeprefix(engine.read[0])
        places = [reply.index(f"<tool_response>\n{2 * i}\n") for i in range(1, 4)]
        assert places == sorted(places)
        assert rollout.turns[0].num_tool_calls == 3

    async def test_a_failing_and_an_unknown_tool_are_observations(self) -> None:
        failing = call("calculator", expression="1/0") + "\n" + call("calculater")
        engine = ScriptedEngine(failing + END, "I cannot." + END)
        rollout = await play(engine, "calculator")
        assert "error: division by zero" in engine.read[1]
        assert "error: there is no tool 'calculater'" in engine.read[1]
        assert rollout.metrics["tool/calculator/num_errors"] == 1
        assert rollout.metrics["tool/num_unknown"] == 1

    async def test_a_call_that_cannot_be_read_ends_the_episode_as_an_invalid_turn(self) -> None:
        rollout = await play(ScriptedEngine("<tool_call>{broken</tool_call>" + END), "calculator")
        assert rollout.metrics[INVALID_TURNS] == 1
        assert len(rollout.turns) == 1

    async def test_a_completion_that_was_cut_is_not_run(self) -> None:
        text = call("calculator", expression="1+1")
        engine = ScriptedEngine(text, finish_reason=FinishReason.LENGTH)
        rollout = await play(engine, "calculator")
        assert rollout.metrics["tool/calculator/num_calls"] == 0
        assert rollout.finish_reason is FinishReason.LENGTH

    async def test_half_a_call_that_a_limit_cut_is_no_invalid_turn(self) -> None:
        engine = ScriptedEngine('<tool_call>{"name": "ca', finish_reason=FinishReason.LENGTH)
        rollout = await play(engine, "calculator")
        assert INVALID_TURNS not in rollout.metrics

    async def test_too_many_calls_are_refused(self) -> None:
        calls = "\n".join(call("calculator", expression="1") for _ in range(40))
        engine = ScriptedEngine(calls + END, "Done." + END)
        rollout = await play(engine, "calculator")
        assert rollout.metrics["tool/calculator/num_calls"] == 32
        assert engine.read[1].count("error: not run") == 8

    @pytest.mark.skipif(find_isolation() is None, reason="no isolation on this machine")
    async def test_programs_that_attack_are_observations(self) -> None:
        programs = ["while True: pass", "import os\nwhile True: os.fork()", "x = bytearray(10**12)"]
        calls = "\n".join(call("python", code=code) for code in programs)
        engine = ScriptedEngine(calls + END, "I give up." + END)
        rollout = await play(engine, ToolSettings(tool="python", time_limit_s=2.0))
        assert engine.read[1].count("<tool_response>\nerror: ") == 3
        assert rollout.metrics["tool/python/num_errors"] == 3
        assert len(rollout.turns) == 2

    async def test_some_of_the_generators_tools(self) -> None:
        engine = ScriptedEngine(call("python", code="1") + END, "Done." + END)
        rollout = await play(engine, "calculator", "python", tools=["calculator"])
        assert '"name": "python"' not in engine.read[0]
        assert rollout.metrics["tool/num_unknown"] == 1
