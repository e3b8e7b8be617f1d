"""Epochs over a file become a number of steps when a configuration is read."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from streamrl.config import RunConfig, load_config, render, to_yaml
from streamrl.errors import ConfigError

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1000)]
STEP = "learner.groups_per_step=32"


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{path: m}}\ndata: {{source: {tmp_path}/rows.jsonl}}\n")
    lines = [json.dumps(row) for row in ROWS]
    # A blank line is no row.
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:500], "  ", *lines[500:]]) + "\n\n")
    return path


def load(run_file: Path, *overrides: str) -> RunConfig:
    return load_config(run_file, [STEP, *overrides], environment={}).config


@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        (["run.total_epochs=1"], 31),
        (["run.total_epochs=2"], 62),
        (["run.total_epochs=0.5"], 15),
        (["run.total_epochs=20"], 625),
        (["run.total_epochs=2", "run.max_steps=40"], 40),
        (["run.total_epochs=2", "run.max_steps=400"], 62),
        # The default of run.max_steps, 100, is not what ends this one.
        (["run.total_epochs=4", "learner.optimizer.warmup_steps=110"], 125),
    ],
)
def test_the_run_ends_after_its_epochs_or_its_steps_whichever_is_less(
    run_file, settings, num_steps
):
    run = load(run_file, *settings).run
    assert (run.max_steps, run.total_epochs) == (num_steps, None)


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_rows_are_counted_in_every_format(run_file, suffix):
    source = run_file.with_name(f"rows{suffix}")
    if suffix == ".json":
        source.write_text(json.dumps(ROWS[:64]))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:64]), source)
    settings = [f"data.source={source}", "run.total_epochs=3"]
    assert load(run_file, *settings).run.max_steps == 6


def test_the_resolved_file_keeps_the_number_without_the_data(run_file, tmp_path):
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(load(run_file, "run.total_epochs=2")))
    (tmp_path / "rows.jsonl").unlink()
    assert load_config(resolved, environment={}).config.run.max_steps == 62


def test_the_printed_configuration_says_where_the_number_comes_from(run_file):
    printed = render(load_config(run_file, [STEP, "run.total_epochs=2"], environment={}))
    lines = {line.split(":")[0].strip(): line.split("# ")[-1] for line in printed.splitlines()}
    assert lines["max_steps"] == "run.total_epochs 2 of 1000 rows, 32 a step"
    assert lines["total_epochs"] == "2 epochs are in run.max_steps (--set run.total_epochs)"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["data.source=addition"], "run.total_epochs: was 2, and data.source addition has no end"),
        (
            ["data.source=mine.py:Prompts"],
            "mine.py:Prompts has no end; .* run.max_steps",
        ),
        (["data.source=no.jsonl"], "^data.source: cannot read no.jsonl: No such"),
        (
            ["learner.groups_per_step=2001"],
            "run.total_epochs 2 of 1000 rows is less than a step of learner.groups_per_step 2001",
        ),
        (["run.total_epochs=0"], "run.total_epochs: was 0; input should be greater than 0"),
        (["learner.optimizer.warmup_steps=70"], "warmup_steps 70 is longer than run.max_steps 62"),
    ],
)
def test_epochs_that_cannot_be_counted_are_refused(run_file, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load(run_file, "run.total_epochs=2", *settings)


def test_epochs_that_nothing_has_counted_are_refused():
    sections = {
        "model": {"path": "m"},
        "data": {"source": "rows.jsonl"},
        "run": {"total_epochs": 2},
    }
    with pytest.raises(ValueError, match=r"run.total_epochs 2 is not counted in steps"):
        RunConfig.model_validate(sections)
