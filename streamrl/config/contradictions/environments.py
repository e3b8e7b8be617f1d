"""What does not fit together among `environments`, or between them and the rest.

Each function returns a sentence that names both settings, or None.
"""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig


def environment_twice(c: "RunConfig") -> str | None:
    is_set = c.generator.model_fields_set & {"environment", "environment_kwargs"}
    default = type(c.generator)()
    if not c.environments or all(getattr(c.generator, n) == getattr(default, n) for n in is_set):
        return None
    return (
        f"generator.{min(is_set)} and environments both say what answers the policy; leave out one "
        "of them"
    )


def one_name_for_two(c: "RunConfig") -> str | None:
    counts = Counter(entry.name for entry in c.environments)
    twice = next((name for name, count in counts.items() if count > 1), None)
    return (
        None if twice is None else f"environments: {counts[twice]} entries have the name {twice!r}"
    )


def agent_of_no_environment(c: "RunConfig") -> str | None:
    agent = c.generator.agent
    if agent == type(agent)() or any(entry.environment == "agent" for entry in c.entries):
        return None
    return (
        f"generator.agent.{min(agent.model_fields_set)} cannot act: no environment is agent; set "
        "generator.environment to agent, or leave it out"
    )


def limit_below_a_group(c: "RunConfig") -> str | None:
    for i, entry in enumerate(c.entries):
        if entry.max_groups == 0:
            return (
                f"environments.{i}.max_trajectories {entry.max_trajectories} is less than one "
                f"group of {entry.group_size}, so {entry.name} would never play"
            )
    return None


def limits_leave_prompts(c: "RunConfig") -> str | None:
    limits = [entry.max_groups for entry in c.entries]
    if None in limits or sum(n or 0 for n in limits) >= c.learner.groups_per_step:
        return None
    return (
        f"environments.max_trajectories allow {sum(n or 0 for n in limits)} groups of "
        f"learner.groups_per_step {c.learner.groups_per_step}: raise one, or leave it out"
    )


def parity_of_agents_alone(c: "RunConfig") -> str | None:
    is_measurable = any(entry.environment != "agent" for entry in c.entries)
    if not c.parity.is_required or is_measurable:
        return None
    name = "max_gap" if c.parity.max_gap is not None else "max_mean_gap"
    return (
        f"parity.{name} {getattr(c.parity, name)} cannot be compared with anything: every "
        "environment is agent, and agents play in the generators of a run alone; leave it out"
    )
