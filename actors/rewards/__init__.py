"""Rewards: built-in ones and a user's own Python file, one or several with weights.

A built-in is a function of one of the forms of `actors.rewards.forms` and a line in `BUILT_IN`;
where it keeps something between calls, a class and a line in `STATEFUL`. A user's own is named as
PATH.py:NAME:

    # rewards.py
    def score(episode):
        return float(episode.response.strip() == episode.prompt.answer)

`FunctionReward`: a function as a reward, called off the event loop within its limits, its answer
checked. Invariant: a function that fails or answers nonsense costs its group (RolloutError, counted
as `failed`), never the daemon.

`Rewards`: those of a run. Those that apply to a row score its group, and their weighted sum is the
reward of an episode. Invariant: the value of each reward is recorded as `reward/NAME`, whatever its
weight; an error carries the name of the reward that failed. What the first reward that reads
something in the response has read is what was extracted from it.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from actors.concurrency import together
from actors.rewards import builtin
from actors.rewards.calls.isolated import Processes, WorkerSetup
from actors.rewards.calls.limits import OutputLimit, RewardLimits
from actors.rewards.checks import check_call, check_kwargs, checked, prefixed
from actors.rewards.forms import BoundFunction
from actors.rewards.tool_calls import tool_calls
from actors.threads import Threads
from streamrl.config.data import DataSettings, RewardSettings
from streamrl.errors import ConfigError, RewardError, RolloutError, did_you_mean
from streamrl.extras import missing
from streamrl.interfaces import Episode, Reward, Score
from streamrl.placement.hosts import num_cores
from streamrl.samples.record import shortened_answer
from streamrl.user_code import is_user_code, load_user_code

Scores = Sequence[Score | None]
AtOnce = Callable[[Episode], float | Score | None]
SUPPRESSED = "suppressed_bytes"
"""Metric of what a reward printed beyond its limit, where there was any."""


class FunctionReward:
    """A function of one of the forms of `actors.rewards.forms`, async or not.

    Args:
        processes: where it runs, instead of threads.
        at_once: takes microseconds, and says what the function would, or None where it cannot.
            It is called here, since to call the function elsewhere takes longer.
        label: under which its values are recorded.
        data_sources: those of the rows that it scores; all if there is none.
    """

    def __init__(
        self,
        bound: BoundFunction,
        limits: RewardLimits | None = None,
        output: OutputLimit | None = None,
        processes: Processes | None = None,
        at_once: AtOnce | None = None,
        *,
        label: str = "",
        weight: float = 1.0,
        data_sources: tuple[str, ...] = (),
    ) -> None:
        self.label, self.weight, self.data_sources = label, weight, data_sources
        self._bound = bound
        self._at_once = at_once
        self._limits = limits or RewardLimits(bound.title)
        self._output = output or OutputLimit(bound.title)
        self._processes = processes
        self._threads = Threads(bound.title, "; with isolation: process they would be")

    async def score(self, episodes: Sequence[Episode]) -> Scores:
        """One for each episode; None where the reward does not apply. Waits for the calls: one for
        the group, or one for each episode at the same time, unless it is scored at once.

        Raises:
            RewardError: the group cannot be scored.
        """
        try:
            known = [None if self._at_once is None else self._at_once(e) for e in episodes]
            rest = [e for e, value in zip(episodes, known, strict=True) if value is None]
            called = iter(await self._by_calls(rest) if rest else ())
        except RolloutError as error:
            raise RewardError(str(error), self.label) from error.__cause__
        return [next(called) if value is None else Score.of(value) for value in known]

    async def _by_calls(self, episodes: Sequence[Episode]) -> Scores:
        takes_group = self._bound.form.takes_group
        groups = [episodes] if takes_group else [[episode] for episode in episodes]
        try:
            each = await together(self._limits.call(*self._caller(group)) for group in groups)
        finally:
            num_suppressed = self._output.take_suppressed()
        scores = [score for scores in each for score in scores]
        return [_with_suppressed(score, num_suppressed / len(scores)) for score in scores]

    def _caller(
        self, episodes: Sequence[Episode]
    ) -> tuple[Callable[[], Awaitable[Scores]], Callable[[], Awaitable[None]] | None]:
        """What calls the function, and what has to be there before."""
        if self._processes is not None:
            return partial(self._processes.run, episodes), self._processes.prepare
        if self._bound.is_async:
            return partial(self._await, episodes), None
        return partial(self._threads.run, partial(self._call, episodes)), None

    async def _await(self, episodes: Sequence[Episode]) -> Scores:
        with self._output.applied():
            return await self._bound.wait_for_score(episodes)

    def _call(self, episodes: Sequence[Episode]) -> Scores:
        """In a thread."""
        with self._output.applied():
            try:
                return self._bound.score(episodes)
            except RolloutError as error:
                if "signal only works in main thread" not in str(error):
                    raise
                raise RolloutError(
                    f"{error}; what sets signals, as time limits do, needs isolation: process"
                ) from error.__cause__


def _with_suppressed(score: Score | None, num_bytes: float) -> Score | None:
    if score is None or not num_bytes:
        return score
    return replace(score, metrics={**score.metrics, SUPPRESSED: num_bytes})


@dataclass(frozen=True)
class Rewards:
    """A `streamrl.interfaces.Reward`; `data_source_key` is the column of a row's data source."""

    rewards: tuple[FunctionReward, ...]
    data_source_key: str = "data_source"

    async def score(self, episodes: Sequence[Episode]) -> list[Score]:
        """Waits for all rewards, which score at the same time.

        Raises:
            RewardError: one of them cannot score the group.
            RolloutError: none applies to the row, or to one of the episodes.
        """
        applying = self._applying(episodes[0])
        scored = await together(reward.score(episodes) for reward in applying)
        return [self._sum(applying, scores) for scores in zip(*scored, strict=True)]

    def _applying(self, episode: Episode) -> list[FunctionReward]:
        source = str(episode.prompt.row.get(self.data_source_key, ""))
        found = [r for r in self.rewards if not r.data_sources or source in r.data_sources]
        if not found:
            names = ", ".join(reward.label for reward in self.rewards)
            raise RolloutError(
                f"data.rewards: none of {names} has the {self.data_source_key} {source!r} of the "
                "row in its data_source"
            )
        return found

    def _sum(self, rewards: Sequence[FunctionReward], scores: Sequence[Score | None]) -> Score:
        known = [(r, s) for r, s in zip(rewards, scores, strict=True) if s is not None]
        if not known:
            names = " and ".join(reward.label for reward in rewards)
            raise RewardError(
                f"reward {names} applies to no episode of the row: it returned None for one; a "
                "reward of the run must return a number",
                rewards[0].label,
            )
        metrics = {f"reward/{r.label}": s.reward for r, s in known}
        further = {
            f"reward/{r.label}/{name}": value for r, s in known for name, value in s.metrics.items()
        }
        extracted = next((s.extracted for _, s in known if s.extracted is not None), None)
        total = sum(r.weight * s.reward for r, s in known)
        if not math.isfinite(total):
            terms = " + ".join(f"{r.weight:g} * {s.reward:g} of {r.label}" for r, s in known)
            raise RewardError(
                f"the reward {terms} is {total:g}; it must be finite", known[0][0].label
            )
        return Score(total, {**metrics, **further}, extracted and shortened_answer(extracted))


