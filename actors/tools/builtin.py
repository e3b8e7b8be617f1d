"""The built-in tools `calculator` and `python`.

`Calculator`: arithmetic with + - * / // % ** and brackets. Invariant: a call ends in a moment,
whatever the expression: nothing but numbers is evaluated, and none grows beyond `_MAX_DIGITS`.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, get_args

from actors.sandbox.isolation import IsolationChoice
from actors.sandbox.limits import SandboxLimits, SandboxResult
from actors.sandbox.sandbox import Sandbox
from actors.tools import ToolError, ToolSession
from streamrl.config.generator import CallLimits, ToolSettings
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import ToolSchema

_MAX_LENGTH = 1000
_MAX_DIGITS = 1000
_BITS_PER_DIGIT = 3.33

_CALCULATOR: ToolSchema = {
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

    schemas = (_CALCULATOR,)
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


_GRACE_S = 15.0
_PYTHON: ToolSchema = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and returns what it prints. No network; nothing is "
        "kept from one call to the next.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


class PythonTool:
    """The source of its one session: each call is a process of its own.

    Raises:
        ConfigError: `kwargs` has more than limits of the sandbox and `isolation`.
    """

    schemas = (_PYTHON,)
    has_state = False

    def __init__(self, settings: ToolSettings, setting: str) -> None:
        # The sandbox ends a program at the limit and says what it printed until then.
        late = settings.time_limit_s + _GRACE_S
        self.limits: CallLimits = settings.model_copy(update={"time_limit_s": late})
        self._limits = _limits(settings, setting)
        self._sandbox = Sandbox(
            self._limits,
            max_concurrent=settings.max_concurrent,
            isolation=_isolation(settings, setting),
        )

    async def open(self) -> ToolSession:
        return self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str) or len(arguments) > 1:
            raise ToolError('the one argument is "code", a text')
        try:
            result = await self._sandbox.run(code)
        except OSError as error:
            raise ToolError(f"the program was not started: {error}") from error
        if not result.is_success:
            raise ToolError(_failure(result, self._limits))
        return result.stdout or "(no output)"

    async def close(self) -> None:
        """Every call has ended all that it started."""


def _limits(settings: ToolSettings, setting: str) -> SandboxLimits:
    """Those of `kwargs`, with the tool's time."""
    known = {field.name for field in fields(SandboxLimits)} - {"time_s"}
    limits = {name: value for name, value in settings.kwargs.items() if name != "isolation"}
    for name, value in limits.items():
        if name not in known:
            hint = did_you_mean(name, {*known, "isolation"})
            raise ConfigError(f"{setting}.kwargs: python has no limit {name!r}; {hint}")
        if not isinstance(value, int) or value <= 0:
            raise ConfigError(f"{setting}.kwargs: {name} was {value!r}; a whole number above 0")
    return replace(SandboxLimits(time_s=settings.time_limit_s), **limits)


def _isolation(settings: ToolSettings, setting: str) -> IsolationChoice:
    known: tuple[IsolationChoice, ...] = get_args(IsolationChoice)
    wanted = settings.kwargs.get("isolation", "auto")
    if wanted not in known:
        hint = did_you_mean(str(wanted), known)
        raise ConfigError(f"{setting}.kwargs: isolation was {wanted!r}; {hint}")
    return known[known.index(wanted)]


def _failure(result: SandboxResult, limits: SandboxLimits) -> str:
    """What the program printed, and why it did not end well; the end of its errors says most."""
    parts = (result.stdout.strip(), result.stderr.strip()[-2000:], result.failure(limits))
    return "\n".join(part for part in parts if part)
