"""Each form of tests that data sets have: the gold solution passes, a wrong one does not, and a row
that tests nothing fails its group."""

import base64
import json
import pickle
import zlib

import pytest

from actors.rewards import check_row
from actors.rewards.code.encodings import decoded
from actors.rewards.code.python_tests import PythonTest, defined_functions, python_test
from actors.rewards.code.tests import CallTest, ProgramTest, read_tests
from streamrl.config.data import RewardSettings
from streamrl.errors import RewardError, RolloutError
from streamrl.interfaces import Prompt
from tests.isolation import find_isolation
from tests.unit.rewards.test_code import ADD, block, score

needs_sandbox = pytest.mark.skipif(find_isolation() is None, reason="no isolation here")

STDIN = "a, b = map(int, input().split())\nprint(a + b)"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b"
PAIRS = {"inputs": ["1 2\n", "3 5\n"], "outputs": ["3\n", "8\n"]}
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 5) == 8"]
UNITTEST = """
import unittest

class TestCases(unittest.TestCase):
    def setUp(self):
        self.one = 1

    def test_small(self):
        self.assertEqual(task_func(self.one, 2), 3)

    def test_more(self):
        for b in (4, 5):
            with self.subTest(b=b):
                self.assertEqual(task_func(3, b), 3 + b)

class More(TestCases):
    @unittest.skip("not here")
    def test_skipped(self):
        self.fail()

if __name__ == "__main__":
    unittest.main()
"""
TASK_FUNC = ADD.replace("add", "task_func")
FUNCTIONS = """
from solution import add

def test_small():
    assert add(1, 2) == 3

class TestMore:
    def test_more(self):
        assert add(3, 5) == 8

async def test_waiting():
    assert add(2, 2) == 4
"""
PYTEST = """
import pytest
from solution import add

@pytest.fixture
def two():
    return 2

@pytest.mark.parametrize("a", [1, 3])
def test_sum(a, two):
    assert add(a, two) == a + two

@pytest.mark.skip
def test_later():
    assert False

def test_refusal():
    with pytest.raises(TypeError):
        add(1, "2")
"""
COROUTINE = """
import pytest

@pytest.mark.asyncio
async def test_sum():
    assert await add(3, 5) == 8
"""
CHECK = """
METADATA = {"author": "us"}

def check(candidate):
    assert candidate(1, 2) == 3
    assert candidate(3, 5) == 8
"""


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value)))).decode()


