"""An episode about one question: the policy calls tools, then answers with a number.

Invariant: the question, its answer and what the tools know are a pure function of the seed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from actors.rewards.answers import answered_number
from actors.tools.environment import ToolEnvironment
from actors.tools.tool import ToolSource
from actors.tools.toolset import Toolset
from streamrl.interfaces import EnvironmentContext, Observation, Prompt, Transition
from streamrl.types import Completion

SEED = "seed"
"""The column of a prompt's row that chooses the question; without it the group's seed does."""


@dataclass(frozen=True)
class Question:
    text: str
    answer: int
    tools: tuple[ToolSource, ...]


class QuestionEnvironment:
    """The reward of the last turn is 1 if its last number is the answer, and 0 else."""

    def __init__(self, ask: Callable[[int], Question]) -> None:
        self._ask = ask
        self._answer = 0
        self._context: EnvironmentContext | None = None
        self._tools: ToolEnvironment | None = None

    async def start(self, context: EnvironmentContext) -> Observation:
        """The question, with its tools."""
        question = self._ask(int(context.prompt.row.get(SEED, context.seed)))
        self._answer, self._context = question.answer, context
        self._tools = ToolEnvironment(Toolset(question.tools))
        prompt = Prompt(question.text, str(question.answer), context.prompt.row)
        return await self._tools.start(replace(context, prompt=prompt))

    async def step(self, completion: Completion) -> Transition:
        """What the tools answer; the reward, if none was called."""
        assert self._tools is not None, "start comes first"
        assert self._context is not None, "start comes first"
        transition = await self._tools.step(completion)
        if not transition.done:
            return transition
        message = self._context.renderer.parse(completion.token_ids.tolist())
        is_right = answered_number(str(message.get("content") or "")) == self._answer
        metrics = {**transition.metrics, "success": float(is_right)}
        return replace(transition, reward=float(is_right), metrics=metrics)

    async def close(self) -> None:
        if self._tools is not None:
            await self._tools.close()
