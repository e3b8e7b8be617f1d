"""Contradictions between the sections of a configuration.

A new one is a function in one of the files here and a line in `CONTRADICTIONS`; `RunConfig` calls
them all, so a person reads every sentence at once.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from streamrl.config.contradictions import daemons, environments, sizes, training

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig

CONTRADICTIONS: tuple[Callable[["RunConfig"], str | None], ...] = (
    sizes.micro_batch_too_small,
    training.memory_setting_without_its_pass,
    sizes.more_updates_than_groups,
    sizes.model_len_too_short,
    sizes.min_tokens_above_max,
    sizes.greedy_siblings,
    daemons.weights_too_rare,
    daemons.nccl_without_gpu,
    daemons.shared_between_gpu_and_cpu,
    daemons.weights_without_keys,
    training.epochs_not_counted,
    training.warmup_longer_than_run,
    training.decay_within_warmup,
    training.warmup_without_a_critic,
    sizes.alone_in_its_group,
    sizes.nothing_to_differ_from,
    sizes.finished_before_the_greedy_one,
    sizes.groups_too_large,
    daemons.one_address,
    training.evaluation_without_a_model,
    environments.environment_twice,
    environments.one_name_for_two,
    environments.agent_of_no_environment,
    environments.limit_below_a_group,
    environments.limits_leave_prompts,
)
