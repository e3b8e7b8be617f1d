"""Rewards by unit tests: in the sandbox of this machine, or in a Sandbox Fusion service.

Invariant: code that fails, hangs or attacks scores 0; only a row without tests, or a sandbox that
does not answer, fails the group.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Literal

from msgspec import Struct

from actors.rewards.code.programs import Program, passes, program_of, solution_of
from actors.rewards.code.tests import read_tests
from actors.rewards.remote.requests import Service, ServiceSettings
from actors.sandbox.limits import SandboxLimits
from actors.sandbox.sandbox import Sandbox
from streamrl.config.numbers import Positive, Seconds
from streamrl.config.section import Section
from streamrl.errors import RolloutError
from streamrl.interfaces import Episode

Run = Callable[[Program], Awaitable[str | None]]
"""What the program printed; None unless it ended with success."""


class TestSettings(Section):
    """Which tests there are, and what passing some of them is worth."""

    tests_key: str = ""
    """Column of the tests; empty: those of input_output, public_test_cases, private_test_cases,
    test_list, test and tests that a row has, else its answer."""
    max_tests: Positive | None = None
    """Use the first ones only."""
    partial: bool = False
    """The reward is the share of tests that pass; else 1 if all do."""


class Code:
    """The reward `code`: Python in the sandbox of this machine."""

    class Settings(TestSettings):
        """Arguments of `code`."""

        time_s: Seconds = 10.0
        """Of a test."""
        memory_bytes: Positive = 512 * 2**20
        """Of a test's processes together."""
        num_programs: Positive | None = None
        """Tests at a time. Null: the cores of the machine."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        limits = SandboxLimits(time_s=settings.time_s, memory_bytes=settings.memory_bytes)
        num_cores = len(os.sched_getaffinity(0))
        self._sandbox = Sandbox(limits, max_concurrent=settings.num_programs or num_cores)

    async def score(self, episode: Episode) -> float:
        """Waits for the tests."""
        return await _share(episode, self._settings, self._run)

    async def _run(self, program: Program) -> str | None:
        result = await self._sandbox.run(program.code, stdin=program.stdin)
        return result.stdout if result.is_success else None


class RunResult(Struct, frozen=True):
    """Of a compilation or a run."""

    status: str = ""
    return_code: int | None = None
    stdout: str | None = None


class FusionAnswer(Struct, frozen=True):
    """What Sandbox Fusion answers to `run_code`."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    run_result: RunResult | None = None


class SandboxFusion:
    """The reward `sandbox_fusion`: code of many languages in a service elsewhere."""

    class Settings(TestSettings, ServiceSettings):
        """Arguments of `sandbox_fusion`."""

        language: str = "python"
        """As the service names it. Tests of functions and assertions are Python."""
        compile_timeout_s: Seconds = 10.0
        """Time to compile a program."""
        run_timeout_s: Seconds = 10.0
        """Time to run it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        url = settings.url.rstrip("/").removesuffix("/run_code")
        self._service = Service(settings.model_copy(update={"url": url}))

    async def score(self, episode: Episode) -> float:
        """Waits for the answers to the tests, one after the other."""
        return await _share(episode, self._settings, self._run)

    async def _run(self, program: Program) -> str | None:
        settings = self._settings
        request = {
            "code": program.code,
            "stdin": program.stdin,
            "language": settings.language,
            "compile_timeout": settings.compile_timeout_s,
            "run_timeout": settings.run_timeout_s,
            "files": {},
            "fetch_files": [],
        }
        answer = await self._service.post("/run_code", request, FusionAnswer)
        if answer.status == "SandboxError":
            raise RolloutError(f"{settings.url}: SandboxError: {answer.message[:200]}")
        result = answer.run_result
        is_success = answer.status == "Success" and result is not None and not result.return_code
        return result.stdout or "" if is_success and result is not None else None


async def _share(episode: Episode, settings: TestSettings, run: Run) -> float:
    """Waits for one test after the other, until the first failure unless the share counts.

    Raises:
        RolloutError: the row has no tests, or the sandbox does not answer.
    """
    tests = read_tests(episode, settings.tests_key)[: settings.max_tests]
    solution, num_passed = solution_of(episode.response), 0
    for test in tests:
        program = program_of(solution, test, _header(episode, solution))
        stdout = await run(program)
        is_passed = stdout is not None and passes(test, program, stdout)
        num_passed += is_passed
        if not settings.partial and not is_passed:
            break
    return num_passed / len(tests) if settings.partial else float(num_passed == len(tests))


def _header(episode: Episode, solution: str) -> str:
    """The head of HumanEval's function, where the solution is its body."""
    row = episode.prompt.row
    entry_point, prompt = row.get("entry_point"), row.get("prompt")
    is_body = entry_point and isinstance(prompt, str) and f"def {entry_point}" not in solution
    return str(prompt) if is_body else ""
