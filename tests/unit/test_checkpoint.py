"""A run that goes on from a checkpoint is the run that never stopped."""

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from actors.evaluation import named_model, newest_model
from actors.make_model import make_tokenizer
from learners.checkpoints.contents import save_shards, whole_tensors
from learners.checkpoints.restore import choose, restore
from learners.checkpoints.writer import CheckpointWriter
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.checkpoints.abandoned import begin
from streamrl.checkpoints.find import (
    list_checkpoints,
    newest,
    read_checkpoint,
    require_steps_to_launch,
)
from streamrl.checkpoints.history import History, new_history, read_history, write_history
from streamrl.checkpoints.retention import Validated, delete_older
from streamrl.config import RunConfig
from streamrl.config.learner import CheckpointSettings
from streamrl.errors import (
    CheckpointWriteError,
    ConfigError,
    DamagedCheckpointError,
    FencedError,
    OtherReleaseError,
    UnreadableCheckpointError,
)
from streamrl.types import Books, DropReason, ranges_of
from tests.checkpoints import HISTORY as WRITTEN, write_checkpoint
from tests.full_disk import files_no_larger_than
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


def make_run(
    tmp_path: Path,
    advantage: str = "grpo",
    checkpoint: Mapping[str, object] | None = None,
    lora: Mapping[str, object] | None = None,
    **run: object,
) -> RunConfig:
    model = tmp_path / "model"
    if not model.exists():
        save_llama(model)
        make_tokenizer("abc").save_pretrained(model)
    return make_config(
        model={"path": str(model)},
        run={"folder": tmp_path, "name": "run", **run},
        learner={
            "checkpoint": {"keep": 2, **(checkpoint or {})},
            "device": "cpu",
            **({"lora": lora} if lora else {}),
        },
        algorithm={
            "advantage": advantage,
            "kl_reward": {"coef": 0.1, "controller": "adaptive"},
            "reward": {"norm_mean": "running", "norm_std": "running"},
        },
    )


HISTORY = new_history()


def save(
    config: RunConfig,
    trainer: Trainer,
    state: LearnerState,
    history: History = HISTORY,
    means: Mapping[str, float] | None = None,
) -> Path:
    writer = CheckpointWriter(config, history)
    try:
        return writer.save(trainer, state, means).result()
    finally:
        writer.close()


def make_trainer(config: RunConfig) -> Trainer:
    critic = Critic.from_config(config) if config.algorithm.needs_values else None
    return Trainer(config, Policy.from_config(config), Policy.from_config(config), critic)


@pytest.mark.parametrize(
    ("advantage", "lora"), [("grpo", None), ("gae", None), ("grpo", {"rank": 4, "dropout": 0.1})]
)
def test_the_next_step_is_exactly_the_one_that_would_have_come(tmp_path, advantage, lora):
    config = make_run(tmp_path, advantage, lora=lora)
    trainer = make_trainer(config)
    for seed in range(2):
        trainer.step(make_batch(seed))
    path = save(config, trainer, LearnerState(2, BOOKS))
    metrics = trainer.step(make_batch(2))
    random_number = torch.rand(1)
    torch.manual_seed(99)
    again = make_trainer(config)
    assert restore(read_checkpoint(path), config, again) == LearnerState(2, BOOKS)
    repeated = again.step(make_batch(2))
    for name in metrics:
        if name.startswith(("actor/", "critic/", "advantage/")):
            assert repeated[name] == metrics[name], name
    assert torch.rand(1) == random_number
    for name, parameter in trainer.policy.parameters().items():
        assert torch.equal(parameter, again.policy.parameters()[name]), name


def test_a_checkpoint_without_a_critic_does_not_serve_one(tmp_path):
    config = make_run(tmp_path)
    path = save(config, make_trainer(config), LearnerState(1, BOOKS))
    with pytest.raises(ConfigError, match=r"has no critic, which algorithm\.advantage gae"):
        restore(read_checkpoint(path), config, make_trainer(make_run(tmp_path, "gae")))


