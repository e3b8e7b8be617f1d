"""The tool `calculator`: arithmetic with + - * / // % ** and brackets.

Invariant: a call ends in a moment, whatever the expression: nothing but numbers is evaluated, and
none grows beyond `_MAX_DIGITS`.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from actors.tools.tool import ToolError, ToolSession
from streamrl.config.generator import CallLimits, ToolSettings
from streamrl.errors import ConfigError
from streamrl.interfaces import ToolSchema

_MAX_LENGTH = 1000
_MAX_DIGITS = 1000
_BITS_PER_DIGIT = 3.33

_SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers with + - * / // % ** and brackets, such as (2+3)*4.",
                }
            },
            "required": ["expression"],
        },
    },
}

Number = int | float
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator:
    """The source of its one session, which has no state."""

    schemas = (_SCHEMA,)
    has_state = False

    def __init__(self, settings: ToolSettings, setting: str) -> None:
        if settings.kwargs:
            raise ConfigError(f"{setting}.kwargs: calculator has no arguments")
        self.limits: CallLimits = settings

    async def open(self) -> ToolSession:
        return self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        expression = arguments.get("expression")
        if not isinstance(expression, str) or len(arguments) > 1:
            raise ToolError('the one argument is "expression", a text')
        return _as_text(evaluate(expression))

    async def close(self) -> None:
        """There is nothing to close."""


def evaluate(expression: str) -> Number:
    """
    Raises:
        ToolError: it is no arithmetic, or has no result.
    """
    if len(expression) > _MAX_LENGTH:
        raise ToolError(
            f"the expression has {len(expression)} characters; {_MAX_LENGTH} are allowed"
        )
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolError(f"{expression!r} is no arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("the result is too large") from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            _check_size(op, a, b)
            return _real(_BINARY[type(op)](a, b))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
    raise ValueError(ast.dump(node))


def _check_size(op: ast.operator, a: Number, b: Number) -> None:
    """
    Raises:
        OverflowError: the result would have more digits than allowed.
    """
    if not isinstance(a, int) or not isinstance(b, int):
        return
    num_bits = a.bit_length() + b.bit_length()
    if isinstance(op, ast.Pow) and abs(a) > 1:
        num_bits = a.bit_length() * max(b, 1)
    if num_bits > _MAX_DIGITS * _BITS_PER_DIGIT:
        raise OverflowError


def _real(number: Any) -> Number:
    if isinstance(number, complex):
        raise ToolError("the result is no real number")
    result: Number = number
    return result


def _as_text(number: Number) -> str:
    """Whole numbers without a point, others with 12 digits.

    >>> _as_text(6 / 3), _as_text(1 / 3)
    ('2', '0.333333333333')
    """
    if isinstance(number, float) and number.is_integer() and abs(number) < 10**15:
        return str(int(number))
    return f"{number:.12g}" if isinstance(number, float) else str(number)
