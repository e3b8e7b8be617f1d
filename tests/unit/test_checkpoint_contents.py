"""What of a learner is saved and loaded, and which checkpoints are kept."""

import json
import math

import pytest
import torch

from actors.evaluation import named_model
from learners.checkpoints.contents import saved_tensors
from learners.checkpoints.records import RunRecords
from learners.checkpoints.restore import choose, for_loading, restore, resumed
from learners.objective.credit import CreditAssigner
from learners.session import LearnerState
from streamrl.checkpoints.find import read_checkpoint
from streamrl.checkpoints.retention import Validated, delete_older
from streamrl.errors import CheckpointWriteError, ConfigError
from streamrl.types import GroupHeader
from tests.full_disk import files_no_larger_than
from tests.records import make_group
from tests.training import make_batch, make_config
from tests.unit.test_checkpoint import BOOKS, HISTORY, make_run, make_trainer, names, save


@pytest.mark.parametrize(("best_is", "best"), [("highest", 20), ("lowest", 10)])
def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path, best_is, best):
    settings = {"keep": 1, "keep_best": 1, "best_is": best_is}
    config = make_run(tmp_path, checkpoint=settings)
    trainer = make_trainer(config)
    for version, mean in ((10, 0.1), (20, 0.9), (30, 0.5), (40, 0.4)):
        save(config, trainer, LearnerState(version), means={"reward/mean": mean})
    save(config, trainer, LearnerState(50))
    assert names(config) == [f"step-{version:08d}" for version in (best, 50)]


def test_a_loaded_optimizer_is_on_the_host_before_the_first_step(tmp_path, monkeypatch):
    config = make_run(tmp_path, "gae")
    trainer, moved = make_trainer(config), []
    trainer.step(make_batch())
    path = save(config, trainer, LearnerState(1))
    monkeypatch.setattr(
        "learners.checkpoints.restore.move_state",
        lambda optimizer, to_host: moved.append((optimizer, len(optimizer.state), to_host)),
    )
    other = make_trainer(config)
    offloading = config.with_values(learner={"offload": {"optimizer": True}})
    restore(read_checkpoint(path), offloading, other)
    assert [(one, to_host) for one, _, to_host in moved] == [(o, True) for o in other.optimizers]
    assert all(num_loaded for _, num_loaded, _ in moved)


def test_a_checkpoint_that_was_removed_after_it_was_saved_is_no_crash(tmp_path):
    config = make_run(tmp_path)
    delete_older(config.run.path, HISTORY, 10, config.learner.checkpoint, Validated())


def test_the_mean_of_a_metric_is_of_the_steps_since_the_checkpoint_before(tmp_path, caplog):
    config = make_run(tmp_path, checkpoint={"keep_best": 1, "best_by": "reward/mena"})
    settings = config.learner.checkpoint.model_copy(update={"best_by": "reward/mean"})
    records = RunRecords(config, choose(config.run))
    records.begin()
    trainer = make_trainer(config)
    records.log(1, [GroupHeader.of(make_group(0))], {"reward/mean": 0.5})
    records.save(trainer, LearnerState(1)).result()
    sentence = "learner.checkpoint.best_by: no metric 'reward/mena'; did you mean 'reward/mean'?"
    assert sentence in caplog.messages
    learner = config.learner.model_copy(update={"checkpoint": settings})
    records._config = config.model_copy(update={"learner": learner})
    records.log(2, [GroupHeader.of(make_group(2))], {"reward/mean": 1.0})
    with files_no_larger_than(1_000), pytest.raises(CheckpointWriteError):
        records.save(trainer, LearnerState(2)).result()
    # What the failed one would have said is said by the next.
    records.log(3, [GroupHeader.of(make_group(3))], {"reward/mean": 2.0})
    path = records.save(trainer, LearnerState(3)).result()
    records.log(4, [GroupHeader.of(make_group(4))], {"reward/mean": 3.0})
    after = records.save(trainer, LearnerState(4)).result()
    records.close()
    means = [json.loads((p / "state.json").read_text())["means"] for p in (path, after)]
    assert means == [{"reward/mean": 1.5}, {"reward/mean": 3.0}]


def test_a_step_that_measured_nothing_is_in_no_mean_and_no_checkpoint_is_best_by_it(tmp_path):
    """NaN is above and below nothing: as a mean it would decide by where it stands."""
    config = make_run(tmp_path, checkpoint={"keep": 1, "keep_best": 1})
    records, trainer = RunRecords(config, choose(config.run)), make_trainer(config)
    records.begin()
    for step, mean in enumerate((math.nan, 0.9, 0.1, 0.2), start=1):
        records.log(step, [GroupHeader.of(make_group(step))], {"reward/mean": mean})
        records.save(trainer, LearnerState(step)).result()
    records.close()
    assert names(config) == [f"step-{version:08d}" for version in (2, 4)]


