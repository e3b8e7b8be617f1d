"""The environment `tools`: the policy calls tools until a turn of its makes no call.

A completion that calls nothing, that was cut, or whose call cannot be read ends the episode; the
last of these counts as an invalid turn. The reward judges the last turn, or the conversation.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from actors.tools.toolset import EpisodeTools, Toolset
from streamrl.interfaces import EnvironmentContext, Message, Observation, Transition
from streamrl.types import Completion, FinishReason

TOOLS = "tools"
"""Its name."""
# More calls in one completion are answered with an error and not run.
_MAX_CALLS = 32


class ToolEnvironment:
    """One episode with the tools of its generator."""

    def __init__(self, toolset: Toolset, tools: Sequence[str] = ()) -> None:
        """
        Args:
            tools: names of those that may be called; none: all.
        """
        self._toolset = toolset
        self._names = tuple(tools)
        self._tools: EpisodeTools | None = None
        self._context: EnvironmentContext | None = None

    async def start(self, context: EnvironmentContext) -> Observation:
        """The prompt, with the tools as the chat template describes them. Waits for the tools."""
        self._context = context
        self._tools = await self._toolset.open(self._names)
        messages = context.renderer.messages(context.prompt)
        return Observation(messages=messages, tools=self._tools.schemas)

    async def step(self, completion: Completion) -> Transition:
        """The answers to the completion's calls. Waits for the slowest, at most its time limit."""
        assert self._tools is not None, "start comes first"
        assert self._context is not None, "start comes first"
        message = self._context.renderer.parse(completion.token_ids.tolist(), self._tools.schemas)
        calls = message.get("tool_calls", ())
        if not calls or completion.finish_reason is not FinishReason.STOP:
            is_valid = "parse_error" not in message
            return Transition(done=True, is_valid=is_valid, metrics=self._tools.metrics)
        answers = await asyncio.gather(
            *(self._tools.answer(call) for call in calls[:_MAX_CALLS]),
        )
        refused = tuple(_refusal(call) for call in calls[_MAX_CALLS:])
        return Transition(
            Observation(messages=(*answers, *refused)),
            done=False,
            num_tool_calls=len(answers),
            metrics=self._tools.metrics,
        )

    async def snapshot(self) -> Any:
        """None where a session may know earlier calls."""
        return None if self._tools is None else self._tools.snapshot()

    async def restore(self, context: EnvironmentContext, snapshot: Any) -> None:
        """Waits for the tools."""
        await self.start(context)
        assert self._tools is not None, "they were opened"
        self._tools.restore(snapshot)

    async def close(self) -> None:
        if self._tools is not None:
            await self._tools.close()


def _refusal(call: Mapping[str, Mapping[str, str]]) -> Message:
    content = f"error: not run, one turn may make {_MAX_CALLS} calls"
    return {"role": "tool", "name": call["function"]["name"], "content": content}
