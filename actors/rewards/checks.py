"""Whether a reward can be made of its settings: each refusal is one sentence that names the field.

Called when a generator starts and by `streamrl check`, which also asks of the first rows whether a
built-in reward can score them at all.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError

from actors.rewards.builtin import expression_to_match, number_to_match, text_to_match
from actors.rewards.forms import OWN, OWN_GROUP, TRL, VERL_NAMES, form_of
from actors.rewards.tool_calls import calls_to_match
from streamrl.config.data import RewardSettings
from streamrl.config.loading.explain import explain
from streamrl.config.section import Section
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt
from streamrl.user_code import check_kwargs

Settings = TypeVar("Settings", bound=Section)


def check_call(field: str, name: str, own: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Whether a user's own can be called in its form with these arguments."""
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


def check_built_in(
    field: str, name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]
) -> None:
    """Whether a built-in function takes these arguments, and has all that it needs."""
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


def checked(field: str, section: type[Settings], kwargs: Mapping[str, Any]) -> Settings:
    """The arguments of a reward as its section of settings."""
    try:
        return section.model_validate(kwargs)
    except ValidationError as error:
        sentences = str(explain(error, section)).splitlines()
        raise ConfigError("\n".join(f"{field}.{sentence}" for sentence in sentences)) from error


@contextmanager
def prefixed(field: str) -> Iterator[None]:
    """Around what refuses a setting below the field by its own name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{field}.{error}") from error


def _arguments(
    own: Callable[..., Any], signature: inspect.Signature, kwargs: Mapping[str, Any]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Arguments of a call in its form; the columns of TRL's are what rows have."""
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
    """Asks what the reward itself asks before it scores.

    Args:
        kwargs_field: the setting that has its arguments.

    Raises:
        RolloutError: whatever a response is, its group would fail.
        ConfigError: the arguments are not those of the reward.
    """
    match settings.reward:
        case "exact_match":
            text_to_match(prompt)
        case "numeric_answer":
            number_to_match(prompt)
        case "math":
            expression_to_match(prompt)
        case "tool_calls":
            calls_to_match(prompt)
        case "code" | "sandbox_fusion":
            # Not above: other rewards do without a sandbox.
            from actors.rewards.code.reward import Code, SandboxFusion, check_tests

            is_local = settings.reward == "code"
            section = Code.Settings if is_local else SandboxFusion.Settings
            arguments = checked(kwargs_field, section, settings.kwargs)
            check_tests(arguments, prompt, is_local=is_local)
