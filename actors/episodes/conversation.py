"""The messages of an episode, as its reward reads them.

Invariant: they are for people and rewards alone; the ids that are trained are those of the record.
"""

from collections.abc import Sequence

from streamrl.interfaces import EnvironmentContext, Message, Observation, ToolSchema


class Conversation:
    """Of one episode, while it runs; contexts that were rewritten follow one another."""

    def __init__(self, start: EnvironmentContext) -> None:
        self._renderer = start.renderer
        self._prompt_token_ids = start.prompt_token_ids
        self._prompt_messages = start.prompt_messages
        self._tools: Sequence[ToolSchema] = ()
        self.messages: tuple[Message, ...] = ()

    def observe(self, observation: Observation) -> None:
        """What the policy reads next; token ids become the message of a user."""
        self._tools = observation.tools or self._tools
        if observation.token_ids == self._prompt_token_ids and not self.messages:
            self.messages = self._prompt_messages
        elif observation.token_ids:
            text = self._renderer.decode(observation.token_ids)
            self.messages = (*self.messages, {"role": "user", "content": text})
        self.messages = (*self.messages, *observation.messages)

    def answer(self, token_ids: tuple[int, ...]) -> None:
        """A completion."""
        self.messages = (*self.messages, self._renderer.parse(token_ids, self._tools))
