"""Rewards: built-in ones and a user's own Python file, one or several with weights.

A built-in reward is a function of one of the forms of `actors.rewards.forms` and a line in
`BUILT_IN`; one that keeps something between calls is a class and a line in `STATEFUL`. A user's own
is named PATH.py:NAME:

    # rewards.py
    def score(episode):
        return float(episode.response.strip() == episode.prompt.answer)
"""

import inspect
import re
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any, TypeVar

from pydantic import ValidationError

from actors.rewards import builtin
from actors.rewards.calls.isolated import WorkerSetup
from actors.rewards.calls.limits import RewardLimits
from actors.rewards.forms import OWN, OWN_GROUP, TRL, VERL_NAMES, BoundFunction, form_of
from actors.rewards.tool_calls import calls_to_match, tool_calls
from actors.rewards.weighted_sum import AtOnce, FunctionReward, Rewards
from streamrl.config.data import DataSettings, RewardSettings
from streamrl.config.loading.explain import explain
from streamrl.config.section import Section
from streamrl.errors import ConfigError, did_you_mean, prefixed
from streamrl.extras import missing
from streamrl.interfaces import Prompt, Reward
from streamrl.placement.hosts import num_cores
from streamrl.user_code import check_kwargs, is_user_code, load_user_code

Settings = TypeVar("Settings", bound=Section)

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
"""Built-in rewards that take microseconds, unless they have a `pattern`, whose search may take any
time."""
AT_ONCE: Mapping[str, AtOnce] = {"math": builtin.math_at_once}
"""Functions that quickly decide most calls of slower rewards, by the reward's name."""
STATEFUL: Mapping[str, str] = {
    "code": "actors.rewards.code.reward:Code",
    "http": "actors.rewards.remote.http:HttpReward",
    "judge": "actors.rewards.remote.judge:Judge",
    "reward_model": "actors.rewards.reward_model:RewardModel",
    "sandbox_fusion": "actors.rewards.code.reward:SandboxFusion",
}
"""MODULE:CLASS by name. The class has a section `Settings` with its arguments, is created from one,
and has an async `score(episode)` or `score(episodes)`."""
ISOLATED: Mapping[str, str] = {"math": "actors.rewards.math_answer:math"}
"""MODULE:FUNCTION by name, for rewards that run in their own processes."""
_GOLDS: Mapping[str, Callable[[Prompt], object]] = {
    "exact_match": builtin.text_to_match,
    "math": builtin.expression_to_match,
    "numeric_answer": builtin.number_to_match,
    "tool_calls": calls_to_match,
}
"""What each reward reads from a row before it scores."""
_MAX_CONCURRENT, _REMOTE_RETRIES = 64, 3


def make_reward(data: DataSettings) -> Reward:
    """Make the rewards in `data.rewards`, or the one in `data.reward` with `data.reward_kwargs`.

    Raises:
        ConfigError: one of them cannot be created.
    """
    key = data.data_source_key
    fields = [("data.reward", "data.reward_kwargs")]
    if data.rewards:
        places = [f"data.rewards[{i}]" for i in range(len(data.rewards))]
        fields = [(f"{place}.reward", f"{place}.kwargs") for place in places]
    made = (_made(s, *of, key) for s, of in zip(data.all_rewards, fields, strict=True))
    return Rewards(tuple(made), key)


def function_of(name: str, field: str = "reward") -> Callable[..., Any]:
    """Return the reward function: a user's own, or one of `BUILT_IN` or `ISOLATED`.

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
    is_isolated = _is_isolated(settings, bound, field)
    at_once = AT_ONCE.get(settings.reward)
    if settings.reward in QUICK and "pattern" not in kwargs and not is_isolated:
        at_once = bound.score_one
    setup = WorkerSetup(settings.reward, kwargs, name, data_source_key)
    return FunctionReward(
        bound,
        _limits(settings, bound, is_isolated),
        setup if is_isolated else None,
        at_once,
        label=settings.label,
        weight=settings.weight,
        data_sources=settings.data_source,
    )


def _function(
    settings: RewardSettings, field: str, kwargs_field: str
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """The scoring function, with the arguments of a call."""
    name, kwargs = settings.reward, settings.kwargs
    if name in STATEFUL:
        made = resolve_name(STATEFUL[name])
        section = _checked(kwargs_field, made.Settings, kwargs)
        with prefixed(kwargs_field):
            return made(section).score, {}
    function = function_of(name, field)
    if is_user_code(name):
        _check_call(field, name, function, kwargs)
    else:
        _check_built_in(kwargs_field, name, function, kwargs)
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


def _check_call(field: str, name: str, own: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Check that a user's function can be called in its form with these arguments."""
    signature = inspect.signature(own)
    args, named = _arguments(own, signature, kwargs)
    try:
        signature.bind(*args, **named, **kwargs)
    except TypeError as error:
        what = "an episode (or a group's episodes)" if args else "the arguments of its form"
        raise ConfigError(
            f"{field}: {name} takes {signature}, but is called with {what} and the arguments "
            f"{dict(kwargs)}: {error}"
        ) from error


def _check_built_in(
    field: str, name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]
) -> None:
    """Check that a built-in function accepts these arguments and gets all that it requires."""
    check_kwargs(field, name, function, kwargs, num_given=1)
    for key, parameter in inspect.signature(function).parameters.items():
        given = kwargs.get(key)
        if given in ("", [], ()) and given != parameter.default:
            raise ConfigError(
                f"{field}.{key}: was {given!r}, which every empty response would have; "
                f"{name} needs one that is not empty"
            )
    if "pattern" in kwargs:
        try:
            re.compile(str(kwargs["pattern"]))
        except re.error as error:
            raise ConfigError(
                f"{field}: pattern {kwargs['pattern']!r} is no regular expression: {error}"
            ) from error


def _checked(field: str, section: type[Settings], kwargs: Mapping[str, Any]) -> Settings:
    """The arguments of a reward, as its section of settings."""
    try:
        return section.model_validate(kwargs)
    except ValidationError as error:
        sentences = str(explain(error, section)).splitlines()
        raise ConfigError("\n".join(f"{field}.{sentence}" for sentence in sentences)) from error


def _arguments(
    own: Callable[..., Any], signature: inspect.Signature, kwargs: Mapping[str, Any]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of a call in this form; TRL's form also gets the rows' columns."""
    form, known = form_of(own), set(VERL_NAMES) | {f"{name}s" for name in VERL_NAMES}
    if form in (OWN, OWN_GROUP):
        return (object(),), {}
    if form is TRL:
        known = {
            p.name
            for p in signature.parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "trainer_state"
        }
    taken = [name for name in signature.parameters if name in known and name not in kwargs]
    return (), dict.fromkeys(taken, object())


def check_row(settings: RewardSettings, prompt: Prompt, kwargs_field: str) -> None:
    """Check a row as the reward does before it scores.

    Args:
        kwargs_field: the setting that holds its arguments.

    Raises:
        RolloutError: its group would fail whatever the response.
        ConfigError: the arguments are not those of the reward.
    """
    if read := _GOLDS.get(settings.reward):
        read(prompt)
    elif settings.reward in ("code", "sandbox_fusion"):
        # Not imported above: other rewards need no sandbox.
        from actors.rewards.code.reward import check_tests

        made = resolve_name(STATEFUL[settings.reward])
        arguments = _checked(kwargs_field, made.Settings, settings.kwargs)
        check_tests(arguments, prompt, is_local=settings.reward == "code")