def test_only_the_weights_of_another_runs_checkpoint(tmp_path):
    """The optimizer begins anew, and so do running moments and random generators."""
    trainer = make_trainer(config := make_run(tmp_path))
    trainer.step(make_batch())
    path = save(config, trainer, LearnerState(7, BOOKS))
    again = make_trainer(only := make_run(tmp_path, checkpoint={"load_contents": ["model"]}))
    random_state = torch.get_rng_state()
    assert restore(read_checkpoint(path), only, again) == LearnerState(7, BOOKS)
    assert again.optimizer.state == {}
    assert again.credit.state_dict() == make_trainer(only).credit.state_dict()
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, parameter in trainer.policy.parameters().items():
        assert torch.equal(parameter, again.policy.parameters()[name]), name


def test_a_checkpoint_holds_what_contents_names(tmp_path):
    small = make_run(tmp_path, checkpoint={"contents": ["model"]}, evaluate=False)
    trainer = make_trainer(small)
    trainer.step(make_batch())
    path = save(small, trainer, LearnerState(1))
    assert not (path / "model.safetensors").exists()
    assert {name.partition("/")[0] for name in saved_tensors(path)} == {"model"}
    restore(read_checkpoint(path), small, make_trainer(small))
    whole = make_run(tmp_path)
    sentence = r"load_contents: .*00001 has no 'optimizer', since it was saved with .* \[model\]"
    with pytest.raises(ConfigError, match=sentence):
        restore(read_checkpoint(path), whole, make_trainer(whole))
    with pytest.raises(ConfigError, match=r"has no Hugging Face model, .*`streamrl export RUN`"):
        named_model(path)


def test_what_is_loaded_of_a_named_checkpoint_is_not_said_of_later_ones(tmp_path):
    base = make_run(tmp_path / "other")
    trainer = make_trainer(base)
    trainer.step(make_batch())
    named = save(base, trainer, LearnerState(7, BOOKS))
    config = make_run(tmp_path, resume=str(named), checkpoint={"load_contents": ["model"]})
    records = RunRecords(config, choose(config.run))
    records.begin()
    later = records.save(trainer, LearnerState(8, BOOKS)).result()
    records.close()
    for again in (config, resumed(config)):
        for path, contents in ((named, ("model",)), (later, ("model", "optimizer", "extra"))):
            loaded = for_loading(again, read_checkpoint(path)).learner.checkpoint.loaded
            assert loaded == contents


@pytest.mark.parametrize(
    ("saved", "then", "coef"),
    [
        ({}, {"coef": 0.1}, 0.1),
        ({"coef": 0.1}, {"coef": 0.5}, 0.5),
        ({}, {"coef": 0.1, "controller": "adaptive"}, 0.1),
        ({"coef": 0.3, "controller": "adaptive"}, {"coef": 0.1, "controller": "adaptive"}, 0.3),
        ({"coef": 0.3, "controller": "adaptive"}, {"coef": 0.1}, 0.1),
    ],
)
def test_only_a_controller_that_adapts_goes_on_with_the_coefficient_of_a_checkpoint(
    saved, then, coef
):
    before, after = (
        CreditAssigner(make_config(algorithm={"kl_reward": section}).algorithm)
        for section in (saved, then)
    )
    after.load_state_dict(before.state_dict())
    assert after._kl.value == coef


@pytest.mark.parametrize("contents", [["optimizer"], []])
@pytest.mark.parametrize("name", ["contents", "load_contents"])
def test_contents_without_the_model_are_refused(tmp_path, name, contents):
    with pytest.raises(ValueError, match="must contain model"):
        make_run(tmp_path, checkpoint={name: contents})


def test_an_evaluation_at_the_end_needs_the_model_in_the_last_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"contents has no hf_model: .* run\.evaluate=false"):
        make_run(tmp_path, checkpoint={"contents": ["model"]})


def test_the_best_checkpoint_by_validation_is_kept_and_one_that_is_being_validated(tmp_path):
    best_by = "validation/mean@1"
    config = make_run(tmp_path, checkpoint={"keep": 1, "keep_best": 1})
    checkpoint = config.learner.checkpoint.model_copy(update={"best_by": best_by})
    learner = config.learner.model_copy(update={"checkpoint": checkpoint})
    config = config.model_copy(update={"learner": learner})
    validating = {30}
    records = RunRecords(config, choose(config.run), lambda: validating)
    records.begin()
    trainer = make_trainer(config)
    for version, mean in ((10, 0.2), (20, 0.1), (30, None), (40, None)):
        records.save(trainer, LearnerState(version)).result()
        if mean is not None:
            records.log_validation(version, {best_by: mean})
    assert names(config) == [f"step-{version:08d}" for version in (10, 30, 40)]
    records.log_validation(30, {best_by: 0.9})
    validating = set()
    records.save(trainer, LearnerState(50)).result()
    records.close()
    assert names(config) == [f"step-{version:08d}" for version in (30, 50)]
    again = RunRecords(config, choose(resumed_config(config).run))
    again.begin()
    again.close()
    assert again.validated[30] == {best_by: 0.9}


def resumed_config(config):
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})
