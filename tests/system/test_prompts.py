"""Prompts that other processes read: the hub's library offline, and workers that filter rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np

from actors.make_model import make_tokenizer
from actors.prompts.fitting import fitting_rows
from actors.prompts.streams import FirstPrompts
from actors.rendering.renderer import ChatRenderer
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
