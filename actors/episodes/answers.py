"""What an environment returned, checked before anything is made of it.

Invariant: what passes can be recorded and sent: its types and its numbers are right.
"""

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from streamrl.errors import RolloutError
from streamrl.interfaces import Observation, Transition
from streamrl.types import Media
from streamrl.user_code import is_finite_number

_INT_LIMIT = 2**31
_PARTS: Mapping[str, tuple[type, str]] = {
    "media": (Media, "a Media"),
    "messages": (Mapping, "a mapping"),
    "tools": (Mapping, "a mapping"),
}


def checked_observation(observation: Any, method: str = "start") -> Observation:
    """
    Raises:
        RolloutError: it is none, or holds what cannot be encoded.
    """
    if not isinstance(observation, Observation):
        raise _wrong(f"{method} returned", observation, "an Observation")
    ids = observation.token_ids
    if not isinstance(ids, tuple | list):
        raise _wrong(f"{method}: observation.token_ids was", ids, "a tuple of ints")
    for token in ids:
        if not _is_natural(token):
            raise _wrong(f"{method}: one of observation.token_ids was", token, "a token id")
    for name, (kind, expected) in _PARTS.items():
        if not isinstance(parts := getattr(observation, name), tuple | list):
            raise _wrong(f"{method}: observation.{name} was", parts, "a tuple")
        for part in parts:
            if not isinstance(part, kind):
                raise _wrong(f"{method}: one of observation.{name} was", part, expected)
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
    for name in ("done", "in_loss", "is_valid"):
        if not isinstance(value := getattr(transition, name), bool | np.bool_):
            raise _wrong(f"step: {name} was", value, "a bool")
    for name in transition.metrics:
        if not isinstance(name, str):
            raise _wrong("step: the name of a metric was", name, "a string")
    if not _is_natural(calls := transition.num_tool_calls):
        raise _wrong("step: num_tool_calls was", calls, "a count")
    for name, value in {"reward": transition.reward, **transition.metrics}.items():
        if not is_finite_number(value):
            raise _wrong(f"step: {name} was", value, "a finite number")
    return transition


def _is_natural(value: Any) -> bool:
    """Whether it is an integer that an array of int32 can hold, from 0 on."""
    try:
        return 0 <= operator.index(value) < _INT_LIMIT
    except (TypeError, ValueError, RuntimeError):
        # An array or a tensor of several numbers.
        return False


def _wrong(place: str, value: object, expected: str) -> RolloutError:
    kind = type(value).__name__
    return RolloutError(f"the environment's {place} {kind} {value!r:.60}; it must be {expected}")