def names(config: RunConfig) -> list[str]:
    return [path.name for path in list_checkpoints(config.run.path)]


def test_the_newest_are_kept_and_half_written_ones_are_not_seen(tmp_path):
    config = make_run(tmp_path, resume="auto")
    assert newest(config.run.path) is None
    trainer = make_trainer(config)
    for version in (1, 2, 10):
        path = save(config, trainer, LearnerState(version))
    folder = config.run.path / "checkpoints"
    (folder / ".step-00000011.unfinished").mkdir()
    start = choose(config.run)
    assert start.checkpoint is not None
    assert (start.checkpoint.path, start.policy_version) == (path, 10)
    assert names(config) == ["step-00000002", "step-00000010"]


def test_a_checkpoint_is_kept_although_an_abandoned_one_has_a_higher_number(tmp_path):
    config = make_run(tmp_path)
    trainer, other = make_trainer(config), new_history()
    for version in (10, 20, 30):
        save(config, trainer, LearnerState(version), other)
    write_history(config.run.path / "checkpoints", HISTORY)
    for version in (5, 15, 25):
        save(config, trainer, LearnerState(version))
        assert f"step-{version:08d}" in names(config)
    assert names(config) == [f"step-{n:08d}" for n in (15, 20, 25, 30)]
    found = newest(config.run.path)
    assert found is not None
    assert found.policy_version == 25


def test_a_learner_whose_history_does_not_survive_saves_and_deletes_nothing(tmp_path):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    for version in (1, 2):
        save(config, trainer, LearnerState(version))
    write_history(config.run.path / "checkpoints", new_history())
    with pytest.raises(FencedError, match="another learner goes on with"):
        save(config, trainer, LearnerState(3))
    assert names(config) == ["step-00000001", "step-00000002"]


def test_a_learner_that_was_taken_over_writes_into_no_other_checkpoint(tmp_path, monkeypatch):
    """It hangs once its folder is made, and wakes while its successor saves the same version."""
    config = make_run(tmp_path)
    older, newer, other = make_trainer(config), make_trainer(config), new_history()
    newer.step(make_batch())
    begun = []

    def interleaved(folder, tensors, group):
        begun.append((folder, tensors, group))
        if len(begun) == 1:
            write_history(config.run.path / "checkpoints", other)
            save(config, newer, LearnerState(1), other)
        else:
            save_shards(folder, tensors, group)
            save_shards(*begun[0])

    monkeypatch.setattr("learners.checkpoints.writer.save_shards", interleaved)
    with pytest.raises(FencedError, match="another learner goes on with"):
        save(config, older, LearnerState(1))
    path = path_of(config, 1)
    assert read_checkpoint(path).history == other
    saved = whole_tensors(path, "model/")
    for name, parameter in newer.policy.parameters().items():
        assert torch.equal(saved[name], parameter), name
    assert {p.name for p in path.parent.iterdir()} == {path.name, "history.json"}


def test_where_to_resume_from(tmp_path):
    config = make_run(tmp_path)
    path = save(config, make_trainer(config), LearnerState(3))
    assert choose(config.run).checkpoint is None
    named = choose(make_run(tmp_path, resume=str(path)).run).checkpoint
    assert named is not None
    assert named.path == path
    with pytest.raises(ConfigError, match=r"run\.resume: .*nowhere is no checkpoint"):
        choose(make_run(tmp_path, resume=str(tmp_path / "nowhere")).run)