CASES = [
    {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
    {"input": "3 5\n", "output": "8\n", "testtype": "stdin"},
]
CALL_CASES = [{"type": "function_call", "fn_name": "add", "input": [3, 5], "output": 8}]
VERIFICATION = {"language": "python", "test_cases": [{"type": "stdin_stdout", **CASES[1]}]}
FORMS = {
    "repr of a record": (STDIN, {"input_output": str(PAIRS)}),
    "repr of a list": (ADD, {"test_list": str(ASSERTS)}),
    "JSON twice": (STDIN, {"input_output": json.dumps(json.dumps(PAIRS))}),
    "JSON of a text": (ADD, {"test": json.dumps(ASSERTS[1])}),
    "cases packed": (STDIN, {"public_test_cases": "[]", "private_test_cases": packed(CASES)}),
    "cases of DeepCoder": (ADD, {"tests": json.dumps(CALL_CASES)}),
    "cases of open-r1": (STDIN, {"verification_info": str(VERIFICATION)}),
    "lists of CodeContests": (STDIN, {"private_tests": {"input": ["3 5"], "output": ["8"]}}),
    "columns of rStar-Coder": (
        ADD,
        {"inputs": "[[3, 5]]", "outputs": "[8]", "func_name": "add"},
    ),
    "assert_case": (ADD, {"reward_model": {"ground_truth": json.dumps({"assert_case": ASSERTS})}}),
    "functional": (
        METHOD,
        {"reward_model": {"ground_truth": {"functional": f"{CHECK}\ncheck(Solution().add)"}}},
    ),
    "pytest in a record": (ADD, {"reward_model": {"ground_truth": {"pytest": FUNCTIONS}}}),
    "test_code": (
        f"@marked\n{METHOD}",
        {"tests": {"test_code": CHECK, "entry_point": "Solution().add"}}
        | {"import_prefix": "def marked(owner):\n    return owner\n"},
    ),
    "unittest": (TASK_FUNC, {"test": UNITTEST, "entry_point": "task_func"}),
    "body for unittest": (
        "    return a + b",
        {"test": UNITTEST, "entry_point": "task_func"}
        | {"complete_prompt": 'def task_func(a, b):\n    """The sum."""\n'},
    ),
    "functions": (ADD, {"test": FUNCTIONS}),
    "functions by pytest": (ADD, {"test": PYTEST}),
    "coroutines by pytest": (f"async {ADD}", {"test": COROUTINE}),
    "check": (ADD, {"test": CHECK, "entry_point": "add"}),
    "check of a method": (METHOD, {"test": CHECK, "entry_point": "Solution().add"}),
    "check of the prompt": (ADD, {"test": CHECK, "prompt": 'def add(a, b):\n    """The sum."""\n'}),
    "check called": (ADD, {"test": f"{CHECK}\ncheck(add)"}),
    "program under its condition": (
        f"{ADD}\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))",
        {"test_list": ASSERTS},
    ),
    "script under its condition": (
        ADD,
        {"test": f"def run():\n    {ASSERTS[1]}\nif __name__ == '__main__':\n    run()"},
    ),
}


@needs_sandbox
@pytest.mark.parametrize(("gold", "row"), FORMS.values(), ids=FORMS)
async def test_the_gold_solution_passes_and_a_wrong_one_does_not(gold, row):
    assert await score(block(gold), **row) == 1.0
    assert await score(block(gold.replace("a + b", "a + b if a == 1 else 0")), **row) == 0.0


NOTHING = {
    "no text": ("", "it runs no assertion"),
    "a number": ("42", "was '42': it runs no assertion, raise, call or test"),
    "a word": ("yes", "it runs no assertion"),
    "a formula": (r"\frac{1}{2}", "it is no Python"),
    "a comment": ("# assert add(1, 2) == 3", "it runs no assertion"),
    "a comparison": ("add(1, 2) == 3", "it runs no assertion"),
    "a function": (f"def run():\n    {ASSERTS[0]}", "it runs no assertion"),
    "a class": ("class Box:\n    pass", "it runs no assertion"),
    "an import": ("from solution import add", "it runs no assertion"),
    "a pass": ("pass", "it runs no assertion"),
    "an array": ("{'inputs': array(['1'])}", "it runs no assertion"),
    "no name of the program": ("assert 1 + 1 == 2", "names nothing that it does not define"),
    "its own program": (f"{ADD}\n{ASSERTS[0]}", "names nothing that it does not define"),
    "an empty check": ("def check(candidate):\n    pass", "its check tests nothing"),
    "a set-up alone": (
        "import unittest\nclass TestCases(unittest.TestCase):\n    def setUp(self):\n        add()",
        "it runs no assertion",
    ),
    "an empty test": ("from solution import add\ndef test_sum():\n    pass", "have no assertion"),
    "a list with one of them": (["assert add(1, 2) == 3", "x = 1"], r"\[1\] was 'x = 1'"),
    "an empty list": ([], r"was '\[\]': it has no tests"),
    "an empty record": ({"inputs": [], "outputs": []}, "it has no tests"),
    "unequal lists": ({"inputs": ["1"], "outputs": []}, "it has 1 inputs and 0 outputs"),
    "no outputs": ({"inputs": ["1"]}, "it has no 'outputs'"),
    "no output": ({"inputs": ["1"], "outputs": [None]}, "an output is None"),
    "output of nothing": ({"inputs": ["1"], "outputs": [" "]}, "it expects no output of any prog"),
    "a case without output": ([{"input": "1"}], "it has no 'output'"),
}


@pytest.mark.parametrize(("answer", "reason"), NOTHING.values(), ids=NOTHING)
async def test_what_tests_nothing_fails_its_group_with_row_and_reason(answer, reason):
    text = answer if isinstance(answer, str) else json.dumps(answer)
    with pytest.raises(
        RewardError, match=rf"reward code: the row: the answer.*{reason}.*tests are"
    ):
        await score(block("x = 1"), text, entry_point="add")


@pytest.mark.parametrize("value", [[], "", None, "[]", 7])
def test_a_column_that_holds_nothing_is_named_with_what_it_was(value):
    prompt = Prompt("question", "", {"tests": value}, "row 3 of a.jsonl")
    with pytest.raises(RolloutError, match=r"row 3 of a\.jsonl: tests was (\[\]|''|None|'\[\]'|7)"):
        read_tests(prompt)
    with pytest.raises(RolloutError, match=r"test was None: there is no column; did you mean 'te"):
        read_tests(prompt, "test")


async def test_check_without_the_one_function_to_call_is_refused():
    for prompt in ("Add two numbers.", "```python\ndef add(a, b):\n\ndef other(a):\n```"):
        with pytest.raises(
            RewardError, match="neither a column entry_point, METADATA nor the prompt"
        ):
            await score(block(ADD), test=CHECK, prompt=prompt)


def test_the_one_function_of_the_prompt_is_found():
    def called(prompt: str, **row: object) -> str:
        (test,) = read_tests(Prompt(prompt, "", {"test": CHECK, **row}))
        assert isinstance(test, PythonTest)
        return test.code.splitlines()[-1]

    assert called("def add(a, b):") == "check(add)"
    assert called("Complete:\n```python\ndef add(a, b):\n    ...\n```") == "check(add)"
    assert called("", test_info=[{"function_name": "plus"}]) == "check(plus)"
    assert called("", metadata='{"func_name": "plus"}') == "check(plus)"
    metadata = CHECK.replace('"us"', '"us", "entry_point": "plus"')
    (test,) = read_tests(Prompt("", metadata))
    assert "check(plus)" in str(test)
    assert defined_functions("class Solution:\n    def add(self):") == ["Solution().add"]
    assert defined_functions("no code at all") == []


def test_the_share_counts_every_test_of_a_text():
    assert python_test(UNITTEST).num_tests == 5
    assert python_test(UNITTEST).names == ("TestCases", "More")
    assert python_test(FUNCTIONS).names == ("test_small", "TestMore", "test_waiting")


@needs_sandbox
async def test_the_share_of_tests_of_a_text_counts_where_it_is_asked_for():
    code, partial = "def {}(a, b):\n    return 3", {"partial": True}
    # The skipped test of five is none; two are small ones.
    assert await score(block(code.format("task_func")), test=UNITTEST, kwargs=partial) == 0.5
    assert await score(block(code.format("add")), test=FUNCTIONS, kwargs=partial) == 1 / 3
    assert await score(block(code.format("add")), test=PYTEST, kwargs=partial) == 1 / 3
    assert await score(block(code.format("add")), test=FUNCTIONS, kwargs={"max_tests": 1}) == 1.0


SKIPS = "import unittest\ndef add(a, b):\n    raise unittest.SkipTest('no')"
LEAVES = "import os\ndef add(a, b):\n    os._exit(0)"
WRITES = """
import os
for descriptor in range(1, 9):
    try:
        os.write(descriptor, b"\\npassed 9 of 9\\n")
    except OSError:
        pass
os._exit(0)
"""
REPLACES = "import unittest\nunittest.TestCase.{} = lambda *_: None\ndef add(a, b):\n    return 0"
HIDES = "import sys\nsys.modules['{}'] = sys\ndef add(a, b):\n    return 0"
OWN_TEST = "import unittest\nclass TestMine(unittest.TestCase):\n    def test(self):\n        0"
OF_ADD = UNITTEST.replace("task_func", "add")


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("import sys\nsys.exit(0)", OF_ADD),
        ("import os\nos._exit(0)", OF_ADD),
        (f"{ADD}\nraise SystemExit(0)", OF_ADD),
        ("def add(a, b):\n    raise SystemExit(0)", OF_ADD),
        (LEAVES, FUNCTIONS),
        (LEAVES, PYTEST),
        (SKIPS, OF_ADD),
        (SKIPS, PYTEST),
        (WRITES, FUNCTIONS),
        (WRITES, ASSERTS[0]),
        (REPLACES.format("assertEqual"), OF_ADD),
        (REPLACES.format("run"), FUNCTIONS),
        (HIDES.format("unittest"), OF_ADD),
        (HIDES.format("pytest"), PYTEST),
        (OWN_TEST, OF_ADD),
        (OWN_TEST, PYTEST),
    ],
)
async def test_no_program_passes_by_ending_early_or_by_what_it_prints_or_replaces(code, tests):
    assert await score(block(code), test=tests, kwargs={"partial": True}) == 0.0


