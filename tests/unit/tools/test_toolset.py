"""Calls are answered, whatever the tool does: errors, no answer, floods, unknown names."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from actors.tools import name_of
from actors.tools.toolset import EpisodeTools, Toolset, make_sources
from streamrl.config.generator import GeneratorSettings, ToolSettings
from streamrl.errors import ConfigError, RolloutError
from tests.isolation import find_isolation

OWN = '''
import asyncio, threading, time

def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: The first number.
        b: The second one.
    """
    return a + b

async def later(text: str) -> dict:
    """Answers later.

    Args:
        text: What to answer.
    """
    await asyncio.sleep(0.01)
    return {"text": text}

def wrapped(text: str) -> dict:
    """Answers later.

    Args:
        text: What to answer.
    """
    return later(text)

def fail(reason: str) -> str:
    """Fails.

    Args:
        reason: Why.
    """
    raise ValueError(reason)

def leave() -> str:
    """Ends the process."""
    exit()

async def leave_later() -> str:
    """Ends the process."""
    exit()

def keyed() -> dict:
    """Answers what is no JSON."""
    return {(1, 2): 3}

def half() -> str:
    """Answers half a character."""
    return "a\\ud83d"

def flood(count: int) -> str:
    """Answers at length.

    Args:
        count: Characters.
    """
    return "x" * count

async def hang() -> str:
    """Never answers."""
    await asyncio.Event().wait()

released = threading.Event()

def cancel() -> str:
    """Raises what cancels its caller."""
    raise asyncio.CancelledError("mine")

async def cancel_later() -> str:
    """Raises what cancels its caller."""
    raise asyncio.CancelledError("mine")

def block() -> str:
    """Never answers, and cannot be canceled."""
    released.wait(60)

def untyped(a):
    """Lacks a type."""

class Notes:
    def __init__(self, first="none"):
        self.notes = [first]
        self.is_closed = False

    async def call(self, note: str) -> str:
        """Keeps a note, and returns all.

        Args:
            note: The note.
        """
        self.notes.append(note)
        return ",".join(self.notes)

    async def close(self) -> None:
        closed.append(self.notes)

class Shared:
    @classmethod
    async def call(cls, note: str) -> str:
        return note

class Bare:
    """Has no method to call."""

closed = []
running = most = 0

async def counted() -> str:
    """Counts how many run at a time."""
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.01)
    running -= 1
    return str(most)
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / f"tools_{tmp_path.name[-12:].replace('-', '_')}.py"
    path.write_text(OWN)
    return path


def call(tool: str, /, **arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool, "arguments": arguments}}


async def open_tools(*tools: str | ToolSettings) -> EpisodeTools:
    return await Toolset(make_sources(GeneratorSettings(tools=tools))).open()  # type: ignore[arg-type]


async def answer(tools: EpisodeTools, tool: str, /, **arguments: object) -> str:
    message = await tools.answer(call(tool, **arguments))
    assert (message["role"], message["name"]) == ("tool", tool)
    return str(message["content"])


class TestFunctions:
    async def test_a_function_and_its_schema(self, own: Path) -> None:
        tools = await open_tools(f"{own}:add")
        (schema,) = tools.schemas
        assert schema["function"]["parameters"]["required"] == ["a"]
        assert schema["function"]["parameters"]["properties"]["b"] == {
            "type": "integer",
            "description": "The second one.",
        }
        assert await answer(tools, "add", a=2, b=3) == "5"

    @pytest.mark.parametrize("name", ["later", "wrapped"])
    async def test_a_coroutine_and_a_result_that_is_no_text(self, own: Path, name: str) -> None:
        tools = await open_tools(f"{own}:{name}")
        assert await answer(tools, name, text="schön") == '{"text": "schön"}'

    async def test_coroutines_take_no_threads(self, own: Path) -> None:
        tools = await open_tools(f"{own}:later")
        num_before = threading.active_count()
        await asyncio.gather(*(answer(tools, "later", text="x") for _ in range(32)))
        assert threading.active_count() == num_before

    async def test_a_class_keeps_the_state_of_one_episode(self, own: Path) -> None:
        settings = ToolSettings(tool=f"{own}:Notes", kwargs={"first": "one"})
        toolset = Toolset(make_sources(GeneratorSettings(tools=(settings,))))
        a, b = await toolset.open(), await toolset.open()
        assert await answer(a, "Notes", note="two") == "one,two"
        assert await answer(b, "Notes", note="three") == "one,three"
        assert await answer(a, "Notes", note="four") == "one,two,four"
        await a.close()
        import sys

        assert sys.modules[own.stem].closed == [["one", "two", "four"]]

    @pytest.mark.parametrize("suffix", ["yaml", "json"])
    async def test_a_schema_from_a_file(self, own: Path, suffix: str) -> None:
        schema = {"type": "function", "function": {"name": "plus", "description": "Adds."}}
        path = own.with_suffix(f".{suffix}")
        path.write_text(json.dumps({"tool_schema": schema}))
        tools = await open_tools(ToolSettings(tool=f"{own}:add", function_schema=path))
        assert tools.schemas[0]["function"]["name"] == "plus"
        assert await answer(tools, "plus", a=1) == "2"

    async def test_with_a_schema_any_method_is_called(self, own: Path) -> None:
        tools = await open_tools(ToolSettings(tool=f"{own}:Shared", function_schema={"name": "s"}))
        assert await answer(tools, "s", note="one") == "one"


