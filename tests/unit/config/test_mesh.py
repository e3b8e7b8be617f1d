"""`learner.mesh`: the sizes multiply to the number of ranks, or a sentence says which do not."""

import pytest
from pydantic import ValidationError

from streamrl.config.learner import MeshSettings
from streamrl.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "world_size", "sizes"),
    [
        ({}, 1, (1, 1, 1, 1)),
        ({}, 6, (1, 6, 1, 1)),
        ({"replicate": 2, "sequence": 2}, 8, (2, 2, 2, 1)),
        ({"shard": 2, "tensor": 4}, 8, (1, 2, 1, 4)),
    ],
)
def test_shard_takes_what_is_left(settings, world_size, sizes):
    assert MeshSettings(**settings).sizes(world_size) == sizes


@pytest.mark.parametrize(
    ("settings", "world_size", "words"),
    [
        ({"sequence": 4}, 2, "sequence 4 x tensor 1 is 4, which does not divide the 2 ranks"),
        ({"replicate": 3}, 4, "replicate 3 x sequence 1 x tensor 1 is 3, which does not divide"),
        ({"shard": 2}, 1, "x shard 2 is 2, but the learner has 1 ranks; shard -1 takes all"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_ranks_are_refused(settings, world_size, words):
    with pytest.raises(ConfigError, match=r"^learner\.mesh: ") as caught:
        MeshSettings(**settings).sizes(world_size)
    assert words in str(caught.value)


@pytest.mark.parametrize("shard", [0, -2])
def test_a_shard_is_a_size_or_minus_one(shard):
    with pytest.raises(ValidationError, match=f"was {shard}; it must be positive, or -1"):
        MeshSettings(shard=shard)
