"""`streamrl parity --model`: log-probabilities of transformers, line by line, or one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.cli.main import main
from tests.model_families import make_model, plain_logprobs

GOOD = {"token_ids": [3, 4, 5], "response_mask": [False, True, True]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("Gemma 2").save_pretrained(folder)
    return folder


def score(folder: Path, at: Path, *lines: object, options: tuple[str, ...] = ()) -> int:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (at / "in.jsonl").write_text("".join(f"{text}\n" for text in texts))
    files = ["--score", str(at / "in.jsonl"), "--out", str(at / "out.jsonl")]
    return main(["parity", "--model", str(folder), *files, *options])


def read(at: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (at / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", ["Gemma 2", "Qwen3.5"])
def test_a_line_has_a_log_probability_for_each_token_of_the_mask(family: str, tmp_path: Path):
    make_model(family).save_pretrained(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(64, (n,), generator=generator) for n in (5, 30, 1, 2, 30, 17)]
    masks = [[i > 2 and i % 4 != 1 for i in range(len(ids))] for ids in sequences]
    lines = [
        {"token_ids": ids.tolist(), "response_mask": mask}
        for ids, mask in zip(sequences, masks, strict=True)
    ]
    options = ("--max-tokens-per-micro-batch", "40")
    assert score(tmp_path / "model", tmp_path, *lines, options=options) == 0
    for ids, mask, line in zip(sequences, masks, read(tmp_path), strict=True):
        assert list(line) == ["logprobs"]
        with torch.no_grad():
            expected = plain_logprobs(plain, ids)[torch.tensor(mask[1:], dtype=torch.bool)]
        torch.testing.assert_close(torch.tensor(line["logprobs"]), expected, atol=1e-4, rtol=0)


def test_bfloat16_and_masks_of_numbers(folder: Path, tmp_path: Path):
    assert score(folder, tmp_path, GOOD) == 0
    exact = read(tmp_path)
    ones = {**GOOD, "response_mask": [0, 1, 1]}
    assert score(folder, tmp_path, ones, options=("--dtype", "bfloat16")) == 0
    (rounded,) = read(tmp_path)
    assert rounded["logprobs"] == pytest.approx(exact[0]["logprobs"], abs=0.5)
    assert rounded != exact[0]


def test_an_empty_file_is_scored(folder: Path, tmp_path: Path):
    assert score(folder, tmp_path) == 0
    assert read(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "in.jsonl:2: is not JSON"),
        ("", "in.jsonl:2: is not JSON"),
        ([1], "in.jsonl:2: Expected `object`, got `array`"),
        ({"token_ids": [1]}, "`response_mask`; a line has token_ids and response_mask"),
        ({**GOOD, "response_masks": []}, "response_masks is unknown; did you mean 'response_mask'"),
        ({**GOOD, "token_ids": []}, "in.jsonl:2: Expected `array` of length >= 1"),
        ({**GOOD, "token_ids": "abc"}, "Expected `array`, got `str` - at `$.token_ids`"),
        ({**GOOD, "token_ids": [1, True, 2]}, "Expected `int`, got `bool` - at `$.token_ids[1]`"),
        ({**GOOD, "token_ids": [1, -2, 2]}, "Expected `int` >= 0 - at `$.token_ids[1]`"),
        ({**GOOD, "token_ids": [1, 64, 2]}, "token_ids[1] is 64; the model has 64 tokens"),
        ({**GOOD, "response_mask": [False]}, "response_mask has 1 entries; must be a list as long"),
        (
            {**GOOD, "response_mask": [False, 2, True]},
            "value 2 - at `$.response_mask[1]`",
        ),
        ({**GOOD, "response_mask": [True] * 3}, "response_mask[0] is true; must be false"),
        (
            {"token_ids": [1] * 9, "response_mask": [False] * 9},
            "token_ids has 9 tokens; --max-tokens-per-micro-batch is 8",
        ),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: object,
    sentence: str,
):
    options = ("--max-tokens-per-micro-batch", "8")
    assert score(folder, tmp_path, GOOD, line, options=options) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_files_and_models_that_are_not_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    missing = ["--score", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(["parity", "--model", str(folder), *missing]) == 2
    assert "none.jsonl: No such file" in capsys.readouterr().err
    assert score(tmp_path / "nowhere", tmp_path, GOOD) == 2
    assert "no model at" in capsys.readouterr().err
    nowhere = ("--out", str(tmp_path / "nowhere" / "out.jsonl"))
    assert score(folder, tmp_path, GOOD, options=nowhere) == 2
    assert "must be a file in a folder that exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run.yaml", "--score", "a"], "--score: needs --out, the file to write"),
        (["--model", "m", "--out", "b"], "--model: needs --score with one file"),
        (["--model", "m", "--score", "a", "b", "--out", "c"], "--model: needs --score with one"),
        (["run.yaml", "--model", "m", "--score", "a", "--out", "b"], "takes the place of CONFIG"),
    ],
)
def test_options_that_need_others_say_so(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
):
    assert main(["parity", *words]) == 2
    assert sentence in capsys.readouterr().err
