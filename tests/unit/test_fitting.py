"""Rows that are too long are filtered ahead: the same ones at every start, found once."""

import json
import os
from functools import partial
from pathlib import Path

import pytest

from actors.make_model import make_tokenizer
from actors.prompts import open_held_out, open_prompts
from actors.prompts.fitting import fitting_rows
from actors.rendering.renderer import ChatRenderer, PromptTooLongError
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt

LENGTHS = [2, 9, 3, 1, 5, 2]
ROWS = [{"prompt": "abcabcabc"[:n], "answer": str(i)} for i, n in enumerate(LENGTHS)]
FITTING = {"0", "2", "3", "5"}


@pytest.fixture
def run(tmp_path: Path) -> dict[str, object]:
    make_tokenizer("abc").save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return {
        "run": {"folder": str(tmp_path / "runs"), "name": "r"},
        "model": {"path": str(tmp_path / "model")},
        "data": {
            "source": str(tmp_path / "rows.jsonl"),
            "max_prompt_length": 3,
            "truncation": "filter",
        },
    }


def opened(run: dict[str, object], **data: object) -> object:
    config = RunConfig.model_validate({**run, "data": {**run["data"], **data}})
    renderer = ChatRenderer.from_config(config)
    return open_prompts(config.data, 4, partial(fitting_rows, config, renderer))


def answers(prompts: object, count: int) -> list[str]:
    return [prompts[i].answer for i in range(count)]


def test_an_epoch_has_the_rows_that_fit(run):
    prompts = opened(run)
    assert len(prompts) == 4
    epochs = [answers(prompts, 12)[i : i + 4] for i in (0, 4, 8)]
    assert all(set(epoch) == FITTING for epoch in epochs)
    assert answers(opened(run, shuffle=False), 5) == ["0", "2", "3", "5", "0"]


def test_what_was_found_is_kept_until_rows_or_settings_change(run, monkeypatch, tmp_path):
    counted = []
    fits = ChatRenderer.fits
    monkeypatch.setattr(ChatRenderer, "fits", lambda self, p: counted.append(p) or fits(self, p))
    first = answers(opened(run), 8)
    assert len(counted) == 6
    assert answers(opened(run, filter_workers=2), 8) == first
    assert len(counted) == 6
    assert answers(opened(run, max_prompt_length=2, shuffle=False), 4) == ["0", "3", "5", "0"]
    assert len(counted) == 12
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, [*ROWS, {"prompt": "a", "answer": "new"}])))
    os.utime(file, ns=(1, 1))
    assert set(answers(opened(run), 5)) == {*FITTING, "new"}
    assert len(counted) == 12 + 7


def test_each_source_of_a_mixture_is_filtered(run, tmp_path):
    other = tmp_path / "other.jsonl"
    rows = [{"prompt": "abcabc"[:n], "answer": f"o{n}"} for n in (1, 5, 2)]
    other.write_text("\n".join(map(json.dumps, rows)))
    sources = [{"path": run["data"]["source"], "weight": 1}, {"path": str(other), "weight": 3}]
    drawn = answers(opened(run, source=sources), 64)
    assert set(drawn) == {*FITTING, "o1", "o2"}
    assert sum(answer.startswith("o") for answer in drawn) == 48


def test_a_file_without_a_row_that_fits_is_refused(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "abca", "answer": ""}))
    with pytest.raises(ConfigError, match=r"max_prompt_length: was 3; none of the 1 rows"):
        opened(run)


def test_what_is_not_filtered_ahead_is_dropped_when_its_turn_comes(run):
    config = RunConfig.model_validate(run)
    renderer = ChatRenderer.from_config(config)
    with pytest.raises(PromptTooLongError, match="4 tokens"):
        renderer.encode(Prompt("abca", ""))
    data = config.data.model_copy(update={"eval_source": config.data.source})
    assert len(open_held_out(data)) == 6
