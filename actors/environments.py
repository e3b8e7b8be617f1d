"""Environments: what answers the policy's completions.

A new environment is a class with `start` and `step` (see `streamrl.interfaces.Environment`), made
from a prompt's token ids, and a line in `make_environment`. One instance lives for one episode.
"""

from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Environment, Transition
from streamrl.types import Completion


class SingleTurn:
    """One question, one answer."""

    def __init__(self, prompt_token_ids: tuple[int, ...]) -> None:
        self._prompt_token_ids = prompt_token_ids

    async def start(self) -> tuple[int, ...]:
        return self._prompt_token_ids

    async def step(self, completion: Completion) -> Transition:
        return Transition(done=True)


def make_environment(name: str, prompt_token_ids: tuple[int, ...]) -> Environment:
    """A fresh environment that `generator.environment` names."""
    match name:
        case "single_turn":
            return SingleTurn(prompt_token_ids)
        case _:
            hint = did_you_mean(name, ["single_turn"])
            raise ConfigError(f"generator.environment: was {name!r}; {hint}")
