"""Runs each group in the environment that plays its prompt."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from actors.concurrency import DeadlineError, closed_after, deadline
from actors.environments import environment_maker
from actors.episodes.group import GroupRunner, unbuffered_lease
from actors.gateway.agent import Agent
from actors.prompts import HeldOutStream, Stream
from actors.rendering.renderer import ChatRenderer, PromptTooLongError
from actors.rewards import make_reward
from actors.rewards.remote.teachers import RemoteTeachers
from actors.tools.toolset import Toolset, make_sources
from streamrl.config import RunConfig
from streamrl.config.environments import EnvironmentEntry
from streamrl.config.generator import OversampleSettings
from streamrl.errors import RolloutError
from streamrl.interfaces import Engine, EnvironmentContext
from streamrl.types import SamplingParams, TrajectoryGroup
from streamrl.user_code import attributed_to, is_user_code, load_user_code

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FirstGroups:
    """The results for the first prompts of a stream."""

    groups: tuple[TrajectoryGroup, ...]
    """In the order of the prompts, without those that are too long or failed."""
    num_too_long: int = 0
    """Prompts that training would drop."""
    num_failed: int = 0


@dataclass(frozen=True)
class MixedRunner:
    engine: Engine
    stream: Stream
    runners: Mapping[str, GroupRunner]

    def of(self, prompt_index: int) -> GroupRunner:
        """The runner for the environment that plays this prompt."""
        return self.runners[self.stream.entry_at(prompt_index).name]

    async def run_first(
        self,
        num_prompts: int,
        purpose: str,
        max_num_seqs: int,
        on_done: Callable[[], None] = lambda: None,
    ) -> FirstGroups:
        """Run a group for each of the first prompts, without a buffer, for validations and
        evaluations. Waits for the engine.

        Args:
            on_done: called as each prompt is finished.

        Raises:
            RolloutError: every prompt that is not too long failed.
        """
        # An episode's deadline counts from its start, so only as many wait in the engine as run
        # there.
        largest = max(runner.group_size for runner in self.runners.values())
        room = asyncio.Semaphore(math.ceil(2 * max_num_seqs / largest))

        async def outcome(prompt_index: int) -> TrajectoryGroup | RolloutError | None:
            async with room:
                try:
                    lease = unbuffered_lease(purpose, prompt_index)
                    return await self.of(prompt_index).run(lease)
                except PromptTooLongError:
                    return None
                except RolloutError as error:
                    return error
                finally:
                    on_done()

        outcomes = await asyncio.gather(*map(outcome, range(num_prompts)))
        groups = tuple(one for one in outcomes if isinstance(one, TrajectoryGroup))
        failures = [one for one in outcomes if isinstance(one, RolloutError)]
        if failures and not groups:
            raise failures[0]
        if failures:
            log.warning(
                "%d of %d prompts failed, the first: %s", len(failures), num_prompts, failures[0]
            )
        return FirstGroups(groups, outcomes.count(None), len(failures))

    def single(self) -> "MixedRunner":
        """The same runner, with one response per prompt, however it ends, and nothing else
        sampled."""
        runners = {
            name: replace(
                runner,
                group_size=1,
                oversample=OversampleSettings(),
                with_greedy_reward=False,
                teachers=None,
                settings=runner.settings.model_copy(update={"truncated": "keep"}),
            )
            for name, runner in self.runners.items()
        }
        return replace(self, runners=runners)

    def played_by(self, agents: Mapping[str, Agent]) -> "MixedRunner":
        """The same runner, with these agents instead of environments, by entry name."""
        played = {
            name: replace(self.runners[name], make_environment=partial(_same, agent))
            for name, agent in agents.items()
        }
        return replace(self, runners={**self.runners, **played})

    def changed(self, **fields: Any) -> "MixedRunner":
        """The same runner, with these fields changed in every group runner."""
        runners = {name: replace(runner, **fields) for name, runner in self.runners.items()}
        return replace(self, runners=runners)


def _same(agent: Agent) -> Agent:
    """One agent plays any number of episodes."""
    return agent


def make_runner(
    config: RunConfig, engine: Engine, renderer: ChatRenderer, stream: Stream
) -> MixedRunner:
    """The runner of groups, with the settings of `generator`.

    Raises:
        ConfigError: an environment, a tool or a reward cannot be made.
    """
    generator, distillation = config.generator, config.algorithm.distillation
    toolset, is_held_out = Toolset(make_sources(generator)), isinstance(stream, HeldOutStream)
    runners = {}
    for entry in stream.entries:
        teachers = None
        if distillation is not None and not is_held_out:
            teachers = RemoteTeachers(distillation, renderer)
        runners[entry.name] = GroupRunner(
            engine=engine,
            prompts=stream,
            renderer=renderer,
            make_environment=environment_maker(entry, toolset),
            environment=entry.name,
            reward=make_reward(entry.data),
            sampling=sampling_params(config),
            group_size=entry.group_size,
            oversample=generator.oversample,
            max_model_len=config.max_model_len,
            deadline_s=generator.group_deadline_s,
            run_seed=None if is_held_out else config.run.seed,
            teachers=teachers,
            with_greedy_reward=config.algorithm.needs_greedy_rewards,
            settings=generator.episode,
            open_group=partial(open_group, entry, deadline_s=generator.group_deadline_s),
        )
    return MixedRunner(engine, stream, runners)


def sampling_params(config: RunConfig) -> SamplingParams:
    generator = config.generator
    return SamplingParams(
        max_new_tokens=generator.max_new_tokens,
        min_new_tokens=generator.min_new_tokens,
        temperature=generator.temperature,
        top_p=generator.top_p,
        top_k=generator.top_k,
        stop_token_ids=generator.stop_token_ids,
        ignore_eos=generator.ignore_eos,
        keep_sampling_mask=generator.keep_sampling_mask,
        num_top_logprobs=config.num_top_logprobs,
        keep_routed_experts=config.algorithm.records_experts,
    )


@asynccontextmanager
async def open_group(
    entry: EnvironmentEntry, context: EnvironmentContext, *, deadline_s: float
) -> AsyncIterator[object]:
    """Open what a group's siblings share as `context.shared`, if the environment has a class method
    `open_group`, which takes the context and returns an asynchronous context manager. Waits until
    it is open, at most `generator.group_deadline_s`.

    Raises:
        RolloutError: it cannot be opened or closed.
    """
    name = entry.environment
    own = load_user_code(entry.setting, name) if is_user_code(name) else None
    opened = getattr(own, "open_group", None)
    if opened is None:
        yield None
        return
    attributed = partial(attributed_to, f"environment {name}: open_group", RolloutError)
    try:
        async with deadline(deadline_s):
            with attributed():
                manager = opened(context)
                shared = await manager.__aenter__()
    except DeadlineError as error:
        raise RolloutError(
            f"environment {name}: open_group has not opened within generator.group_deadline_s, "
            f"which is {deadline_s:g} s"
        ) from error

    async def close() -> None:
        with attributed():
            await manager.__aexit__(None, None, None)

    async with closed_after(close):
        yield shared