@pytest.mark.parametrize("num_bytes", [0, 100, 5_000, 60_000])
def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_ones_as_they_are(
    tmp_path, num_bytes
):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    trainer.step(make_batch())
    for version in (1, 2):
        save(config, trainer, LearnerState(version))
    with (
        files_no_larger_than(num_bytes),
        pytest.raises(CheckpointWriteError, match=r"step-00000003 cannot be saved: .*(27|large)"),
    ):
        save(config, trainer, LearnerState(3))
    assert names(config) == ["step-00000001", "step-00000002"]
    left = {path.name for path in (config.run.path / "checkpoints").iterdir()}
    assert left == {"step-00000001", "step-00000002"}
    found = newest(config.run.path)
    assert found is not None
    assert (found.policy_version, found.damaged) == (2, ())
    save(config, trainer, LearnerState(3))
    assert names(config) == ["step-00000002", "step-00000003"]


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-7]),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "missing": lambda file: file.unlink(),
    "one bit": lambda file: file.write_bytes(
        bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]
    ),
    "not JSON": lambda file: file.write_bytes(b"{" * file.stat().st_size),
}
FILES = (
    *("model.safetensors", "shards/rank-00000.safetensors", "state.json", "manifest.json"),
    *("config.json", "tokenizer.json"),
)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> RunConfig:
    config = make_run(tmp_path_factory.mktemp("saved"), resume="auto")
    trainer = make_trainer(config)
    trainer.step(make_batch())
    for version in (10, 20):
        save(config, trainer, LearnerState(version, BOOKS))
    write_history(config.run.path / "checkpoints", HISTORY)
    return config


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_next_older_complete_checkpoint_is_taken_with_a_warning(
    tmp_path, two_checkpoints, caplog, file, damage
):
    shutil.copytree(two_checkpoints.run.path, tmp_path / "run")
    run = two_checkpoints.run.model_copy(update={"folder": tmp_path})
    config = two_checkpoints.model_copy(update={"run": run})
    newer, older = (path_of(config, version) for version in (20, 10))
    DAMAGES[damage](newer / file)
    start = choose(config.run)
    assert start.checkpoint is not None
    assert start.checkpoint.path == older
    (record,) = caplog.records
    assert record.message.startswith(f"the checkpoint {newer} is damaged: {file} ")
    assert record.message.endswith(
        f"; going on from {older}: the steps 11 to 20, and any after them, are trained again"
    )
    run = config.run.model_copy(update={"resume": newer})
    with pytest.raises(DamagedCheckpointError, match=f"{newer.name} is damaged: {file} "):
        choose(run)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("unread", ["state.json", "manifest.json", ".."])
def test_a_checkpoint_that_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch, number, unread):
    _, newer = (write_checkpoint(tmp_path, version, BOOKS) for version in (10, 20))
    make_unreadable(monkeypatch, newer.parent if unread == ".." else newer / unread, number)
    with pytest.raises(UnreadableCheckpointError, match=r"cannot be read \(.*: see to its storage"):
        newest(tmp_path)


@pytest.mark.parametrize("unread", ["state.json", "manifest.json"])
def test_an_older_checkpoint_that_cannot_be_read_is_not_deleted(tmp_path, monkeypatch, unread):
    first, second, third = (write_checkpoint(tmp_path, version, BOOKS) for version in (1, 2, 3))
    make_unreadable(monkeypatch, first / unread, errno.ESTALE)
    delete_older(tmp_path, WRITTEN, 3, CheckpointSettings(keep=1), Validated())
    assert list_checkpoints(tmp_path) == [first, third]
    assert not second.exists()


def test_a_step_is_saved_though_the_folder_of_checkpoints_cannot_be_listed(tmp_path, monkeypatch):
    first, second = (write_checkpoint(tmp_path, version, BOOKS) for version in (1, 2))
    with monkeypatch.context() as patched:
        make_unreadable(patched, first.parent, errno.EACCES)
        delete_older(tmp_path, WRITTEN, 2, CheckpointSettings(keep=1), Validated())
    assert list_checkpoints(tmp_path) == [first, second]


def make_unreadable(monkeypatch: pytest.MonkeyPatch, place: Path, number: int) -> None:
    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def refused(path: Path, *arguments: Any, **named: Any) -> Any:
            if path == place:
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *arguments, **named)

        return refused

    for name in ("stat", "open", "iterdir"):
        monkeypatch.setattr(Path, name, failing(getattr(Path, name)))


