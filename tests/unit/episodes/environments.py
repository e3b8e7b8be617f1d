"""Environments of several turns and contexts, and an engine that notes what it read and sampled."""

from collections.abc import Sequence

from streamrl.interfaces import (
    CompletionHandle,
    Engine,
    EnvironmentContext,
    Observation,
    Transition,
)
from streamrl.types import Completion, SamplingParams


class Turns:
    """Answers with token 9 until it has `num_turns`."""

    num_turns = 3

    def __init__(self) -> None:
        self.turn = 0

    async def start(self, context: EnvironmentContext) -> Observation:
        self.context = context
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion: Completion) -> Transition:
        self.turn += 1
        is_done = self.turn == self.num_turns
        return Transition(observation=self.answer(completion), done=is_done)

    def answer(self, completion: Completion) -> Observation:
        return Observation(token_ids=(9,))

    async def close(self) -> None:
        pass


class Summarizing(Turns):
    """After each two turns, the prompt and the last completion take the place of all before."""

    num_turns = 5

    def answer(self, completion: Completion) -> Observation:
        if self.turn % 2:
            return Observation(token_ids=(9,))
        summary = (*self.context.prompt_token_ids, *completion.token_ids.tolist())
        return Observation(token_ids=summary, is_new_context=True)


class SubAgent(Turns):
    """The second turn is a sub-agent's with a context of its own; then the first context goes on,
    with the sub-agent's answer."""

    num_turns = 3

    def answer(self, completion: Completion) -> Observation:
        sampled = tuple(completion.token_ids.tolist())
        if self.turn == 1:
            self.main = (*self.context.prompt_token_ids, *sampled)
            return Observation(token_ids=(11, 12), is_new_context=True)
        return Observation(token_ids=(*self.main, 13, *sampled), is_new_context=True)


class NotingEngine:
    """Around an engine: every request's tokens, read and sampled."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seen: list[tuple[tuple[int, ...], Completion]] = []

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def learner_id(self) -> str:
        return self._engine.learner_id

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        handle: CompletionHandle | None = None,
    ) -> Completion:
        completion = await self._engine.generate(prompt_token_ids, sampling, handle)
        self.seen.append((tuple(prompt_token_ids), completion))
        return completion
