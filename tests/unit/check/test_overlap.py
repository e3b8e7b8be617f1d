"""`streamrl check` counts the prompts that are trained and held out."""

import json
from pathlib import Path

import pytest

from streamrl.cli.check.data import check_data
from streamrl.config import RunConfig

OWN = """
from streamrl.interfaces import Prompt

class Stream:
    def __init__(self, seed):
        self.seed = seed
    def __getitem__(self, index):
        return Prompt(f"c{index}=", str(index))

class BreaksLater(Stream):
    def __getitem__(self, index):
        return Prompt(f"c{index}=", str(index)) if index < 1000 else None
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, numbers in (
        ("train", range(300)),
        ("eval", range(290, 310)),
        ("new", range(400, 420)),
    ):
        rows = [{"prompt": f"c{i}=", "answer": str(i)} for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def warnings(**data: object) -> list[str]:
    sections = {"model": {"path": "unused"}, "data": data}
    found = check_data(RunConfig.model_validate(sections))
    return [f.sentence for f in found if f.sentence.startswith("data.eval_source")]


@pytest.mark.parametrize(
    "source",
    [
        "train.jsonl",
        [{"path": "new.jsonl", "weight": 1}, {"path": "train.jsonl", "weight": 9}],
        ["new.jsonl", "train.jsonl"],
    ],
)
def test_rows_of_a_file_that_are_trained_and_held_out_are_counted(folder, source):
    assert warnings(source=source, eval_source="eval.jsonl") == [
        "data.eval_source: 10 of the 20 held-out prompts are also in data.source, such as 'c290=' "
        "(line 291 of train.jsonl and line 1 of eval.jsonl): their scores tell nothing about new "
        "prompts; leave them out of one of the two"
    ]


@pytest.mark.parametrize("source", ["train.jsonl", "train*.jsonl", ["new.jsonl", "train.jsonl"]])
def test_a_source_that_is_held_out_itself_is_counted(folder, source):
    (sentence,) = warnings(source=source, eval_source="train.jsonl")
    assert sentence.startswith("data.eval_source: 256 of the 256 held-out prompts are also in")


def test_prompts_that_differ_in_case_and_blanks_alone_are_the_same(folder):
    rows = [{"prompt": f" C{i}= ", "answer": "x"} for i in range(2)]
    (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (sentence,) = warnings(source="train.jsonl", eval_source="other.jsonl")
    assert sentence.startswith("data.eval_source: 2 of the 2 held-out prompts are also in")


def test_a_conversation_is_shown_by_its_last_message(folder):
    turns = [
        {"role": "system", "content": "Reply briefly. " * 9},
        {"role": "user", "content": "c?"},
    ]
    (folder / "chat.jsonl").write_text(json.dumps({"prompt": turns, "answer": "x"}))
    (sentence,) = warnings(source="chat.jsonl", eval_source="chat.jsonl")
    assert "such as 'c?' (line 1 of" in sentence


def test_prompts_of_a_users_own_are_counted(folder):
    (sentence,) = warnings(source="own.py:Stream", eval_source="new.jsonl")
    assert sentence.startswith("data.eval_source: 20 of the 20 held-out prompts are also in")


def test_a_source_that_breaks_later_is_named(folder):
    sections = {
        "model": {"path": "unused"},
        "data": {"source": "own.py:BreaksLater", "eval_source": "new.jsonl"},
    }
    sentences = [f.sentence for f in check_data(RunConfig.model_validate(sections))]
    assert any("prompt 1000 was NoneType" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("source", "eval_source"),
    [
        ("train.jsonl", "new.jsonl"),
        ("train.jsonl", "reverse"),
        ("copy", None),
        ("copy", "copy"),
        ("environment", "environment"),
    ],
)
def test_nothing_is_said_where_none_is_shared(folder, source, eval_source):
    assert not warnings(source=source, eval_source=eval_source)


def test_a_scorer_that_pays_for_wrong_answers_is_named(folder):
    sections = {
        "model": {"path": "unused"},
        "data": {"source": "reasoning_gym:coin_flip", "reward": "task"},
    }
    sentences = [f.sentence for f in check_data(RunConfig.model_validate(sections))]
    assert any("scorer of reasoning_gym:coin_flip pays in full" in s for s in sentences)
