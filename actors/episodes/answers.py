"""What an environment returned, checked before anything is made of it.

Invariant: what passes can be recorded and sent: its types and its numbers are right.
"""

import math
from collections.abc import Mapping
from typing import Any

from streamrl.errors import RolloutError
from streamrl.interfaces import Observation, Transition


def checked_observation(observation: Any, method: str = "start") -> Observation:
    """
    Raises:
        RolloutError: it is none, or holds what cannot be encoded.
    """
    if not isinstance(observation, Observation):
        raise _wrong(method, observation, "an Observation")
    for token in observation.token_ids:
        if not hasattr(token, "__index__"):
            raise _wrong(f"{method}: observation.token_ids", token, "token ids")
    for message in (*observation.messages, *observation.tools):
        if not isinstance(message, Mapping):
            raise _wrong(f"{method}: observation.messages and tools", message, "mappings")
    return observation


def checked_transition(transition: Any) -> Transition:
    """
    Raises:
        RolloutError: it is none, or one of its numbers is none or not finite.
    """
    if not isinstance(transition, Transition):
        raise _wrong("step", transition, "a Transition")
    checked_observation(transition.observation, "step")
    if not isinstance(transition.metrics, Mapping):
        raise _wrong("step: metrics", transition.metrics, "a mapping of numbers")
    calls = transition.num_tool_calls
    if not isinstance(calls, int) or calls < 0:
        raise _wrong("step: num_tool_calls", calls, "a count")
    for name, value in {"reward": transition.reward, **transition.metrics}.items():
        if not _is_finite(value):
            raise RolloutError(f"the environment's step: {name} was {value!r}; a finite number")
    return transition


def _is_finite(value: Any) -> bool:
    return hasattr(value, "__float__") and math.isfinite(value)


def _wrong(place: str, value: object, expected: str) -> RolloutError:
    return RolloutError(
        f"the environment's {place} returned {type(value).__name__} {value!r:.60}; {expected}"
    )