def path_of(config: RunConfig, version: int) -> Path:
    return config.run.path / "checkpoints" / f"step-{version:08d}"


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew_by_itself(tmp_path):
    config = make_run(tmp_path, resume="auto")
    trainer = make_trainer(config)
    for path in [save(config, trainer, LearnerState(version)) for version in (1, 2)]:
        (path / "model.safetensors").write_bytes(b"")
    sentence = r"no checkpoint of .* is complete: .*00002.*00001.*--new"
    with pytest.raises(ConfigError, match=sentence):
        choose(config.run)


def test_an_evaluation_takes_the_checkpoint_that_the_run_goes_on_from(tmp_path, caplog):
    config = make_run(tmp_path)
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        newest_model(config)
    trainer = make_trainer(config)
    older, newer = (save(config, trainer, LearnerState(version)) for version in (1, 2))
    (newer / "model.safetensors").write_bytes(b"")
    assert newest_model(config) == older
    assert "step-00000002 is damaged: model.safetensors has 0 bytes" in caplog.text
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors has 0 bytes"):
        named_model(newer)
    assert named_model(Path(config.model.path)) == Path(config.model.path)
    write_history(config.run.path / "checkpoints", new_history())
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        newest_model(config)


def test_a_tokenizer_that_cannot_be_written_is_no_crash(tmp_path):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000)))
    make_tokenizer(text).save_pretrained(config.model.path)
    size = (Path(config.model.path) / "tokenizer.json").stat().st_size
    with (
        files_no_larger_than(size - 1),
        pytest.raises(CheckpointWriteError, match=r"step-00000001 cannot be saved: .*os error 27"),
    ):
        save(config, trainer, LearnerState(1))
    assert list_checkpoints(config.run.path) == []


