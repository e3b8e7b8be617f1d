"""docs/rewards.md has every built-in reward and every argument of it."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from actors.rewards import BUILT_IN, ISOLATED, STATEFUL

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


@pytest.mark.parametrize("name", [*BUILT_IN, *ISOLATED, *STATEFUL])
def test_a_built_in_reward_and_its_arguments_stand_in_the_page(name):
    assert f"`{name}`" in PAGE
    if name in STATEFUL:
        module, _, kind = STATEFUL[name].partition(":")
        arguments = list(getattr(import_module(module), kind).Settings.model_fields)
    else:
        module, _, kind = ISOLATED.get(name, "").partition(":")
        function = BUILT_IN.get(name) or getattr(import_module(module), kind)
        arguments = list(inspect.signature(function).parameters)[1:]
    assert [argument for argument in arguments if f"`{argument}`" not in PAGE] == []