class TestAnswers:
    async def test_an_exception(self, own: Path) -> None:
        tools = await open_tools(f"{own}:fail")
        text = await answer(tools, "fail", reason="no luck")
        assert text.startswith("error: fail: ValueError: no luck (tools_")

    @pytest.mark.parametrize("arguments", [{}, {"a": 1, "c": 2}, {"self": 1}])
    async def test_wrong_arguments(self, own: Path, arguments: dict[str, int]) -> None:
        tools = await open_tools(f"{own}:add")
        assert "argument" in await answer(tools, "add", **arguments)

    async def test_an_unknown_tool(self, own: Path) -> None:
        tools = await open_tools(f"{own}:add")
        assert await answer(tools, "ad") == "error: there is no tool 'ad'; did you mean 'add'?"
        assert tools.metrics["tool/num_unknown"] == 1

    @pytest.mark.parametrize("name", ["hang", "block"])
    async def test_no_answer(self, own: Path, name: str) -> None:
        tools = await open_tools(ToolSettings(tool=f"{own}:{name}", time_limit_s=0.05))
        assert await answer(tools, name) == "error: no answer within 0.05 s"
        assert tools.metrics[f"tool/{name}/num_errors"] == 1
        assert tools.metrics[f"tool/{name}/time_s"] >= 0.05
        import sys

        sys.modules[own.stem].released.set()

    async def test_functions_that_never_return_do_not_pile_up(
        self, own: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("actors.concurrency.MAX_HUNG", 2)
        tools = await open_tools(ToolSettings(tool=f"{own}:block", time_limit_s=0.02))
        answers = [await answer(tools, "block") for _ in range(3)]
        assert answers[2].startswith("error: block: 2 earlier calls have not returned")
        import sys

        sys.modules[own.stem].released.set()

    @pytest.mark.parametrize("name", ["cancel", "cancel_later"])
    async def test_a_tool_that_cancels_itself_is_answered_and_does_not_hang(
        self, own: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setattr("actors.concurrency.MAX_HUNG", 1)
        tools = await open_tools(ToolSettings(tool=f"{own}:{name}", time_limit_s=10))
        answers = [await answer(tools, name) for _ in range(2)]
        assert answers == [f"error: {name}: CancelledError: mine"] * 2

    async def test_a_flood_is_cut(self, own: Path) -> None:
        tools = await open_tools(ToolSettings(tool=f"{own}:flood", max_result_length=10))
        text = await answer(tools, "flood", count=10**6)
        assert text == "xxxxxxxxxx\n(cut: the first 10 of 1000000 characters)"

    async def test_what_ends_its_caller_or_is_no_text_is_an_answer(self, own: Path) -> None:
        names = ("leave", "leave_later", "keyed", "half")
        tools = await open_tools(*(f"{own}:{name}" for name in names))
        answers = [await answer(tools, name) for name in names]
        assert [text.split(" (")[0] for text in answers] == [
            "error: leave: SystemExit: None",
            "error: leave_later: SystemExit: None",
            "error: keyed: TypeError: keys must be str, int, float, bool or None, not tuple",
            "a?",
        ]

    async def test_so_many_calls_at_a_time(self, own: Path) -> None:
        tools = await open_tools(ToolSettings(tool=f"{own}:counted", max_concurrent=3))
        answers = await asyncio.gather(*(answer(tools, "counted") for _ in range(10)))
        assert max(map(int, answers)) == 3

    async def test_calls_are_counted_by_tool(self, own: Path) -> None:
        tools = await open_tools(f"{own}:add", f"{own}:fail")
        await answer(tools, "add", a=1)
        await answer(tools, "fail", reason="x")
        await answer(tools, "fail", reason="y")
        counts = {k: v for k, v in tools.metrics.items() if not k.endswith("time_s")}
        assert counts == {
            "tool/add/num_calls": 1,
            "tool/add/num_errors": 0,
            "tool/fail/num_calls": 2,
            "tool/fail/num_errors": 2,
            "tool/num_unknown": 0,
        }


@pytest.mark.skipif(find_isolation() is None, reason="no isolation on this machine")
class TestPython:
    async def test_output_and_errors(self) -> None:
        tools = await open_tools("python")
        assert await answer(tools, "python", code="print(6 * 7)") == "42\n"
        assert await answer(tools, "python", code="x = 1") == "(no output)"
        text = await answer(tools, "python", code="print('a'); 1 / 0")
        assert text.startswith("error: a\nTraceback")
        assert text.endswith("ZeroDivisionError: division by zero\nit ended with exit code 1")

    @pytest.mark.parametrize(
        ("code", "limit_s", "reason"),
        [
            ("while True: pass", 1.0, "it was ended after 1 s"),
            ("while True: print('x' * 999)", 20.0, "bytes"),
            ("x = bytearray(10**11)", 20.0, "MemoryError"),
            ("import socket; socket.create_connection(('127.0.0.1', 80))", 20.0, "PermissionError"),
            ("import os\nwhile True: os.fork()", 20.0, "ended"),
        ],
    )
    async def test_a_program_that_attacks_is_an_answer(
        self, code: str, limit_s: float, reason: str
    ) -> None:
        settings = ToolSettings(tool="python", time_limit_s=limit_s, max_result_length=100_000)
        tools = await open_tools(settings)
        text = await answer(tools, "python", code=code)
        assert text.startswith("error: ")
        assert reason in text
        assert tools.metrics["tool/python/num_errors"] == 1

    async def test_limits_of_its_own(self) -> None:
        settings = ToolSettings(tool="python", kwargs={"output_bytes": 5})
        text = await answer(await open_tools(settings), "python", code="print('1234567890')")
        assert text == "error: 12345\nit was ended after writing more than 5 bytes"


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"tool": "calculater"}, r"generator.tools.0.tool: was 'calculater'.*'calculator'"),
            ({"tool": "none.py:f"}, r"generator.tools.0.tool: there is no file none.py"),
            ({"tool": "OWN:ad"}, r"has no function 'ad'; did you mean 'add'"),
            ({"tool": "OWN:untyped"}, r"OWN:untyped: .*type hint"),
            ({"tool": "OWN:add", "kwargs": {"a": 1}}, r"tools.0.kwargs: was .* is a function"),
            ({"tool": "OWN:add", "function_schema": {"a": 1}}, r"function_schema: is no function"),
            ({"tool": "OWN:Bare", "function_schema": {"name": "f"}}, r"class has no method call"),
            (
                {"tool": "OWN:add", "function_schema": "x.yaml"},
                r"cannot read x\.yaml: No such",
            ),
            ({"tool": "OWN:add", "function_schema": "OWN.txt"}, r"OWN\.txt is not UTF-8"),
            ({"tool": "python", "kwargs": {"memory": 1}}, r"python has no limit 'memory'"),
            (
                {"tool": "python", "kwargs": {"isolation": "landlok"}},
                r"isolation was 'landlok'; did you mean 'landlock'",
            ),
            ({"tool": "python", "kwargs": {"num_files": -1}}, r"num_files was -1"),
            ({"tool": "calculator", "function_schema": {}}, r"calculator has its own"),
        ],
    )
    def test_what_is_no_tool(self, own: Path, settings: dict[str, Any], sentence: str) -> None:
        Path(f"{own}.txt").write_bytes("é".encode("latin-1"))
        given = {
            name: value.replace("OWN", str(own)) if isinstance(value, str) else value
            for name, value in settings.items()
        }
        generator = GeneratorSettings(tools=(given,))
        with pytest.raises(ConfigError, match=sentence.replace("OWN", str(own))):
            Toolset(make_sources(generator))

    def test_one_tool_twice(self) -> None:
        with pytest.raises(ValueError, match="tools: calculator stands there twice"):
            GeneratorSettings(tools=("calculator", "calculator"))  # type: ignore[arg-type]

    async def test_one_name_for_two(self, own: Path) -> None:
        schema = {"name": "calculator"}
        renamed = ToolSettings(tool=f"{own}:add", function_schema=schema)
        with pytest.raises(RolloutError, match="two tools are called 'calculator'"):
            await open_tools("calculator", renamed)

    async def test_a_class_that_cannot_be_made(self, own: Path) -> None:
        with pytest.raises(RolloutError, match=r"Notes: TypeError"):
            await open_tools(ToolSettings(tool=f"{own}:Notes", kwargs={"last": 1}))

    async def test_names_of_schemas(self) -> None:
        tools = await open_tools("calculator", "python")
        assert [name_of(schema) for schema in tools.schemas] == ["calculator", "python"]
