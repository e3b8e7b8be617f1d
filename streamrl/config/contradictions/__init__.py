"""Contradictions between the sections of a configuration.

A new one is a function in one of the files here and a line in `CONTRADICTIONS`; `RunConfig` calls
them all, so a person reads every sentence at once.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from streamrl.config.contradictions import (
    daemons,
    environments,
    episodes,
    sampling,
    sizes,
    training,
    validation,
)

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig

CONTRADICTIONS: tuple[Callable[["RunConfig"], str | None], ...] = (
    sizes.micro_batch_too_small,
    training.memory_setting_without_its_pass,
    sizes.more_updates_than_groups,
    sizes.model_len_too_short,
    sizes.min_tokens_above_max,
    sizes.greedy_siblings,
    sampling.mask_without_a_bound,
    sampling.divergence_from_another_policy,
    daemons.weights_too_rare,
    daemons.images_to_a_server,
    daemons.videos_to_vllm,
    daemons.nccl_without_gpu,
    daemons.shared_between_gpu_and_cpu,
    daemons.weights_without_keys,
    training.epochs_not_counted,
    training.warmup_longer_than_run,
    training.decay_within_warmup,
    training.warmup_without_a_critic,
    training.shaped_beside_a_greedy_reward,
    training.token_that_silences_its_sequence,
    sizes.alone_in_its_group,
    sizes.nothing_to_differ_from,
    sizes.finished_before_the_greedy_one,
    sizes.groups_too_large,
    daemons.one_address,
    training.evaluation_without_a_model,
    episodes.turns_of_a_single_turn,
    episodes.turn_deadline_after_that_of_the_episode,
    episodes.group_beyond_what_may_be_in_flight,
    episodes.truncated_of_nothing,
    validation.alike_samples,
    validation.never_published,
    validation.more_prompts_than_held_out,
    validation.bad_generator,
    validation.early_stop_without_validation,
    validation.best_without_validation,
    validation.agents_of_others,
    environments.environment_twice,
    environments.one_name_for_two,
    environments.agent_of_no_environment,
    environments.parity_of_agents_alone,
    environments.limit_below_a_group,
    environments.limits_leave_prompts,
)
