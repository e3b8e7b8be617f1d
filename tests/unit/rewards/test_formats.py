"""Public data sets, by rows of our own in their columns (`tests/data/formats`): with the settings
that docs/data.md names each is read, its gold answer scores 1, a wrong one 0, and `check` passes.
"""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from actors.prompts import open_prompts
from actors.prompts.rows import column
from actors.rewards import make_reward
from docs.generate import FORMATS
from streamrl.cli.main import main
from streamrl.config.data import DataSettings
from streamrl.interfaces import Episode, Prompt
from streamrl.types import FinishReason
from tests.tiny_vision import save_qwen
from tests.unit.rewards.services import serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", FORMATS)
async def test_the_gold_of_a_public_data_set_scores_1_and_what_is_wrong_0(
    tmp_path: Path, name: str
):
    examples = FORMATS[name]["examples"]
    async with serving(judged(examples)) as judge:
        data = DataSettings(shuffle=False, **settings(tmp_path, name, judge.url))
        prompts, reward = open_prompts(data, seed=0), make_reward(data)
        for number, example in enumerate(examples):
            prompt = prompts[number]
            for response in right(FORMATS[name], prompt, example):
                (score,) = await reward.score([episode(prompt, response)])
                assert score.reward == 1, response
            for response in example["wrong"]:
                (score,) = await reward.score([episode(prompt, response)])
                assert score.reward == 0, response


@pytest.mark.usefixtures("torch_is_known")
@pytest.mark.parametrize("name", FORMATS)
def test_check_passes_on_a_public_data_set(
    tmp_path: Path, model: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    data = settings(tmp_path, name, "http://127.0.0.1:9/v1")
    run = {
        "run": {"name": "run", "folder": str(tmp_path / "run"), "evaluate": False, "max_steps": 1},
        "model": {"path": str(model)},
        "data": {"max_prompt_length": 480, "truncation": "left", **data},
        "generator": {"max_new_tokens": 32},
        "learner": {"groups_per_step": 1},
        "buffer": {"url": "zmq://127.0.0.1:0"},
        "weights": {"address": "tcp://127.0.0.1:0"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["check", str(tmp_path / "run.yaml")]) == 0, capsys.readouterr()


def settings(folder: Path, name: str, judge: str) -> dict[str, Any]:
    """Those of `data`, with the rows as a file, and a judge that is there."""
    rows = [example["row"] for example in FORMATS[name]["examples"]]
    path = folder / f"{name}.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found = {"source": str(path), **FORMATS[name]["settings"]}
    kwargs = found.get("reward_kwargs", {})
    return {**found, "reward_kwargs": {**kwargs, "url": judge}} if "url" in kwargs else found


def right(form: dict[str, Any], prompt: Prompt, example: dict[str, Any]) -> list[str]:
    gold = [] if form["gold"] is None else [column(prompt, form["gold"])]
    return [*gold, *example["right"]]


def judged(examples: list[dict[str, Any]]) -> Any:
    """A judge that gives the wrong responses 1 and all others 10."""
    wrong = [response for example in examples for response in example["wrong"]]

    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        question = request["messages"][-1]["content"]
        score = 1 if any(response in question for response in wrong) else 10
        return 200, {"choices": [{"message": {"content": f"I have read it.\nScore: {score}"}}]}

    return answer


def episode(prompt: Prompt, response: str) -> Episode:
    return Episode(prompt, response, len(response), FinishReason.STOP)
