"""A run that goes on from a checkpoint is the run that never stopped."""

import json
from pathlib import Path

import pytest
import torch

from actors.make_model import make_tokenizer
from learners import checkpoint
from learners.critic import Critic
from learners.policy import Policy
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, OtherReleaseError
from streamrl.types import Books, DropReason, ranges_of
from tests.tiny_model import save_llama
from tests.training import make_batch, make_config

BOOKS = Books(
    granted=9,
    buffered=2,
    trained=3,
    acknowledged=3,
    dropped={DropReason.STALE: 1},
    next_prompt_index=9,
    open_ranges=ranges_of((3, 8)),
)


def make_run(tmp_path: Path, advantage: str = "grpo", **run: object) -> RunConfig:
    model = tmp_path / "model"
    if not model.exists():
        save_llama(model)
        make_tokenizer("abc").save_pretrained(model)
    return make_config(
        model={"path": str(model)},
        run={"folder": tmp_path, "name": "run", **run},
        learner={"checkpoint": {"keep": 2}, "device": "cpu"},
        algorithm={
            "advantage": advantage,
            "kl_reward": {"coef": 0.1, "controller": "adaptive"},
            "reward": {"norm_mean": "running", "norm_std": "running"},
        },
    )


def make_trainer(config: RunConfig, path: Path | None = None) -> Trainer:
    critic = Critic(config, Policy.from_config(config)) if config.algorithm.needs_values else None
    return Trainer(config, Policy.from_config(config, path), Policy.from_config(config), critic)


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_the_next_step_is_exactly_the_one_that_would_have_come(tmp_path, advantage):
    config = make_run(tmp_path, advantage)
    trainer = make_trainer(config)
    for seed in range(2):
        trainer.step(make_batch(seed))
    path = checkpoint.save(config, trainer, LearnerState(2, BOOKS))
    metrics = trainer.step(make_batch(2))
    random_number = torch.rand(1)
    torch.manual_seed(99)
    again = make_trainer(config, path)
    assert checkpoint.restore(path, again) == LearnerState(2, BOOKS)
    repeated = again.step(make_batch(2))
    for name in metrics:
        if name.startswith(("actor/", "critic/", "advantage/")):
            assert repeated[name] == metrics[name], name
    assert torch.rand(1) == random_number
    for name, parameter in trainer.policy.parameters().items():
        assert torch.equal(parameter, again.policy.parameters()[name]), name


def test_a_checkpoint_without_a_critic_does_not_serve_one(tmp_path):
    config = make_run(tmp_path)
    path = checkpoint.save(config, make_trainer(config), LearnerState(1, BOOKS))
    with pytest.raises(ConfigError, match=r"has no critic, which algorithm\.advantage gae"):
        checkpoint.restore(path, make_trainer(make_run(tmp_path, "gae")))


def test_the_newest_are_kept_and_half_written_ones_are_not_seen(tmp_path):
    config = make_run(tmp_path, resume="auto")
    assert checkpoint.find(config) is None
    trainer = make_trainer(config)
    for version in (1, 2, 10):
        newest = checkpoint.save(config, trainer, LearnerState(version))
    folder = config.run.path / "checkpoints"
    (folder / ".step-00000011.unfinished").mkdir()
    (folder / "step-00000012").mkdir()
    assert checkpoint.find(config) == newest
    assert [p.name for p in checkpoint.list_checkpoints(folder)] == [
        "step-00000002",
        "step-00000010",
    ]


def test_where_to_resume_from(tmp_path):
    config = make_run(tmp_path)
    path = checkpoint.save(config, make_trainer(config), LearnerState(3))
    assert checkpoint.find(config) is None
    assert checkpoint.find(make_run(tmp_path, resume=str(path))) == path
    with pytest.raises(ConfigError, match=r"run\.resume: .*nowhere is no checkpoint"):
        checkpoint.find(make_run(tmp_path, resume=str(tmp_path / "nowhere")))


def test_a_checkpoint_loads_in_transformers_and_holds_no_pickle(tmp_path):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    trainer.step(make_batch())
    path = checkpoint.save(config, trainer, LearnerState(1, BOOKS))
    suffixes = {file.suffix for file in path.iterdir()}
    assert suffixes == {".json", ".safetensors"}
    assert json.loads((path / "state.json").read_text())["policy_version"] == 1
    loaded = Policy.from_config(config, path)
    for name, parameter in trainer.policy.parameters().items():
        assert torch.equal(parameter, loaded.parameters()[name])


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    trainer.step(make_batch())
    path = checkpoint.save(config, trainer, LearnerState(1))
    other = make_run(tmp_path / "other")
    save_llama(Path(other.model.path), intermediate_size=48)
    with pytest.raises(ConfigError, match=r"is of another model: .*mlp.* does not fit"):
        checkpoint.restore(path, make_trainer(other))


def test_a_checkpoint_of_another_release_is_refused(tmp_path):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    trainer.step(make_batch(0))
    path = checkpoint.save(config, trainer, LearnerState(1, BOOKS))
    state = json.loads((path / "state.json").read_text())
    del state["format"]
    old = {"next_sequence": 9, "epoch": 1, "open_runs": [[3, 4]]}
    (path / "state.json").write_text(json.dumps({**state, "books": old}))
    with pytest.raises(OtherReleaseError) as refusal:
        checkpoint.restore(path, make_trainer(config, path))
    assert str(refusal.value) == (
        f"run.resume: the checkpoint {path} has format 1, and this release knows format 2: another "
        "release of StreamRL wrote it; start the run anew with --new, or go on with that release"
    )
