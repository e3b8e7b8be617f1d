"""Code that the policy wrote, scored by the tests of a row in a real sandbox."""

import asyncio
import json
from dataclasses import replace

import pytest

from actors.rewards import make_reward
from actors.rewards.code.reward import (
    outcome_of,
    program_of,
    same_output,
    same_value,
    solution_of,
)
from actors.rewards.code.tests import CallTest
from streamrl.config.data import DataSettings
from streamrl.errors import RewardError
from tests.isolation import find_isolation
from tests.unit.rewards.episodes import episode

needs_sandbox = pytest.mark.skipif(find_isolation() is None, reason="no isolation here")


async def score(response: str, answer: str = "", *, kwargs: dict | None = None, **row: object):
    entry = {"reward": "code", "kwargs": {"time_s": 20.0, **(kwargs or {})}}
    reward = make_reward(DataSettings.model_validate({"source": "addition", "rewards": [entry]}))
    (found,) = await reward.score([episode(response, answer, **row)])
    return found.reward


def block(code: str) -> str:
    return f"Here:\n```python\n{code}\n```\nDone."


PAIRS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}
CASES = json.dumps([{"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional"}])
HUMAN_EVAL = {
    "prompt": "def add(a, b):\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
ADD = "def add(a, b):\n    return a + b"
PLUS = "import operator as o\n\ndef plus(a, b):\n    return o.add(a, b)\n\n"


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "answer", "row"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", PAIRS, {}),
        ("a, b = map(int, input().split())\nprint(a + b)", "", {"input_output": PAIRS}),
        (ADD, "", {"input_output": json.dumps(CALLS)}),
        (ADD, "", {"tests": CALLS}),
        (
            "class Solution:\n    def put(self, a: List[int], b):\n        return (*a, b)",
            "",
            {"public_test_cases": CASES, "metadata": '{"func_name": "put"}'},
        ),
        (
            ADD,
            "",
            {"test_list": ["assert add(1, 2) == 3", "assert add(0, x) == 9"]}
            | {"test_setup_code": "x = 9"},
        ),
        (ADD, "", HUMAN_EVAL),
        ("    return a + b", "", HUMAN_EVAL),
        (ADD, "assert add(2, 2) == 4", {}),
    ],
)
async def test_a_right_solution_passes_the_tests_of_each_form(code, answer, row):
    assert await score(block(code), answer, **row) == 1.0
    wrong = code.replace("a + b", "a - b").replace("(*a, b)", "a")
    assert await score(block(wrong), answer, **row) == 0.0


@needs_sandbox
@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    pass",
        "import sys; sys.exit(0)",
        "print('\\n')\nimport os; os._exit(0)",
        "def add(a, b):\n    return a + b\nimport atexit\nraise SystemExit(0)",
        "x = bytearray(10**10)",
        "no python",
    ],
)
async def test_code_that_fails_or_hangs_or_leaves_early_scores_nothing(code):
    assert await score(block(code), "assert add(2, 2) == 4", kwargs={"time_s": 2.0}) == 0.0


@needs_sandbox
@pytest.mark.parametrize("line", ["no JSON", "5", '"3"'])
async def test_lines_in_place_of_the_outputs_gain_nothing(line: str):
    code = f"""
import os
a, b = map(int, input().split())
for number in filter(lambda number: int(number) > 2, os.listdir(f"/proc/{{os.getppid()}}/fd")):
    try:
        print({line!r}, file=open(f"/proc/{{os.getppid()}}/fd/{{number}}", "w"))
    except OSError:
        continue
print(a + b)
"""
    assert await score(block(code), PAIRS) == 0.0


@needs_sandbox
async def test_the_share_of_tests_counts_where_it_is_asked_for():
    code, row = "def add(a, b):\n    return 3", {"tests": CALLS}
    assert await score(block(code), **row) == 0.0
    assert await score(block(code), **row, kwargs={"partial": True}) == 0.5
    assert await score(block(code), **row, kwargs={"max_tests": 1}) == 1.0


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"tests": []}, "has no tests"),
        ({"tests": {"inputs": ["1"]}}, "tests was {'inputs': .*: it has no 'outputs'"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "it has 1 inputs and 0 outputs"),
        ({"tests": 7}, "the row: tests was 7: it is no test"),
    ],
)
async def test_rows_without_tests_fail_their_group(row, sentence):
    with pytest.raises(RewardError, match=f"reward code: .*{sentence}"):
        await score("x", **row, kwargs={"tests_key": "tests"})


@pytest.mark.parametrize("result", ["[" * 100_000, "9" * 5000, "{", ""])
def test_a_result_that_cannot_be_read_is_wrong(result: str):
    test = CallTest("add", (1, 2), 3)
    program = program_of("", test, "mark")
    assert outcome_of(test, program, "\nmark3").num_passed == 1
    assert outcome_of(test, program, f"\nmark{result}").num_passed == 0


