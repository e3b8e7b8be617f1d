"""What does not fit into what: lengths, batches, groups.

Each function returns a sentence that names both settings, or None.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig

_COMPARE_SIBLINGS = ("grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "opob")


def micro_batch_too_small(c: "RunConfig") -> str | None:
    longest = c.data.max_prompt_length + c.generator.max_new_tokens
    by_role = c.learner.max_tokens_per_forward_pass.model_dump(exclude_none=True)
    limits = {f"learner.max_tokens_per_forward_pass.{role}": n for role, n in by_role.items()}
    limits |= {"learner.max_tokens_per_micro_batch": c.learner.max_tokens_per_micro_batch}
    setting = min(limits, key=limits.__getitem__)
    if longest <= limits[setting]:
        return None
    return (
        f"{setting} {limits[setting]} cannot hold one trajectory: data.max_prompt_length "
        f"{c.data.max_prompt_length} + generator.max_new_tokens {c.generator.max_new_tokens} = "
        f"{longest}"
    )


def more_updates_than_groups(c: "RunConfig") -> str | None:
    if c.learner.updates_per_batch <= c.learner.groups_per_step:
        return None
    return (
        f"learner.updates_per_batch {c.learner.updates_per_batch} is more than "
        f"learner.groups_per_step {c.learner.groups_per_step}: each update trains whole groups"
    )


def model_len_too_short(c: "RunConfig") -> str | None:
    longest = c.data.max_prompt_length + c.generator.max_new_tokens
    if c.max_model_len >= longest:
        return None
    return (
        f"generator.max_model_len {c.max_model_len} is shorter than data.max_prompt_length "
        f"{c.data.max_prompt_length} + generator.max_new_tokens {c.generator.max_new_tokens}"
    )


def min_tokens_above_max(c: "RunConfig") -> str | None:
    if c.generator.min_new_tokens <= c.generator.max_new_tokens:
        return None
    return (
        f"generator.min_new_tokens {c.generator.min_new_tokens} is above generator.max_new_tokens "
        f"{c.generator.max_new_tokens}"
    )


def groups_too_large(c: "RunConfig") -> str | None:
    smallest = c.group_bytes(1 + max(1, c.generator.min_new_tokens))
    if smallest <= c.buffer.max_group_bytes:
        return None
    return (
        f"buffer.max_group_bytes {c.buffer.max_group_bytes} refuses every group: with "
        f"groups of {c.max_group_size} the smallest has {smallest} bytes, and one "
        f"of generator.max_model_len {c.max_model_len} tokens {c.group_bytes(c.max_model_len)}"
    )


def greedy_siblings(c: "RunConfig") -> str | None:
    if c.generator.temperature > 0:
        return None
    return (
        f"generator.temperature 0 makes the generator.group_size {c.generator.group_size} siblings "
        "of a prompt alike and leaves nothing to learn from; it must be > 0 for training"
    )


def nothing_to_differ_from(c: "RunConfig") -> str | None:
    if c.algorithm.dynamic_sampling is None or c.generator.num_siblings > 1:
        return None
    return (
        "algorithm.dynamic_sampling leaves out groups whose siblings are alike, and with "
        "generator.group_size 1 every group would be; use a group, or null"
    )


def finished_before_the_greedy_one(c: "RunConfig") -> str | None:
    oversample = c.generator.oversample
    is_cut = oversample.num_siblings > 0 and oversample.keep == "first_finished"
    if not is_cut or not c.algorithm.needs_greedy_rewards:
        return None
    return (
        f"algorithm.advantage {c.algorithm.advantage} needs a greedy completion of each prompt, "
        "which generator.oversample.keep first_finished may cancel; use each_reward"
    )


def alone_in_its_group(c: "RunConfig") -> str | None:
    alone = [entry for entry in c.entries if entry.group_size == 1]
    if not alone or c.algorithm.advantage not in _COMPARE_SIBLINGS:
        return None
    setting = alone[0].group_size_setting
    return (
        f"algorithm.advantage {c.algorithm.advantage} compares siblings, and with "
        f"{setting} 1 there are none; use reinforce_plus_plus, or a group"
    )
