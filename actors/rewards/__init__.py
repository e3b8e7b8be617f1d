"""Rewards: built-in ones and a user's own Python file, one or several with weights.

A built-in is a function of one of the forms of `actors.rewards.forms` and a line in `BUILT_IN`;
where it keeps something between calls, a class and a line in `STATEFUL`. A user's own is named as
PATH.py:NAME:

    # rewards.py
    def score(episode):
        return float(episode.response.strip() == episode.prompt.answer)
"""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from actors.rewards import builtin
from actors.rewards.calls.isolated import Processes, WorkerSetup
from actors.rewards.calls.limits import OutputLimit, RewardLimits
from actors.rewards.checks import check_built_in, check_call, checked, prefixed
from actors.rewards.forms import BoundFunction
from actors.rewards.tool_calls import tool_calls
from actors.rewards.weighted_sum import AtOnce, FunctionReward, Rewards
from streamrl.config.data import DataSettings, RewardSettings
from streamrl.errors import ConfigError, did_you_mean
from streamrl.extras import missing
from streamrl.interfaces import Reward
from streamrl.placement.hosts import num_cores
from streamrl.user_code import is_user_code, load_user_code

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
    fields = [("data.reward", "data.reward_kwargs")]
    if data.rewards:
        places = [f"data.rewards[{i}]" for i in range(len(data.rewards))]
        fields = [(f"{place}.reward", f"{place}.kwargs") for place in places]
    made = (_made(s, *of, key) for s, of in zip(data.all_rewards, fields, strict=True))
    return Rewards(tuple(made), key)


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
        check_built_in(kwargs_field, name, function, kwargs)
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
