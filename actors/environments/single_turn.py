"""One question, one answer."""

from streamrl.interfaces import EnvironmentContext, Observation, Transition
from streamrl.types import Completion


class SingleTurn:
    async def start(self, context: EnvironmentContext) -> Observation:
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion: Completion) -> Transition:
        return Transition(done=True)

    async def close(self) -> None:
        """There is nothing to close."""