BUILT_IN: Mapping[str, Callable[..., Any]] = {
    "environment": builtin.environment,
    "exact_match": builtin.exact_match,
    "format": builtin.format_of_tags,
    "length": builtin.length,
    "numeric_answer": builtin.numeric_answer,
    "regex": builtin.regex,
    "task": builtin.task,
    "tool_calls": tool_calls,
}
QUICK = frozenset({"environment", "exact_match", "length", "numeric_answer"})
"""Of `BUILT_IN`: without `pattern`, whose search may take any time, they take microseconds."""
AT_ONCE: Mapping[str, AtOnce] = {"math": builtin.math_at_once}
"""Of others, what decides the most of their calls as quickly."""
STATEFUL: Mapping[str, str] = {
    "code": "actors.rewards.code.reward:Code",
    "http": "actors.rewards.remote.http:HttpReward",
    "judge": "actors.rewards.remote.judge:Judge",
    "reward_model": "actors.rewards.reward_model:RewardModel",
    "sandbox_fusion": "actors.rewards.code.reward:SandboxFusion",
}
"""MODULE:CLASS by name. The class has `Settings`, a section of its arguments, is made of them, and
has an async `score(episode)` or `score(episodes)`."""
ISOLATED: Mapping[str, str] = {"math": "actors.rewards.math_answer:math"}
"""MODULE:FUNCTION by name, of those that run in processes of their own."""
_MAX_CONCURRENT, _REMOTE_RETRIES = 64, 3


