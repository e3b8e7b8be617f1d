"""Prompts that other processes read: the hub's library offline, and workers that filter rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest

from actors.make_model import make_tokenizer
from actors.prompts.fitting import fitting_rows
from actors.prompts.order import FirstPrompts
from actors.rendering.renderer import ChatRenderer
from streamrl.cli.main import main
from streamrl.config import RunConfig
from streamrl.interfaces import Prompt

_OFFLINE = """
import sys
from actors.prompts import open_prompts
from streamrl.config.data import DataSettings
data = DataSettings(source={"path": "datasets:someone/sums", "split": sys.argv[1]}, shuffle=False)
print(open_prompts(data, 0)[1].content, end="")
"""


def test_a_name_of_the_hub_is_read_from_the_cache_without_a_network(tmp_path):
    rows = str(tmp_path / "sums.jsonl")
    lines = (json.dumps({"prompt": f"hub{i}", "answer": "a"}) for i in range(3))
    Path(rows).write_text("\n".join(lines))
    datasets.load_dataset("json", data_files=rows, cache_dir=str(tmp_path))
    (built,) = (path.parent for path in tmp_path.glob("json/*/*/*/dataset_info.json"))
    cached = tmp_path / "someone___sums" / "default" / "0.0.0" / "abc"
    cached.parent.mkdir(parents=True)
    built.rename(cached)
    (cached / "json-train.arrow").rename(cached / "sums-train.arrow")
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path)}

    def read(split: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", _OFFLINE, split]
        return subprocess.run(command, env=offline, capture_output=True, text=True, timeout=240)

    assert read("train").stdout == "hub1"
    assert 'datasets:someone/sums: Unknown split "tset"' in read("tset").stderr


class Lengths:
    def __getitem__(self, prompt_index: int) -> Prompt:
        return Prompt("a" * (1 + prompt_index % 7), "", {"not": "sent", "what": object})


@pytest.mark.long
def test_several_processes_filter_as_one_does(tmp_path):
    make_tokenizer("a").save_pretrained(tmp_path / "model")
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tmp_path / "model")},
            "data": {
                "source": "own.py:Lengths",
                "max_prompt_length": 3,
                "truncation": "filter",
                "filter_workers": 2,
            },
        }
    )
    renderer = ChatRenderer.from_config(config)
    kept = fitting_rows(config, renderer, FirstPrompts(Lengths(), 1000), 0)
    assert kept.tolist() == np.flatnonzero(np.arange(1000) % 7 < 3).tolist()


@pytest.mark.long
def test_groups_without_a_signal_are_left_out_of_a_run_on_several_sources(launch, tmp_path, capsys):
    lines = (json.dumps({"prompt": f"c{n}=", "answer": str(n)}) for n in range(1, 4000, 37))
    (tmp_path / "numbers.jsonl").write_text("\n".join(lines))
    task = "{path: copy, weight: 3, kwargs: {min_length: 1, max_length: 2}}"
    run = launch(
        f"--set=data.source=[{task}, {{path: {tmp_path}/numbers.jsonl, weight: 1}}]",
        "--set=data.source_kwargs={}",
        "--set=data.max_prompt_length=5",
        "--set=data.truncation=filter",
        "--set=algorithm.dynamic_sampling={max_refills: 3}",
        "--set=generator.oversample={num_siblings: 1}",
        "--set=run.max_steps=6",
    )
    assert run.end() == 0, run.output
    last = run.lines[-1]
    assert last["learner/policy_version"] == 6
    num_left_out = last["buffer/dropped_uniform"]
    # Three for each that was kept, and for each of the first step's.
    num_kept = last["buffer/granted"] - num_left_out
    assert 0 < num_left_out <= 3 * 4 + 3 * num_kept
    assert last["buffer/books_balanced"] == 1
    for name in ("dropped_uniform_tokens_frac", "discarded_tokens_frac"):
        assert max(line[f"fairness/{name}"] for line in run.lines) > 0
    assert all(line["reward/groups_alike_frac"] == 0 for line in run.lines)
    assert "rows fit into data.max_prompt_length" in run.log("generator-0")
    assert main(["buffer", "audit", str(run.folder)]) == 0
    assert "dropped (uniform)" in capsys.readouterr().out
