"""A reference in half precision sees the same positions as the policy."""

import torch

from learners.policy.sharding import compute_in
from tests.training import make_micro_batch, make_network


def test_a_reference_computes_what_the_policy_computes_in_the_same_dtype():
    policy = make_network(dtype=torch.bfloat16, max_position_embeddings=2048)
    reference = make_network(max_position_embeddings=2048).requires_grad_(False)
    compute_in(reference, torch.bfloat16)
    micro_batch = make_micro_batch((1500, 3))
    with torch.no_grad():
        mine, theirs = policy(micro_batch).logprobs, reference(micro_batch).logprobs
    assert torch.equal(mine, theirs)