@needs_sandbox
async def test_a_skip_of_all_tests_is_no_pass():
    tests = FUNCTIONS.replace("assert", "import unittest; raise unittest.SkipTest; assert")
    assert await score(block(ADD), test=tests) == 0.0


@needs_sandbox
@pytest.mark.parametrize(
    ("tests", "lacking"),
    [
        (f"import no_such_package\n{ASSERTS[0]}", "no_such_package"),
        (f"import no_such_package\n{FUNCTIONS}", "no_such_package"),
        ("def test_sum(no_such):\n    assert add(1, 2) == 3", "the fixture no_such"),
    ],
)
async def test_what_the_tests_need_and_the_interpreter_lacks_fails_the_group(tests, lacking):
    with pytest.raises(RewardError, match=rf"the row: its tests need {lacking}, which the Python"):
        await score(block(ADD), test=tests)


def test_what_the_tests_need_and_this_interpreter_lacks_is_told_beforehand(monkeypatch):
    monkeypatch.setattr("actors.rewards.code.reward.is_installed", lambda name: name != "pytest")
    prompt = Prompt("", "", {"test": PYTEST})
    with pytest.raises(RolloutError, match=r"need pytest, .*fixtures, parametrize and set-up"):
        check_row(RewardSettings(reward="code"), prompt, "kwargs")
    remote = RewardSettings(reward="sandbox_fusion", kwargs={"url": "http://h"})
    check_row(remote, prompt, "kwargs")
    other = remote.model_copy(update={"kwargs": {"url": "http://h", "language": "cpp"}})
    with pytest.raises(RolloutError, match="its tests are Python, and language is cpp"):
        check_row(other, prompt, "kwargs")


