"""Checkpoints of real processes: killed while they write, resumed, and with other numbers of ranks.

Recorded groups stand for buffer and generators.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.make_model import make_tokenizer
from learners.batch.packing import share
from learners.batch.training_batch import TrainingBatch
from learners.checkpoints.contents import whole_tensors
from learners.checkpoints.restore import restore
from learners.checkpoints.writer import CheckpointWriter
from learners.parallel.mesh import make_mesh
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.checkpoints.find import newest, path_of, read_checkpoint
from streamrl.checkpoints.history import History
from streamrl.config import RunConfig
from streamrl.types import GroupHeader
from tests.ranks import run_ranks
from tests.system.resumed_steps import ALGORITHM
from tests.tiny_model import save_llama
from tests.training import make_config, make_groups

DEADLINE_S = 540


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("model") / "model")
    make_tokenizer("abc").save_pretrained(folder)
    return folder


def run_module(name: str, *arguments: object) -> str:
    command = [sys.executable, "-m", f"tests.system.{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kill_costs_only_the_save_that_it_hits(tmp_path: Path, model: Path):
    """At every file operation between the first byte and the rename, and after it."""
    output = run_module("killed_saves", tmp_path / "run", model)
    before, after = (int(word) for word in output.split() if word.isdigit())
    assert before >= 20, output
    assert after >= 1, output


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path, model: Path):
    """With a critic, running moments, a KL controller, resampling and every random generator."""
    straight = run_module("resumed_steps", tmp_path / "straight", model, 4)
    parts = [run_module("resumed_steps", tmp_path / "cut", model, step) for step in (2, 4)]
    assert "".join(parts) == straight
    assert len({json.dumps(json.loads(line)[2]) for line in straight.splitlines()}) == 4
    tensors, states = zip(
        *(saved_of(tmp_path / run, 4) for run in ("straight", "cut")), strict=True
    )
    assert tensors[0].keys() == tensors[1].keys()
    assert {name.partition("/")[0] for name in tensors[0]} == {
        *("model", "optimizer", "critic", "critic_optimizer")
    }
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name
    assert states[0] == states[1]


def saved_of(run: Path, version: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
    path = path_of(run, version)
    record = json.loads((path / "state.json").read_text())
    return load_file(path / "shards" / "rank-00000.safetensors"), [
        record[name] for name in ("credit", "random")
    ]


def train(folder: Path, model: Path, first: int, last: int) -> None:
    """On every rank: go on from the checkpoint of `first`, if that is not 0, and save `last`."""
    config = configure(folder, model)
    mesh = make_mesh(config.learner.mesh, torch.device("cpu"))
    ranks = Ranks.of(torch.distributed.group.WORLD)
    trainer = Trainer(
        config,
        Policy.from_config(config, mesh=mesh),
        Policy.from_config(config, mesh=mesh),
        Critic.from_config(config, mesh),
        ranks,
    )
    if first:
        restore(read_checkpoint(path_of(config.run.path, first)), config, trainer)
    for step in range(first, last):
        groups = make_groups(step, 5)
        headers = tuple(map(GroupHeader.of, groups))
        mine = {h.prompt_index for h in share(headers, ranks.count, ranks.index)}
        own = [group for group in groups if group.prompt_index in mine]
        trainer.step(TrainingBatch.shared(headers, own, step, ranks))
    writer = CheckpointWriter(config, History(learner_id="first"))
    writer.save(trainer, LearnerState(last)).result()
    writer.close()


def configure(folder: Path, model: Path) -> RunConfig:
    return make_config(
        model={"path": str(model)},
        run={"folder": folder, "name": "run"},
        learner={"device": "cpu", "checkpoint": {"keep": 9}},
        # With the usual eps AdamW makes a step of a gradient that is zero but for its rounding.
        optimizer={"eps": 1e-5},
        algorithm={**ALGORITHM, "pf_ppo": None},
    )


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, model: Path):
    """Two ranks, then one, then four: as one rank alone within 1e-5; loading changes no bit."""
    (tmp_path / "alone").mkdir()
    run_ranks(train, 1, folder_of(tmp_path, "alone"), tmp_path / "alone", model, 0, 3)
    saved = []
    for num_ranks, first, last in ((2, 0, 1), (1, 1, 2), (4, 2, 3), (2, 3, 3)):
        folder = folder_of(tmp_path, f"{num_ranks}-{first}")
        run_ranks(train, num_ranks, folder, tmp_path, model, first, last)
        found = newest(tmp_path / "run")
        assert found is not None
        shards = list((found.path / "shards").iterdir())
        assert len(shards) == num_ranks
        saved.append(whole_tensors(found.path, ""))
    assert_equal(saved[3], saved[2])
    assert_equal(saved[2], whole_tensors(path_of(tmp_path / "alone" / "run", 3), ""), 1e-5)


def assert_equal(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], gap: float = 0.0
) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=gap), name


def folder_of(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / f"ranks-{name}"
    folder.mkdir()
    return folder
