"""The recorded cases of the originals, and their padded layout turned flat."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.sequences import Sequences

Case = dict[str, Any]

_FILE = Path(__file__).parents[2] / "data" / "golden_sample.json"


@cache
def all_cases() -> tuple[Case, ...]:
    return tuple(json.loads(_FILE.read_text())["cases"])


def cases(source: str) -> tuple[Case, ...]:
    """Every recorded case of one source, such as `policy_loss_new`."""
    return tuple(case for case in all_cases() if case["source"] == source)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Padded:
    """One case's [B, T] inputs; `flat` picks the tokens under the mask, row by row."""

    def __init__(self, case: Case, mask: str = "response_mask") -> None:
        self.inputs = case["in"]
        self.mask = torch.tensor(self.inputs[mask]).bool()
        self.sequences = Sequences.from_lengths(self.mask.sum(1))
        self.width = self.mask.shape[1]

    def __len__(self) -> int:
        return len(self.mask)

    def flat(self, name: str) -> Tensor:
        return self.flatten(self.inputs[name])

    def flatten(self, matrix: Any) -> Tensor:
        return tensor(matrix)[self.mask]


def close(ours: Any, recorded: Any, tolerance: float = 1e-6) -> bool:
    """Agreement to 1e-6, relative where numbers are larger than 1."""
    return torch.allclose(
        torch.as_tensor(ours, dtype=torch.float64),
        torch.as_tensor(recorded, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


def assert_agrees(
    case: Case, pairs: dict[str, tuple[Any, Any]], deviations: dict[str, dict[str, str]]
) -> None:
    """Every field agrees, except those listed for this case, which must really differ.

    Args:
        pairs: field to (ours, recorded).
        deviations: case id to field to the reason why it differs.
    """
    listed = deviations.get(case["id"], {})
    assert listed.keys() <= pairs.keys(), f"{case['id']}: deviations of fields never compared"
    wrong = {
        name: (ours, recorded)
        for name, (ours, recorded) in pairs.items()
        if close(ours, recorded) == (name in listed)
    }
    assert not wrong, f"{case['id']}: {wrong}"