def test_tests_with_fixtures_need_pytest():
    for text in (
        "def test_sum(tmp_path):\n    add(1)",
        "class TestSum:\n    def test(self): add(1)",
    ):
        needed = "tmp_path" in text
        assert python_test(text).by_pytest is needed
        assert ("pytest" in python_test(text).modules) is needed
    assert python_test("def setup_module():\n    pass\ndef test():\n    add()").by_pytest


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"\\"[1]\\""', [1]),
        ("('a', 'b')", ("a", "b")),
        ("{1: None}", {1: None}),
        ("[1, nan]", "[1, nan]"),
        ("eJnothing", "eJnothing"),
        (base64.b64encode(zlib.compress(pickle.dumps(Prompt))).decode(), None),
        ("[" * 5000, None),
        (7, 7),
    ],
)
def test_texts_of_records_are_read_and_others_stay(text, value):
    assert decoded(text) == (text if value is None else value)


@pytest.mark.parametrize("plural", ["", "s"])
def test_texts_of_one_test_are_not_taken_apart(plural):
    """They have as many characters, which would be as many tests."""
    row = {"tests": {f"input{plural}": "[5]\n", f"output{plural}": "25\n\n"}}
    assert read_tests(Prompt("", "", row)) == [ProgramTest("[5]\n", "25\n\n")]


@pytest.mark.parametrize(
    ("record", "tests"),
    [
        ({"input": "[3, 1]\n", "output": "[1, 3]\n"}, [ProgramTest("[3, 1]\n", "[1, 3]\n")]),
        (
            {"input": '["1", "2"]', "output": '["3", "4"]'},
            [ProgramTest("1", "3"), ProgramTest("2", "4")],
        ),
        ({"input": '[["1", "2"]]', "output": '[["3"]]'}, [ProgramTest("1\n2", "3")]),
        ({"input": "[1, 2]\n3", "output": "7", "fn_name": "f"}, [CallTest("f", [[1, 2], 3], 7)]),
        ({"input": "[3]", "output": "[4]", "fn_name": "f"}, [CallTest("f", [[3]], [4])]),
        (
            {"input": "[[1], [2]]", "output": "[3, 4]", "fn_name": "f"},
            [CallTest("f", [1], 3), CallTest("f", [2], 4)],
        ),
    ],
)
@pytest.mark.parametrize("kind", [None, "stdin"])
def test_a_text_is_one_test_unless_it_lists_what_tests_read(record, tests, kind):
    """A record that Arrow has filled in names no kind."""
    row = {"tests": {**record, "testtype": kind}}
    assert read_tests(Prompt("", "", row)) == tests


def test_inputs_and_outputs_are_read_as_programs_or_calls():
    def read(**row: object) -> list:
        return read_tests(Prompt("", "", row))

    assert read(tests=PAIRS) == [ProgramTest("1 2\n", "3\n"), ProgramTest("3 5\n", "8\n")]
    assert read(tests=CALL_CASES) == [CallTest("add", [3, 5], 8)]
    functional = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    functional[0]["metadata"] = {"func_name": "add"}
    assert read(tests=functional) == [CallTest("add", [1, 2], 3)]
    # As Arrow has it beside rows of another form.
    filled = {"inputs": ["1"], "outputs": ["3"], "fn_name": None, "assert_case": None}
    assert read(tests=filled) == [ProgramTest("1", "3")]
