"""What is recorded of the tokens that were not sampled, and who reads it.

Each function returns a sentence that names both settings, or None.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig


def mask_without_a_bound(c: "RunConfig") -> str | None:
    if not c.generator.keep_sampling_mask or c.generator.top_k:
        return None
    return (
        "generator.keep_sampling_mask records the tokens that each token was sampled among, and "
        "generator.top_k 0 sets no bound to them: set top_k, such as 512, which top_p alone seldom "
        "exceeds"
    )


def divergence_from_another_policy(c: "RunConfig") -> str | None:
    if not c.num_top_logprobs or c.algorithm.proximal == "behavior":
        return None
    return (
        f"algorithm.loss_config.divergence_topk {c.num_top_logprobs} compares with the candidates "
        f"that the behavior policy recorded, and algorithm.proximal {c.algorithm.proximal} has "
        "another policy: set it to behavior"
    )
