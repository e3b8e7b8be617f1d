"""The final checkpoint is scored once: by the validator, if it samples what would be evaluated."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.display.numbers import held_out_rows
from streamrl.cli.processes import run_commands
from streamrl.cli.processes.run_commands import evaluate_final
from streamrl.config import RunConfig
from streamrl.run_folder import read_json
from streamrl.tracking.jsonl import VALIDATION_FILE, JsonlTracker
from streamrl.types import Books
from tests.checkpoints import write_checkpoint


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that were started."""
    commands: list[str] = []
    monkeypatch.setattr(run_commands, "call_for", lambda _, command, **__: commands.append(command))
    return commands


def make_run(folder: Path, validation: dict[str, Any], validated: dict[int, float]) -> RunConfig:
    """One with a checkpoint of version 6, and these validations."""
    config = RunConfig.model_validate(
        {
            "run": {"folder": folder, "name": "run"},
            "model": {"path": "m"},
            "data": {"source": "train.jsonl", "eval_source": "held_out.jsonl"},
            "validation": validation,
        }
    )
    write_checkpoint(config.run.path, 6, Books())
    tracker = JsonlTracker(config.run.path / VALIDATION_FILE, first_step=0)
    for version, mean in validated.items():
        metrics = {"mean@1": mean, "num_prompts": 20.0, "response_length_mean": 3.5}
        counts = {"num_failed": 2.0, "num_too_long": 0.0}
        tracker.log({f"validation/{n}": v for n, v in (metrics | counts).items()}, version)
    tracker.close()
    return config


def test_what_the_validator_found_is_the_evaluation(tmp_path, called):
    config = make_run(tmp_path, {}, {0: 0.107, 6: 0.477})
    evaluate_final(config)
    assert called == []
    assert read_json(config.run.path / "evaluation.json") == {
        "model": str(config.run.path / "checkpoints" / "step-00000006"),
        "num_prompts": 20,
        "num_failed": 2,
        "greedy_reward_mean": 0.477,
        "response_length_mean": 3.5,
        "by": "validator",
    }
    text = "0.107 -> 0.477 (greedy, 20 prompts, 2 failed; versions 0 and 6)"
    rows = held_out_rows(config)
    assert rows == [("held-out reward", text)]


@pytest.mark.parametrize(
    ("validation", "validated"),
    [
        ({}, {0: 0.1, 5: 0.2}),
        ({}, {}),
        ({"num_samples": 4, "temperature": 0.8}, {6: 0.2}),
        ({"every": 0}, {}),
    ],
)
def test_else_the_final_checkpoint_is_evaluated(tmp_path, called, validation, validated):
    evaluate_final(make_run(tmp_path, validation, validated))
    assert called == ["evaluate"]


def test_nothing_is_scored_where_no_evaluation_is_asked_for(tmp_path, called):
    config = make_run(tmp_path, {}, {6: 0.2})
    evaluate_final(
        config.model_copy(update={"run": config.run.model_copy(update={"evaluate": False})})
    )
    assert called == []
    assert not (config.run.path / "evaluation.json").exists()
