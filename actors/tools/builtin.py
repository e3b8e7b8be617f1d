"""The built-in tools `calculator` and `python`.

`calculator`: arithmetic with + - * / // % ** and brackets. Invariant: a call ends immediately,
whatever the expression: only numbers are evaluated, and none grows beyond `_MAX_DIGITS`.
"""

import ast
import operator
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from actors.sandbox.isolation import IsolationChoice, SandboxLimits
from actors.sandbox.sandbox import Sandbox, SandboxResult
from actors.tools import ToolError, ToolSession
from streamrl.config.generator import CallLimits, ToolSettings
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import ToolSchema

_MAX_LENGTH = 1000
_MAX_DIGITS = 1000
_BITS_PER_DIGIT = 3.33
_GRACE_S = 15.0

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


@dataclass
class BuiltIn:
    """A tool with one required argument, a text. It is also its own source and session, since no
    call depends on others. A call ends everything that it started, so there is nothing to close.
    """

    limits: CallLimits
    name: str
    description: str
    argument: tuple[str, str]
    """Name and description of the argument."""
    answer: Callable[[str], Awaitable[str]]
    has_state = False

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        argument, description = self.argument
        properties = {argument: {"type": "string", "description": description}}
        parameters = {"type": "object", "properties": properties, "required": [argument]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return ({"type": "function", "function": function},)

    async def open(self) -> ToolSession:
        return self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        argument, _ = self.argument
        text = arguments.get(argument)
        if not isinstance(text, str) or len(arguments) > 1:
            raise ToolError(f'the one argument is "{argument}", a text')
        return await self.answer(text)

    async def close(self) -> None: ...


def calculator(settings: ToolSettings, setting: str) -> BuiltIn:
    if settings.kwargs:
        raise ConfigError(f"{setting}.kwargs: calculator has no arguments")

    async def answer(expression: str) -> str:
        return _as_text(evaluate(expression))

    described = "Numbers with + - * / // % ** and brackets, such as (2+3)*4."
    return BuiltIn(
        settings,
        "calculator",
        "Evaluates an arithmetic expression.",
        ("expression", described),
        answer,
    )


def evaluate(expression: str) -> Number:
    """
    Raises:
        ToolError: the expression is no arithmetic, or has no result.
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
    """Write whole numbers without a decimal point, others with 12 digits.

    >>> _as_text(6 / 3), _as_text(1 / 3)
    ('2', '0.333333333333')
    """
    if isinstance(number, float) and number.is_integer() and abs(number) < 10**15:
        return str(int(number))
    return f"{number:.12g}" if isinstance(number, float) else str(number)


def python(settings: ToolSettings, setting: str) -> BuiltIn:
    """The tool `python`; each call runs in its own process.

    Raises:
        ConfigError: `kwargs` contains something other than limits of the sandbox and `isolation`.
    """
    limits = _limits(settings, setting)
    sandbox = Sandbox(
        limits, max_concurrent=settings.max_concurrent, isolation=_isolation(settings, setting)
    )

    async def answer(code: str) -> str:
        try:
            result = await sandbox.run(code)
        except OSError as error:
            raise ToolError(f"the program was not started: {error}") from error
        if not result.is_success:
            raise ToolError(_failure(result, limits))
        return result.stdout or "(no output)"

    return BuiltIn(
        # The sandbox ends a program at the limit and returns what it printed until then.
        settings.model_copy(update={"time_limit_s": settings.time_limit_s + _GRACE_S}),
        "python",
        "Runs a Python program and returns what it prints. No network; nothing is kept from one "
        "call to the next.",
        ("code", "The program."),
        answer,
    )


def _limits(settings: ToolSettings, setting: str) -> SandboxLimits:
    """The limits in `kwargs`, with the tool's time limit."""
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
    """What the program printed, and why it failed; of its errors only the end, which says most."""
    parts = (result.stdout.strip(), result.stderr.strip()[-2000:], result.failure(limits))
    return "\n".join(part for part in parts if part)
