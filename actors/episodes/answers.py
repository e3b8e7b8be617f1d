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
        raise _wrong(f"{method} returned", observation, "an Observation")
    for token in observation.token_ids:
        if not hasattr(token, "__index__"):
            raise _wrong(f"{method}: one of observation.token_ids was", token, "an int")
    for message in observation.messages:
        if not isinstance(message, Mapping):
            raise _wrong(f"{method}: one of observation.messages was", message, "a mapping")
    for tool in observation.tools:
        if not isinstance(tool, Mapping):
            raise _wrong(f"{method}: one of observation.tools was", tool, "a mapping")
    return observation


def checked_transition(transition: Any) -> Transition:
    """
    Raises:
        RolloutError: it is none, or one of its numbers is none or not finite.
    """
    if not isinstance(transition, Transition):
        raise _wrong("step returned", transition, "a Transition")
    checked_observation(transition.observation, "step")
    if not isinstance(transition.metrics, Mapping):
        raise _wrong("step: metrics was", transition.metrics, "a mapping of numbers")
    calls = transition.num_tool_calls
    if not isinstance(calls, int) or calls < 0:
        raise _wrong("step: num_tool_calls was", calls, "a count")
    for name, value in {"reward": transition.reward, **transition.metrics}.items():
        if not _is_finite(value):
            raise _wrong(f"step: {name} was", value, "a finite number")
    return transition


def _is_finite(value: Any) -> bool:
    try:
        return hasattr(value, "__float__") and math.isfinite(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # An array, a tensor of several numbers, an integer above all floats.
        return False


def _wrong(place: str, value: object, expected: str) -> RolloutError:
    kind = type(value).__name__
    return RolloutError(f"the environment's {place} {kind} {value!r:.60}; it must be {expected}")
