"""The calculator: right, and done in a moment with whatever a policy writes."""

import ast
import operator
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from actors.tools import ToolError
from actors.tools.builtin import BuiltIn, calculator as make, evaluate
from streamrl.config.generator import ToolSettings
from streamrl.errors import ConfigError


@pytest.fixture
def calculator() -> BuiltIn:
    return make(ToolSettings(tool="calculator"), "generator.tools.0")


class TestCalls:
    @pytest.mark.parametrize(
        ("expression", "result"),
        [
            ("37*48", "1776"),
            ("(2+3)*4 - -1", "21"),
            ("6/3", "2"),
            ("1/3", "0.333333333333"),
            ("7//2 + 7%4", "6"),
            ("2**10", "1024"),
            (" 0.5 * 4 ", "2"),
        ],
    )
    async def test_arithmetic(self, calculator: BuiltIn, expression: str, result: str) -> None:
        assert await calculator.call("calculator", {"expression": expression}) == result

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ({"expression": "1/0"}, "division by zero"),
            ({"expression": "9**9**9"}, "too large"),
            ({"expression": "10.0**400"}, "too large"),
            ({"expression": "(-8)**0.5"}, "no real number"),
            ({"expression": "9" * 900 + "*" + "9" * 99 + "*99"}, "1003 characters"),
            ({"expression": "(" * 500 + ")" * 500}, "is no arithmetic"),
            ({"expression": "__import__('os').system('true')"}, "is no arithmetic"),
            ({"expression": "True + 1"}, "is no arithmetic"),
            ({"expression": ""}, "is no arithmetic"),
            ({"expression": 5}, 'the one argument is "expression"'),
            ({}, 'the one argument is "expression"'),
        ],
    )
    async def test_what_has_no_result(
        self, calculator: BuiltIn, arguments: dict[str, object], reason: str
    ) -> None:
        with pytest.raises(ToolError, match=reason):
            await calculator.call("calculator", arguments)

    @given(st.text(alphabet="0123456789+-*/%() .e", max_size=60))
    def test_any_text_ends_with_a_number_or_a_refusal(self, text: str) -> None:
        with suppress(ToolError):
            assert isinstance(evaluate(text), int | float)

    @given(st.integers(-999, 999), st.sampled_from("+-*"), st.integers(0, 999))
    def test_integers_are_exact(self, a: int, sign: str, b: int) -> None:
        operation = {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign]
        assert evaluate(f"({a}){sign}{b}") == operation(a, b)
        assert ast.literal_eval(str(evaluate(f"{b}"))) == b

    def test_arguments_of_its_own_are_refused(self) -> None:
        settings = ToolSettings(tool="calculator", kwargs={"digits": 3})
        with pytest.raises(ConfigError, match=r"generator.tools.0.kwargs: calculator has no"):
            make(settings, "generator.tools.0")
