"""geo_mean multiplies the weights of a sequence, so that a token of weight 0 would silence it."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.training import make_config

SILENCING: list[dict[str, Any]] = [
    {"rejection": [{"token_k1": 2.0}]},
    {"second_moment": 0.04},
    {"mode": "clip"},
]
HARMLESS: list[dict[str, Any]] = [
    {},
    {"veto_threshold": 1e-4},
    {"rejection": [{"seq_mean_k3": 0.1}]},
    {"mode": "clip", "level": "sequence"},
    {"mode": "clip", "apply": False},
]


@pytest.mark.parametrize("correction", SILENCING, ids=str)
def test_single_tokens_of_weight_0_are_refused(correction: dict[str, Any]):
    with pytest.raises(ValidationError, match=r"silence all of it; .*normalize_by=kept"):
        make_config(algorithm={"loss": "geo_mean", "rollout_is": correction})
    kept = {**correction, "normalize_by": "kept"}
    make_config(algorithm={"loss": "geo_mean", "rollout_is": kept})
    make_config(algorithm={"loss": "gspo", "rollout_is": correction})


@pytest.mark.parametrize("correction", HARMLESS, ids=str)
def test_whole_sequences_of_weight_0_are_not(correction: dict[str, Any]):
    make_config(algorithm={"loss": "geo_mean", "rollout_is": correction})


def test_a_bound_that_is_for_the_metrics_alone_is_not():
    clip = {"mode": "clip"}
    make_config(algorithm={"loss": "geo_mean", "proximal": "behavior", "rollout_is": clip})
