"""Limits of episodes that nothing would reach, or that nothing fits into.

Each function returns a sentence that names both settings, or None.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig


def turns_of_a_single_turn(c: "RunConfig") -> str | None:
    max_turns = c.generator.episode.max_turns
    if max_turns is None or any(entry.environment != "single_turn" for entry in c.entries):
        return None
    return (
        f"generator.episode.max_turns {max_turns} cannot act: generator.environment single_turn "
        "has one turn; name another environment, or leave it out"
    )


def turn_deadline_after_that_of_the_episode(c: "RunConfig") -> str | None:
    turn_s, episode_s = c.generator.episode.turn_deadline_s, c.generator.group_deadline_s
    if turn_s is None or turn_s < episode_s:
        return None
    return (
        f"generator.episode.turn_deadline_s {turn_s:g} cannot act: generator.group_deadline_s "
        f"{episode_s:g} ends the whole episode before; it must be below that"
    )


def group_beyond_what_may_be_in_flight(c: "RunConfig") -> str | None:
    most = c.generator.episode.max_in_flight
    num_episodes = c.max_num_episodes
    if most is None or most >= num_episodes:
        return None
    return (
        f"generator.episode.max_in_flight {most} cannot hold one group, which is sampled as "
        f"{num_episodes} episodes (group_size {c.max_group_size} and what is "
        "sampled beside them)"
    )


def truncated_of_nothing(c: "RunConfig") -> str | None:
    shaping = c.algorithm.reward.truncated
    if c.generator.episode.truncated == "keep" or shaping == "train":
        return None
    return (
        f"algorithm.reward.truncated {shaping} cannot act: generator.episode.truncated drop leaves "
        "out every truncated trajectory; set one or the other"
    )