def make_reward(data: DataSettings) -> Reward:
    """The rewards of `data.rewards`, or the one of `data.reward` with `data.reward_kwargs`.

    Raises:
        ConfigError: one of them cannot be made.
    """
    key = data.data_source_key
    if not data.rewards:
        return make_reward_of(data.all_rewards[0], "data.reward", "data.reward_kwargs", key)
    made = (
        _made(settings, f"data.rewards[{i}].reward", f"data.rewards[{i}].kwargs", key)
        for i, settings in enumerate(data.rewards)
    )
    return Rewards(tuple(made), key)


def make_reward_of(
    settings: RewardSettings,
    field: str,
    kwargs_field: str | None = None,
    data_source_key: str = "data_source",
) -> Reward:
    """The reward of one entry.

    Args:
        field: the setting that names it, with which errors begin.
        kwargs_field: the one that has its arguments; `kwargs` of `field` where it is a section.
    """
    kwargs_field = kwargs_field or f"{field}.kwargs"
    made = _made(settings, field, kwargs_field, data_source_key)
    return Rewards((made,), data_source_key)


def function_of(name: str, field: str = "reward") -> Callable[..., Any]:
    """The function of a user's own or of `BUILT_IN`.

    Raises:
        ConfigError: there is none, or its package is not installed.
    """
    if is_user_code(name):
        return load_user_code(field, name)
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in ISOLATED:
        try:
            function: Callable[..., Any] = resolve_name(ISOLATED[name])
        except ImportError as error:
            raise missing(f"{field}: {name}", error) from error
        return function
    hint = did_you_mean(name, [*BUILT_IN, *ISOLATED, *STATEFUL])
    raise ConfigError(f"{field}: was {name!r}; PATH.py:FUNCTION or {hint}")


def _made(
    settings: RewardSettings, field: str, kwargs_field: str, data_source_key: str
) -> FunctionReward:
    function, kwargs = _function(settings, field, kwargs_field)
    name = f"{settings.name} ({settings.reward})" if settings.name else settings.reward
    bound = BoundFunction(function, kwargs, name, data_source_key)
    output, processes = OutputLimit(bound.title), None
    is_isolated = _is_isolated(settings, bound, field)
    if is_isolated:
        setup = WorkerSetup(settings.reward, kwargs, name, data_source_key)
        processes = Processes(setup, output)
    at_once = AT_ONCE.get(settings.reward)
    if settings.reward in QUICK and "pattern" not in kwargs and not is_isolated:
        at_once = bound.score_one
    limits = _limits(settings, bound, is_isolated)
    return FunctionReward(
        bound,
        limits,
        output,
        processes,
        at_once,
        label=settings.label,
        weight=settings.weight,
        data_sources=settings.data_source,
    )


def _function(
    settings: RewardSettings, field: str, kwargs_field: str
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """What scores, with the arguments of a call."""
    name, kwargs = settings.reward, settings.kwargs
    if name in STATEFUL:
        made = resolve_name(STATEFUL[name])
        settings_of_it = checked(kwargs_field, made.Settings, kwargs)
        with prefixed(kwargs_field):
            return made(settings_of_it).score, {}
    function = function_of(name, field)
    if is_user_code(name):
        check_call(field, name, function, kwargs)
    else:
        check_kwargs(kwargs_field, name, function, kwargs)
    return function, kwargs


def _is_isolated(settings: RewardSettings, bound: BoundFunction, field: str) -> bool:
    if settings.isolation is not None and bound.is_async:
        raise ConfigError(
            f"{field}: isolation has no effect on {settings.reward}, which is async; a call of it "
            "is canceled at its time-out"
        )
    if settings.isolation is None:
        return settings.reward in ISOLATED
    return settings.isolation == "process"


def _limits(settings: RewardSettings, bound: BoundFunction, is_isolated: bool) -> RewardLimits:
    max_concurrent = num_cores() if is_isolated else _MAX_CONCURRENT
    retries = _REMOTE_RETRIES if "url" in settings.kwargs and settings.reward in STATEFUL else 0
    return RewardLimits(
        bound.title,
        timeout_s=settings.timeout_s,
        max_concurrent=settings.max_concurrent or max_concurrent,
        retries=retries if settings.retries is None else settings.retries,
    )
