"""ReMax subtracts a score, which shaping does not change."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.training import make_config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip", 1.0),
        ("norm_mean", "group"),
        ("norm_std", "batch"),
        ("format_penalty", 0.5),
        ("whiten", True),
    ],
)
def test_shaping_beside_remax_is_refused(name: str, value: Any):
    sentence = rf"remax subtracts the score .* algorithm\.reward\.{name} does not change"
    with pytest.raises(ValidationError, match=sentence):
        make_config(algorithm={"advantage": "remax", "reward": {name: value}})
    make_config(algorithm={"advantage": "rloo", "reward": {name: value}})


def test_remax_may_mask_what_was_cut():
    make_config(algorithm={"advantage": "remax", "reward": {"truncated": "mask"}})