@pytest.mark.parametrize(
    ("returned", "expected", "is_same"),
    [
        ([0.1 + 0.2, {"a": 1.0}], [0.3, {"a": 1}], True),
        ([0.31], [0.3], False),
        (10**18 + 1, 10**18, False),
        ([1, 2], [1, 2, 3], False),
        ("0.3", 0.3, False),
        (0.1 + 0.2 - 0.3, 0.0, True),
        (1e-5, 0.0, False),
        (0.166667, 0.166666666667, True),
        (3, [3], True),
    ],
)
def test_what_a_function_returns_is_compared_by_value(returned, expected, is_same):
    assert same_value(returned, expected) is is_same


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "row"),
    [
        (
            'from __future__ import annotations\n\ndef add(a: int, b: "int") -> no_such_name:\n'
            "    return a + b",
            {"tests": CALLS},
        ),
        (
            '"""from __future__ import annotations"""\nfrom __future__ import (\n    annotations,\n'
            ")\nx: no_such_name = 3\nprint(x)",
            {"tests": {"inputs": [""], "outputs": ["3"]}},
        ),
        ("print(10**5000)", {"tests": {"inputs": [""], "outputs": [f"1{'0' * 5000}"]}}),
        (
            f"{ADD}\nif __name__ == '__main__':\n    print(add(int(input()), int(input())))",
            {"tests": CALLS},
        ),
        (f"class Solution:\n    pass\n{ADD}", {"tests": CALLS}),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
            "class Pair:\n    x: int\n    y: int\ndef add(a, b):\n    return Pair(a, a + b).y",
            {"tests": CALLS},
        ),
        (
            "import numpy\ndef add(a, b):\n    return numpy.array([a, b]).sum()",
            {"tests": CALLS},
        ),
        (
            "def add(a, b):\n    return plus(a, b)",
            {**HUMAN_EVAL, "prompt": f"{PLUS}def add(a, b):\n"},
        ),
        (ADD, {**HUMAN_EVAL, "prompt": "def plus(a: Own):\n    return a\n\ndef add(a, b):\n"}),
        ("def f(n):\n    return 10**n", {"test": "assert len(str(f(5000))) == 5001"}),
    ],
)
async def test_right_programs_that_our_own_lines_must_not_break(code, row):
    assert await score(block(code), **row) == 1.0


ENDLESS = "n = input()\nwhile n == '':\n    pass\nprint(1)"
ONE_PROCESS_EACH = [
    ("print(len(globals().get('seen', '')) + 1)\nseen = 'x'", 1.0),
    ("import json\njson.seen = getattr(json, 'seen', 0) + 1\nprint(json.seen)", 1.0),
    ("open('a', 'x')\nprint(1)", 1.0),
    ("import atexit\natexit.register(print, 1)", 1.0),
    ("import threading, time\nthreading.Timer(0.2, print, [1]).start()", 1.0),
    ("import os\nprint(1)\nos._exit(0)", 1.0),
    ("import sys\nprint(1)\nsys.exit('wrong')", 0.0),
    ("import sys\nprint(1)\nsys.exit()", 1.0),
    ("import sys\nprint(1)\nsys.stdout.close()", 1.0),
    ("if len(input()) == 0:\n    print(1)", 1 / 3),
    ("print(1)\nraise ValueError", 0.0),
    ("if __name__ == '__main__':\n    print(open(0).read().count('x'))", 1 / 3),
    ("import sys\nprint(sum(line == 'x\\n' for line in sys.stdin))", 1 / 3),
    (ENDLESS, 2 / 3),
    ("import os, signal\nn = input()\nprint(1)\nif n:\n    os.kill(os.getppid(), 9)", 1 / 3),
    ("n = input()\nprint(1)\nif n:\n    print('y' * 10**6)", 1 / 3),
    ("import os, time\nif not os.fork():\n    time.sleep(60)\nprint(1)", 1.0),
    ("import os\nprint(1)\nif os.fork():\n    os._exit(0)\nwhile True:\n    pass", 1.0),
]


@needs_sandbox
@pytest.mark.parametrize(("code", "share"), ONE_PROCESS_EACH)
async def test_each_input_of_a_program_has_a_process_of_its_own(code, share):
    """Which differ here: the first is empty, the second has one line, the third two."""
    row = {"tests": {"inputs": ["\n", "x\n", "x\nx\n"], "outputs": ["1"] * 3}}
    limit = {"time_s": 5.0 if code is ENDLESS else 120.0}
    assert await score(block(code), **row, kwargs={"partial": True, **limit}) == share
    if share not in (0.0, 1.0):
        assert await score(block(code), **row, kwargs=limit) == 0.0


