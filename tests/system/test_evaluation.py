"""What an evaluation scores: the checkpoint's weights, on every engine, and each prompt once."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.engines.served.process import ServerProcess
from actors.evaluation import evaluate, greedy_groups
from streamrl.config import RunConfig, load_config
from streamrl.errors import ConfigError
from streamrl.types import LoadReport, WeightUpdate
from tests.engines import ENVIRONMENT
from tests.ports import free_port
from tests.system.conftest import CONFIG, DEADLINE_S, STREAMRL
from tests.terminal import Terminal
from tests.unit.test_generator import FakeEngine


@pytest.fixture
def config(tmp_path: Path, model: Path) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(folder=tmp_path, model=model))
    return load_config(path).config


def changed(config: RunConfig, section: str, **settings: Any) -> RunConfig:
    given = config.model_dump(mode="json", exclude_unset=True)
    return RunConfig.model_validate({**given, section: {**given.get(section, {}), **settings}})


def rows(path: Path, *prompts: str) -> str:
    lines = (json.dumps({"prompt": prompt, "answer": prompt[1:-1]}) for prompt in prompts)
    path.write_text("\n".join(lines))
    return str(path)


def answers(config: RunConfig, model: Path) -> list[list[int]]:
    greedy = asyncio.run(greedy_groups(config, model))
    return [group.trajectories[0].token_ids.tolist() for group in greedy.groups]


@pytest.mark.long
def test_a_server_elsewhere_is_sent_the_weights_that_are_scored(config, model, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for file in model.iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(0)
    weights = load_file(model / "model.safetensors")
    moved = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(moved, checkpoint / "model.safetensors", metadata={"format": "pt"})
    port = free_port()
    words = [sys.executable, "-m", "tests.standins.sglang_server", "--model-path", str(model)]
    words += ["--port", str(port), "--enable-metrics"]
    server = ServerProcess(words, tmp_path / "log", ENVIRONMENT)
    try:
        url = {"url": f"http://127.0.0.1:{port}"}
        elsewhere = changed(config, "generator", engine="sglang", sglang=url)
        scored = answers(elsewhere, checkpoint)
    finally:
        server.close()
    assert scored == answers(config, checkpoint)
    assert scored != answers(config, model)


class _Broken(FakeEngine):
    async def load_weights(self, update: WeightUpdate) -> LoadReport:
        raise RuntimeError(f"no room for version {update.policy_version}")

    async def close(self) -> None:
        pass


def test_a_load_that_breaks_ends_the_evaluation_with_its_error(config, model, monkeypatch):
    monkeypatch.setattr("actors.evaluation.make_engine", lambda *_, **__: _Broken())
    elsewhere = changed(config, "generator", engine="sglang", sglang={"url": "http://127.0.0.1:1"})
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(asyncio.wait_for(greedy_groups(elsewhere, model), DEADLINE_S))
    assert raised.group_contains(RuntimeError, match="no room for version 0")


def test_each_prompt_of_a_short_file_is_scored_once(config, model, tmp_path):
    file = rows(tmp_path / "rows.jsonl", "c12=", "c123=", "c7=")
    config = changed(config, "data", eval_source=file, num_eval_prompts=32)
    assert asyncio.run(evaluate(config, model))["num_prompts"] == 3


def test_a_prompt_that_training_drops_is_left_out_and_counted(config, model, tmp_path):
    file = rows(tmp_path / "rows.jsonl", "c12=", "c" + "9" * 20 + "=")
    config = changed(config, "data", eval_source=file, truncation="drop")
    found = asyncio.run(evaluate(config, model))
    assert (found["num_prompts"], found["num_too_long"]) == (1, 1)
    file = rows(tmp_path / "rows.jsonl", "c" + "9" * 20 + "=")
    with pytest.raises(ConfigError, match="none of the 1 held-out prompts fits"):
        asyncio.run(evaluate(config, model))


@pytest.mark.parametrize("source", [None, "rows.jsonl"])
def test_the_prompts_do_not_depend_on_the_seed_of_the_run(config, model, tmp_path, source):
    if source is not None:
        prompts = (f"c{number}=" for number in range(10, 60))
        config = changed(config, "data", eval_source=rows(tmp_path / source, *prompts))
    other = changed(config, "run", seed=7)
    assert answers(config, model) == answers(other, model)


@pytest.mark.long
def test_on_a_terminal_an_evaluation_shows_how_far_it_is(config, model, tmp_path):
    command = [STREAMRL, "evaluate", "--config", str(tmp_path / "run.yaml")]
    terminal = Terminal([*command, "--checkpoint", str(model)])
    try:
        assert terminal.end() == 0
        assert "evaluating" in terminal.output
        assert "32/32" in terminal.output
        assert '"num_prompts": 32' in terminal.output
    finally:
        terminal.kill()
