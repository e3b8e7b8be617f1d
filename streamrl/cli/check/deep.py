"""`streamrl check --deep`: samples and scores one group as a generator does, for a person to read.

Invariant: what was sampled is printed even if it could not be scored.
"""

import asyncio
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from transformers.utils.logging import disable_progress_bar

from actors.daemon import prepare
from actors.engines import make_engine
from actors.environments import require_rendering
from actors.episodes.group import unbuffered_lease
from actors.episodes.mixed_runner import MixedRunner, make_runner
from actors.gateway.agent import AGENT
from actors.make_model import make_model
from actors.prompts import open_stream
from actors.rendering.renderer import ChatRenderer, PromptTooLongError
from streamrl.algorithms.objective import require_algorithm
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import Episode, Reward, Score
from streamrl.types import TrajectoryGroup
from streamrl.user_code import user_traceback

_TRIED = 32


@dataclass
class RecordingReward:
    """A reward that remembers the episodes it was given."""

    reward: Reward
    episodes: Sequence[Episode] = ()

    async def score(self, episodes: Sequence[Episode]) -> Sequence[float | Score]:
        self.episodes = tuple(episodes)
        return await self.reward.score(episodes)


def sample_one_group(config: RunConfig) -> int:
    """Print the prompt, each response, its reward and why it ended.

    Raises:
        ConfigError: agents play all episodes; or no prompt fits.
        RolloutError: the group could not be sampled or scored.
    """
    disable_progress_bar()
    if all(entry.environment == AGENT for entry in config.entries):
        raise ConfigError(
            f"{config.entries[0].setting}: is agent, and --deep samples no episodes of agents, "
            "which play in the generators of a run alone"
        )
    if config.model.missing is not None:
        print(f"making {config.model.path} of model.recipe", file=sys.stderr)
        make_model(config)
    require_algorithm(config.algorithm)
    try:
        asyncio.run(_sample(config))
    except RolloutError as error:
        traceback.print_tb(user_traceback(error.__cause__))
        raise
    return 0


async def _sample(config: RunConfig) -> None:
    """Sample and score a group. Waits for the engine, the environment and the reward."""
    prepare(config)
    renderer = ChatRenderer.from_config(config)
    stream = open_stream(config, renderer)
    require_rendering(config.entries, renderer)
    generator = config.generator.reading_weights()
    config = config.model_copy(update={"generator": generator})
    engine = make_engine(config, seed=config.run.seed)
    try:
        mixed = make_runner(config, engine, renderer, stream)
        prompt_index = _first_that_fits(mixed)
        prompt = stream[prompt_index]
        token_ids = renderer.encode(prompt)
        origin = f" ({prompt.origin})" if prompt.origin else ""
        print(f"prompt{origin}, {len(token_ids)} tokens\n{_indented(renderer.decode(token_ids))}")
        print(f"answer\n{_indented(prompt.answer)}")
        reward = RecordingReward(mixed.of(prompt_index).reward)
        runner = replace(mixed.of(prompt_index), reward=reward, with_greedy_reward=False)
        try:
            group = await runner.run(unbuffered_lease("check", prompt_index))
        except RolloutError:
            for number, episode in enumerate(reward.episodes, 1):
                print(f"\nresponse {number}, {episode.finish_reason}")
                print(_indented(episode.response))
            raise
        print("\n".join(_of_group(group, renderer)))
    finally:
        await engine.close()


def _first_that_fits(mixed: MixedRunner) -> int:
    for prompt_index in range(_TRIED):
        if mixed.stream.entry_at(prompt_index).environment == AGENT:
            continue
        runner = mixed.of(prompt_index)
        try:
            runner.renderer.encode(runner.prompts[prompt_index])
        except PromptTooLongError:
            continue
        return prompt_index
    raise ConfigError(f"data.max_prompt_length: none of the first {_TRIED} prompts fits")


def _of_group(group: TrajectoryGroup, renderer: ChatRenderer) -> Iterator[str]:
    """The lines about a group; for an episode of several turns, everything after the prompt."""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    for number, trajectory in enumerate(group.trajectories, 1):
        first = int(trajectory.response_mask.argmax())
        turns = f", {len(trajectory.turns)} turns" if len(trajectory.turns) > 1 else ""
        yield (
            f"\nresponse {number}, reward {trajectory.reward:g}, {trajectory.finish_reason}, "
            f"{trajectory.num_response_tokens} tokens{turns}"
        )
        yield _indented(renderer.decode(trajectory.token_ids[first:].tolist()))
    yield f"\nmean reward {sum(rewards) / len(rewards):.3g} of {len(rewards)} responses"
    if len(set(rewards)) == 1:
        yield "all rewards of this group are equal: it gives no signal where siblings are compared"
    cut = sum(trajectory.finish_reason.is_truncated for trajectory in group.trajectories)
    if cut:
        yield f"{cut} of {len(rewards)} responses were cut by a limit (generator.max_new_tokens)"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