@needs_sandbox
async def test_a_program_may_have_nothing_to_print_for_one_of_its_inputs():
    row = {"tests": {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["1", "", "3"]}}
    code = "n = int(input())\nif n != 2:\n    print(n)"
    assert await score(block(code), **row) == 1.0


@needs_sandbox
async def test_outputs_are_compared_before_all_inputs_have_run(monkeypatch):
    """What is wrong early does not run on."""
    monkeypatch.setattr("actors.rewards.code.reward._BUDGET_S", 0.0)
    code = "import time\nn = input()\ntime.sleep(0 if n == '0' else 600)\nprint(7)"
    row = {"tests": {"inputs": ["0", "1"], "outputs": ["8", "7"]}}
    scoring = score(block(code), kwargs={"time_s": 600.0}, **row)
    assert await asyncio.wait_for(scoring, 120) == 0.0
    code = "print(int(input()) + 1)"
    row = {"tests": {"inputs": ["0", "1", "2"], "outputs": ["1", "2", "3"]}}
    assert await score(block(code), **row) == 1.0


@needs_sandbox
@pytest.mark.parametrize(
    ("prefill", "response", "reward"),
    [
        ("<think>", block(ADD), 0.0),
        ("<think>", f"{block(ADD)}</think>I cannot.", 0.0),
        ("<think>", f"no</think>{block(ADD)}", 1.0),
        ("```python\n", f"{ADD}\n```", 1.0),
    ],
)
async def test_a_program_of_a_thought_is_no_answer(prefill, response, reward):
    made = make_reward(DataSettings(source="addition", reward="code"))
    whole = replace(episode(response, "assert add(2, 2) == 4"), prefill=prefill)
    assert [score.reward for score in await made.score([whole])] == [reward]


@needs_sandbox
async def test_long_inputs_do_not_take_the_memory_of_a_program():
    """Of 256 MiB; the inputs are 60 MB together."""
    code = "x = bytearray(200_000_000)\nprint(len(input()))"
    row = {"tests": {"inputs": ["x" * 10**7] * 6, "outputs": [str(10**7)] * 6}}
    assert await score(block(code), **row, kwargs={"memory_bytes": 2**28}) == 1.0


def test_a_block_ends_with_a_line_and_begins_where_its_mark_does():
    assert solution_of("```py\nprint('```')\n```\nDone.") == "print('```')\n"
    assert solution_of("1. So:\n   ```py\n   if x:\n       y()\n   ```") == "if x:\n    y()\n"
    assert solution_of("```py\nprint(1)```\nDone.") == "print(1)"
    assert solution_of("```py\r\nprint(1)\r\n```\r\nDone.") == "print(1)\r\n"
    assert solution_of("    ```py\nif x:\n    y()\n    ```") == "if x:\n    y()\n"


def test_the_last_block_is_the_solution():
    assert solution_of("```\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert solution_of("```python\ncut off") == "cut off"
    assert solution_of("bare") == "bare"
    assert solution_of("So: <answer>bare</answer>") == "bare"
    assert solution_of("print('<answer>')") == "print('<answer>')"


def test_what_a_response_shows_behind_its_program_is_none():
    program, output, command = "```python\na\n```", "```\n3\n```", "```bash\npython a.py\n```"
    assert solution_of(f"{program}\nIt prints:\n{output}\nby\n{command}") == "a\n"
    assert solution_of(f"{program}\nBetter:\n``` Python3 title=b\nb\n```\n{output}") == "b\n"
    assert solution_of(f"```cpp\nc\n```\n{program}\n{output}", "cpp") == "c\n"


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("1 \n2\n\n", "1\n2", True),
        ("1.50", "1.5", True),
        ("a b", "a  b", False),
        ("1\n2", "1 2", False),
        ("yes", "Yes", True),
        ("no", "Yes", False),
        ("alice", "Alice", False),
        ("1e3", "1000", True),
        ("snan", "1", False),
        ("nan", "nan", True),
        ("0.3333333", "0.33333334", True),
        ("0.3333", "0.33333334", False),
        ("0.166667", "0.166666666667", True),
        ("1666666.7", "1666666.666667", True),
        ("1666669", "1666666.666667", False),
        ("Case #1: 0.50000001", "Case #1: 0.5", True),
        ("Case #1: 0.51", "Case #1: 0.5", False),
        ("-5.551115123125783e-17", "0.0", True),
        ("0.00001", "0.0", False),
        ("1000000000000000001", "1000000000000000000", False),
        ("9" * 5000, "9" * 5000 + ".0", True),
    ],
)
def test_outputs_are_compared_line_by_line(printed, expected, is_same):
    assert same_output(printed, expected) is is_same
