"""Statuses and stats as metrics, under the names that families.csv knows.

Pure. What a generator says of itself is `self/...`; what the buffer knows of it `generator/ID/...`.
"""

import time

from streamrl.config import RunConfig
from streamrl.metrics import books_metrics, buffer_metrics
from streamrl.types import (
    BufferStats,
    GeneratorStatus,
    LearnerActivity,
    LearnerStatus,
    ValidatorStatus,
)


def of_buffer(stats: BufferStats) -> dict[str, float]:
    return {
        **books_metrics(stats.books),
        **buffer_metrics(stats),
        "buffer/policy_version": stats.policy_version,
        "buffer/max_staleness_versions": stats.max_staleness,
        "buffer/is_refusing": bool(stats.refusal),
        "buffer/is_draining": stats.draining,
        "buffer/is_finished": stats.finished,
        "buffer/due_wait_s": stats.wait_due_s,
    }


def of_learner(status: LearnerStatus, config: RunConfig) -> dict[str, float]:
    return {
        **{
            f"learner/activity/{activity.name.lower()}": activity is status.activity
            for activity in LearnerActivity
        },
        "learner/activity_s": status.activity_s,
        "learner/policy_version": status.policy_version,
        "learner/max_steps": config.run.max_steps,
        "learner/max_staleness_versions": config.buffer.largest_staleness,
        "learner/stalls": status.num_stalls,
        "learner/cannot_save": bool(status.unsaved),
        "learner/checkpoint_every_steps": config.learner.checkpoint.every,
        "weights/num_receivers": status.num_receivers,
        "weights/num_behind": len(status.behind),
    }


def of_generator(status: GeneratorStatus) -> dict[str, float]:
    return {
        "self/policy_version": status.policy_version,
        "self/num_tokens": status.num_tokens,
        "self/tokens_per_s": status.tokens_per_s,
        "self/num_active": status.num_active,
        "self/num_waiting": status.num_waiting,
        "self/leases": len(status.lease_ids),
        "self/oldest_lease_s": max(status.lease_ages_s, default=0.0),
        "self/pause_s": status.pause_s,
        "self/busy_s": status.busy_s,
        "self/uptime_s": status.uptime_s,
        **({} if status.kv_usage is None else {"self/kv_usage_frac": status.kv_usage}),
        "self/is_catching_up": status.is_catching_up,
        "self/num_lost_agents": status.num_lost_agents,
        **{f"self/reward/{f.reward}/num_failures": f.num_failures for f in status.failed_rewards},
        "self/last_heartbeat_timestamp_seconds": time.time(),
    }


def of_validator(status: ValidatorStatus, num_tokens: float) -> dict[str, float]:
    """`num_tokens` are those that its engine has sampled."""
    return {
        "validator/is_busy": status.is_busy,
        "validator/prompts": status.num_prompts,
        "validator/prompts_done": status.num_done,
        "validator/next_policy_version": status.next_version,
        "validator/sampled_tokens": num_tokens,
    }
