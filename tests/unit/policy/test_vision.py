"""A vision-language model in the learner: packed with images as by transformers' own forward."""

import pytest
import torch

from learners.policy import packing_check
from learners.policy.network import Network
from learners.policy.packing_check import choose_packing
from streamrl.vision.tower import VisionTower
from tests.tiny_vision import IMAGE, make_qwen, reader

ROUNDING = 1e-4


def network(seed: int = 0, *, is_trained: bool = True) -> Network:
    model = make_qwen(seed)
    return Network(
        model, temperature=1.0, tower=VisionTower(model, reader(), is_trained=is_trained)
    )


@pytest.mark.parametrize("packed", [True, False])
def test_log_probabilities_with_images_are_those_of_transformers(packed):
    own = network()
    micro_batch = packing_check._random_micro_batch(own)
    assert sum(map(len, micro_batch.media)) > 3
    assert int((micro_batch.token_ids == IMAGE).sum()) > 30
    with torch.no_grad():
        expected = packing_check._plain_logprobs(own, micro_batch)
        own.run_packed(packed)
        computed = own(micro_batch).logprobs
    assert float((computed - expected).abs().max()) < ROUNDING


def test_the_check_at_start_runs_it_packed():
    own = network()
    choose_packing(own)
    assert own.is_packed
