"""The tool `python`: a program of the policy's, run in the sandbox; see `actors.sandbox`."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_args

from actors.sandbox.isolation import IsolationChoice
from actors.sandbox.limits import SandboxLimits, SandboxResult
from actors.sandbox.sandbox import Sandbox
from actors.tools.tool import ToolError, ToolSession
from streamrl.config.generator import CallLimits, ToolSettings
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import ToolSchema

_GRACE_S = 15.0
_SCHEMA: ToolSchema = {
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

    schemas = (_SCHEMA,)
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
