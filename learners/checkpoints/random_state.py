"""The random generators of a learner's process: Python's, numpy's and torch's.

Invariant: a rank that goes on in a world of the same size draws the numbers that it would have
drawn; in another world every rank goes on with the state of rank 0.
"""

import base64
import random
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

RandomState: TypeAlias = dict[str, Any]
"""As it is in JSON."""


def random_state() -> RandomState:
    """Of this process and its CUDA device."""
    name, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached_gaussian],
        "torch": _encoded(torch.get_rng_state()),
        "cuda": _encoded(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def restore_random_state(states: Sequence[RandomState], rank: int, world_size: int) -> None:
    """From those of all ranks of the learner that saved them, in order."""
    state = states[rank] if len(states) == world_size else states[0]
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_decoded(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decoded(state["cuda"]))


def _encoded(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decoded(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