def contents_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_checkpoint_that_is_saved_again_is_replaced_after_it_is_complete(tmp_path):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    path = save(config, trainer, LearnerState(1))
    before = contents_of(path)
    with files_no_larger_than(1_000), pytest.raises(CheckpointWriteError):
        save(config, trainer, LearnerState(1))
    assert contents_of(path) == before
    trainer.step(make_batch())
    save(config, trainer, LearnerState(1))
    assert (path / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert [p.name for p in path.parent.iterdir()] == ["step-00000001"]


def test_a_checkpoint_that_cannot_be_replaced_has_its_name_again(tmp_path, monkeypatch):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    path = save(config, trainer, LearnerState(1))
    before, rename = contents_of(path), Path.rename

    def failing(source: Path, target: Path) -> Path:
        if source.suffix == ".unfinished":
            raise OSError(errno.EIO, "Input/output error")
        return rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", failing)
        for _ in range(2):
            with pytest.raises(CheckpointWriteError, match="cannot be saved"):
                save(config, trainer, LearnerState(1))
            assert contents_of(path) == before
    save(config, trainer, LearnerState(1))
    assert [p.name for p in path.parent.iterdir()] == ["step-00000001"]


def test_a_history_that_cannot_be_read_is_named(tmp_path):
    config = make_run(tmp_path, resume="auto")
    save(config, make_trainer(config), LearnerState(1))
    (config.run.path / "checkpoints" / "history.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"run\.resume: .*history\.json cannot be read"):
        choose(config.run)
    assert read_history(tmp_path) is None


def test_a_checkpoint_loads_in_transformers_and_holds_no_pickle(tmp_path):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    trainer.step(make_batch())
    path = save(config, trainer, LearnerState(1, BOOKS))
    suffixes = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert suffixes == {".json", ".safetensors"}
    # Who may read the one may read the other.
    assert len({file.stat().st_mode for file in path.rglob("*") if file.is_file()}) == 1
    assert json.loads((path / "state.json").read_text())["policy_version"] == 1
    loaded = Policy.from_config(config, path)
    for name, parameter in trainer.policy.parameters().items():
        assert torch.equal(parameter, loaded.parameters()[name])


@pytest.mark.parametrize("is_of_the_hub", [False, True])
def test_a_checkpoint_has_the_generation_settings_of_its_model(
    tmp_path, monkeypatch, is_of_the_hub
):
    """Transformers reads these, and does not write them: a temperature without `do_sample`."""
    config = make_run(tmp_path)
    model, settings = Path(config.model.path), '{"eos_token_id": [1, 2], "temperature": 0.9}'
    (model / "generation_config.json").write_text(settings)
    trainer = make_trainer(config)
    if is_of_the_hub:
        repository = tmp_path / "hub" / "models--somebody--tiny"
        shutil.copytree(model, repository / "snapshots" / "1234")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("1234")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        config = config.with_values(model={"path": "somebody/tiny"})
    path = save(config, trainer, LearnerState(1))
    assert (path / "generation_config.json").read_text() == settings


def test_a_checkpoint_has_the_tokenizer_of_its_model_as_it_is(tmp_path):
    """Transformers 5 renames this class in what it writes, and 4 does not know the new name."""
    config = make_run(tmp_path)
    file = Path(config.model.path) / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings))
    path = save(config, make_trainer(config), LearnerState(1))
    assert (path / file.name).read_text() == file.read_text()
    assert AutoTokenizer.from_pretrained(path).get_vocab() == make_tokenizer("abc").get_vocab()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"intermediate_size": 48},
            r"mlp.* has the shape \(64, 32\), in model\.path .* \(48, 32\)",
        ),
        ({"num_hidden_layers": 3}, r"model\.layers\.2.* none, in model\.path"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1.* in model\.path .* none"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, overrides, sentence):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    trainer.step(make_batch())
    path = save(config, trainer, LearnerState(1))
    other = make_run(tmp_path / "other")
    save_llama(Path(other.model.path), **overrides)
    with pytest.raises(ConfigError, match=f"is of another model: .*{sentence}"):
        restore(read_checkpoint(path), other, make_trainer(other))


def test_a_checkpoint_of_another_release_is_refused(tmp_path):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    trainer.step(make_batch(0))
    path = save(config, trainer, LearnerState(1, BOOKS))
    state = json.loads((path / "state.json").read_text())
    del state["format"]
    old = {"next_sequence": 9, "epoch": 1, "open_runs": [[3, 4]]}
    (path / "state.json").write_text(json.dumps({**state, "books": old}))
    with pytest.raises(OtherReleaseError) as refusal:
        read_checkpoint(path)
    assert str(refusal.value) == (
        f"run.resume: the checkpoint {path} has format 1, and this release knows format 4: another "
        "release of StreamRL wrote it; start the run anew with --new, or go on with that release"
    )


def test_the_step_after_a_save_is_not_in_it(tmp_path):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    trainer.step(make_batch(0))
    before = {name: p.detach().clone() for name, p in trainer.policy.parameters().items()}
    writer = CheckpointWriter(config, HISTORY)
    # The thread is busy, so that nothing is written before the step.
    is_over = threading.Event()
    writer._thread.submit(is_over.wait)
    saving = writer.save(trainer, LearnerState(1))
    trainer.step(make_batch(1))
    is_over.set()
    again = make_trainer(config)
    restore(read_checkpoint(saving.result()), config, again)
    writer.close()
    for name, parameter in again.policy.parameters().items():
        assert torch.equal(parameter, before[name]), name
        assert not torch.equal(parameter, trainer.policy.parameters()[name]), name


def test_a_learner_on_a_cpu_begins_nothing_on_a_gpu_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = make_run(tmp_path)
    path = save(config, make_trainer(config), LearnerState(1, BOOKS))
    again = make_trainer(config)
    assert restore(read_checkpoint(path), config, again) == LearnerState(1, BOOKS)
    assert not torch.cuda.is_initialized()


def test_one_writer_saves_each_state_as_it_is_then(tmp_path):
    config = make_run(tmp_path)
    trainer = make_trainer(config)
    writer = CheckpointWriter(config, HISTORY)
    for step in range(1, 4):
        trainer.step(make_batch(step))
        expected = {name: t.detach().clone() for name, t in trainer.policy.parameters().items()}
        path = writer.save(trainer, LearnerState(step, BOOKS)).result()
        saved = whole_tensors(path, "model/")
        for name, parameter in expected.items():
            assert torch.equal(saved[name], parameter), (step, name)
    writer.close()


def test_a_save_that_a_signal_would_not_leave_the_time_for_is_said_once(
    tmp_path, monkeypatch, caplog
):
    config = make_run(tmp_path)
    trainer, writer = make_trainer(config), CheckpointWriter(config, HISTORY)
    for step, left_s in ((1, 600.0), (2, 0.001), (3, 0.001)):
        monkeypatch.setattr("learners.checkpoints.writer.force_s", lambda _, left_s=left_s: left_s)
        writer.save(trainer, LearnerState(step)).result()
        slow = [r.message for r in caplog.records if "a checkpoint took" in r.message]
        assert len(slow) == min(step - 1, 1)
    writer.close()
    assert re.search(r"0\.001 s after a signal, .*: set run\.stop_s to \d+$", slow[0])


def test_what_a_kill_has_left_behind_is_removed_by_the_next_learner(tmp_path):
    path = write_checkpoint(tmp_path, 1, BOOKS)
    history = read_checkpoint(path).history
    for kind in ("replaced", "unfinished"):
        shutil.copytree(path, path.with_name(f".{path.name}.{history.learner_id}.{kind}"))
    begin(tmp_path, history, 1, "", ())
    assert {p.name for p in path.parent.iterdir()} == {path.name, "history.json"}
    assert newest(tmp_path) is not None


def test_an_adapter_goes_on_with_the_scale_that_it_was_trained_with(tmp_path):
    config = make_run(tmp_path, lora={"rank": 4, "alpha": 16})
    path = save(config, make_trainer(config), LearnerState(1, BOOKS))
    other = make_run(tmp_path, lora={"rank": 4, "alpha": 32})
    sentence = r"learner\.lora\.alpha: was 32, and the adapter of .* with 16: .*; set it to 16"
    with pytest.raises(ConfigError, match=sentence):
        restore(read_checkpoint(path), other, make_trainer(other))
    with pytest.raises(ConfigError, match=sentence):
        require_steps_to_launch(other, resume=True, new=False)


def test_an_adapter_goes_on_with_the_model_that_it_was_trained_on(tmp_path):
    config = make_run(tmp_path, lora={"rank": 4})
    path = save(config, make_trainer(config), LearnerState(1, BOOKS))
    moved = (tmp_path / "model").rename(tmp_path / "moved")
    other = config.with_values(model={"path": str(moved)})
    restore(read_checkpoint(path), other, make_trainer(other))
    weights = load_file(moved / "model.safetensors")
    save_file({name: tensor + 0.1 for name, tensor in weights.items()}, moved / "model.safetensors")
    sentence = r"model\.path: the weights of .*moved are not those that the adapter of .*-00000001"
    with pytest.raises(ConfigError, match=sentence):
        restore(read_checkpoint(path), other, make_trainer(other))
    with pytest.raises(ConfigError, match=sentence):
        require_steps_to_launch(other, resume=True, new=False)


def test_a_reference_policy_of_other_weights_is_told(tmp_path, caplog):
    config = make_run(tmp_path)
    path = save(config, make_trainer(config), LearnerState(1, BOOKS))
    restore(read_checkpoint(path), config, make_trainer(config))
    assert "reference policy" not in caplog.text
    save_llama(tmp_path / "model", seed=1)
    restore(read_checkpoint(path), config, make_trainer(config))
    assert "not those that the run of" in caplog.text
