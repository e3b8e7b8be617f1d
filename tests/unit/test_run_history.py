"""Whatever learners do to a run's folder, the surviving history trains each prompt exactly once.

The ledger, the records and the choice of a checkpoint are the real ones; only the model is not.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buffers.audit import audit
from buffers.ledger.entries import Event
from buffers.ledger.ledger import Ledger
from learners.checkpoints.records import RunRecords
from learners.checkpoints.restore import choose, resumed
from learners.session import LearnerState
from streamrl.checkpoints import abandoned
from streamrl.checkpoints.abandoned import read_abandoned
from streamrl.checkpoints.find import list_checkpoints, newest, path_of
from streamrl.cli.buffer.audit import check_folder, event_faults
from streamrl.config import RunConfig
from streamrl.errors import CheckpointWriteError, FencedError
from streamrl.samples.files import validation_files, write_validation
from streamrl.tracking.jsonl import TRAINED_FILE, read_metrics
from streamrl.types import GroupHeader
from tests.research.faults import remove_all, remove_newest
from tests.training import make_config

GROUPS_PER_STEP, EVERY, KEEP = 2, 2, 2


class FakeTrainer:
    """Its checkpoint is one small file; the disk may be full."""

    critic = None
    optimizer = None

    def __init__(self) -> None:
        self.policy = self.credit = self.model = self
        self.is_full = False

    def save(self, folder: Path, config: RunConfig, weights: Mapping[str, Any]) -> None:
        (folder / "model.safetensors").write_bytes(b"weights")
        if self.is_full:
            raise OSError(28, "No space left on device")

    def parameters(self) -> dict[str, Any]:
        return {}

    buffers = parameters

    def state_dict(self) -> dict[str, Any]:
        return {}


class KilledError(Exception):
    """The learner was killed here."""


class LearnerProcess:
    """What a learner does to its folder and to the ledger, without training."""

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        start = choose(config.run)
        self.records, self.ledger, self.trainer = RunRecords(config, start), ledger, FakeTrainer()
        self.version = start.policy_version
        books = start.checkpoint.books if start.checkpoint else LearnerState().books
        self.term = ledger.attach(self.version, books)
        self.books = ledger.books()

    def begin(self) -> None:
        self.records.begin()

    def step(self, lease: str) -> None:
        for number in range(3 * GROUPS_PER_STEP):
            granted = self.ledger.lease(f"{lease}/{number}", 0.0, 10.0)
            if granted is not None:
                header = make_header(granted.prompt_index, self.version)
                self.ledger.put(granted.lease_id, header, 0.0)
            # What is of an abandoned future is dropped, which admits other leases.
            loan = self.ledger.take(GROUPS_PER_STEP, self.version, self.term)
            if number >= GROUPS_PER_STEP - 1 and loan:
                break
        assert len(loan) == GROUPS_PER_STEP
        self.version += 1
        self.ledger.advance(self.version, self.term)
        self.books = self.ledger.books()
        metrics = {"buffer/books_balanced": float(self.books.balanced)}
        self.records.log(self.version, loan, metrics)

    def save(self) -> None:
        self.records.save(self.trainer, LearnerState(self.version, self.books)).result()

    def acknowledge(self) -> None:
        self.ledger.acknowledge(self.version, self.term)


def make_header(prompt_index: int, version: int) -> GroupHeader:
    return GroupHeader(
        group_id=str(prompt_index),
        prompt_index=prompt_index,
        environment="test",
        oldest_version=version,
        newest_version=version,
        lengths=(1,),
        response_lengths=(1,),
        rewards=(0.0,),
    )


def make_run(folder: Path, **run: Any) -> RunConfig:
    return make_config(
        run={"folder": folder, "name": "run", "resume": "auto", **run},
        learner={
            "groups_per_step": GROUPS_PER_STEP,
            "checkpoint": {"every": EVERY, "keep": KEEP},
        },
    )


class HistoryMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="history-"))
        self.run = self.folder / "run"
        self.num_leases = 0
        self.lose_the_buffer()
        self.start()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.learner.records.close()
            shutil.rmtree(self.folder)

    def lose_the_buffer(self) -> None:
        self.ledger = Ledger(groups_per_step=GROUPS_PER_STEP, max_staleness=1)
        self.events: list[Event] = []
        self.ledger.entries.subscribers.append(self.events.append)

    def start(self, resume: str = "auto") -> None:
        self.learner = LearnerProcess(make_run(self.folder, resume=resume), self.ledger)
        self.learner.begin()

    @rule(steps=st.integers(1, 3))
    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.num_leases += 1
            self.learner.step(f"lease {self.num_leases}")

    @precondition(lambda self: self.learner.version)
    @rule(acknowledges=st.booleans())
    def save(self, acknowledges: bool) -> None:
        if path_of(self.run, self.learner.version).exists():
            return
        self.learner.save()
        assert path_of(self.run, self.learner.version).exists()
        if acknowledges:
            self.learner.acknowledge()

    @precondition(lambda self: self.learner.version)
    @rule()
    def fail_to_save(self) -> None:
        before = list_checkpoints(self.run)
        self.learner.trainer.is_full = True
        with pytest.raises(CheckpointWriteError):
            self.learner.save()
        self.learner.trainer.is_full = False
        assert list_checkpoints(self.run) == before

    @rule(loses_buffer=st.booleans())
    def kill(self, loses_buffer: bool) -> None:
        if loses_buffer:
            self.lose_the_buffer()
        self.start()

    @precondition(lambda self: self.all_checkpoints())
    @rule(data=st.data())
    def resume_from_any_checkpoint(self, data: st.DataObject) -> None:
        self.start(str(data.draw(st.sampled_from(self.all_checkpoints()))))

    @precondition(lambda self: self.all_checkpoints())
    @rule(data=st.data(), is_switched=st.booleans())
    def kill_while_another_history_begins(self, data: st.DataObject, is_switched: bool) -> None:
        path = str(data.draw(st.sampled_from(self.all_checkpoints())))
        real = abandoned.write_history

        def killed(*arguments: Any) -> None:
            if is_switched:
                real(*arguments)
            raise KilledError

        with patch.object(abandoned, "write_history", killed), pytest.raises(KilledError):
            self.start(path)
        config = resumed(make_run(self.folder, resume=path))
        self.start(str(config.run.resume))

    @precondition(lambda self: len(list_checkpoints(self.run)) > 1)
    @rule(file=st.sampled_from(["model.safetensors", "state.json", "manifest.json"]))
    def damage_the_newest(self, file: str) -> None:
        path = list_checkpoints(self.run)[-1]
        (path / file).write_bytes(b"")
        self.start()
        assert self.learner.version < int(path.name.removeprefix("step-"))

    @precondition(lambda self: list_checkpoints(self.run))
    @rule(remove=st.sampled_from([remove_newest, remove_all]))
    def remove_checkpoints(self, remove: Callable[[Path], str]) -> None:
        before = self.learner.version
        remove(self.run)
        self.start()
        assert self.learner.version <= before

    @precondition(lambda self: self.learner.version)
    @rule()
    def an_older_learner_saves_late(self) -> None:
        late, before = self.learner, list_checkpoints(self.run)
        self.start()
        with pytest.raises(FencedError):
            late.save()
        assert list_checkpoints(self.run) == before

    def all_checkpoints(self) -> list[Path]:
        aside = (self.folder / "run" / "abandoned").glob("*/step-*")
        whole = [p for p in aside if all(f.stat().st_size for f in p.iterdir())]
        return sorted([*list_checkpoints(self.run), *whole])

    @invariant()
    def the_surviving_history_trains_each_prompt_once(self) -> None:
        lines = read_metrics(self.run / TRAINED_FILE)
        assert [line["step"] for line in lines] == list(range(1, self.learner.version + 1))
        trained = [index for line in lines for index in line["prompt_indices"]]
        assert len(set(trained)) == len(trained)
        books = self.ledger.books()
        still_open = set(books.open_prompt_indices)
        assert not still_open & set(trained)
        assert still_open | set(trained) == set(range(books.next_prompt_index))

    @invariant()
    def the_audit_finds_the_run_in_order(self) -> None:
        assert check_folder(self.run, audit(self.events), None, GROUPS_PER_STEP).faults == ()

    @invariant()
    def the_checkpoints_are_those_of_the_surviving_history(self) -> None:
        assert len(list_checkpoints(self.run)) <= KEEP
        checkpoint = newest(self.run)
        assert checkpoint is None or checkpoint.policy_version <= self.learner.version


HistoryMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20)
TestHistory = HistoryMachine.TestCase


def run_to(learner: LearnerProcess, version: int) -> LearnerProcess:
    learner.begin()
    while learner.version < version:
        learner.step(f"lease {id(learner)} {learner.version}")
        if learner.version % 10 == 0:
            learner.save()
            learner.acknowledge()
    return learner


def make_ledger() -> tuple[Ledger, list[Event]]:
    ledger, events = Ledger(groups_per_step=GROUPS_PER_STEP, max_staleness=1), list[Event]()
    ledger.entries.subscribers.append(events.append)
    return ledger, events


def test_a_run_that_goes_on_from_an_older_checkpoint_trains_nothing_twice(tmp_path, caplog):
    ledger, events = make_ledger()
    config = make_run(tmp_path)
    keep_4 = config.learner.model_copy(
        update={"checkpoint": config.learner.checkpoint.model_copy(update={"keep": 4})}
    )
    run_to(LearnerProcess(config.model_copy(update={"learner": keep_4}), ledger), 40)
    path = path_of(tmp_path / "run", 10)
    run_to(LearnerProcess(make_run(tmp_path, resume=str(path)), ledger), 25)
    assert "the checkpoints at version 20, 30, 40 and the lines of the steps after 10" in (
        caplog.text
    )
    assert [path.name[-2:] for path in list_checkpoints(tmp_path / "run")] == ["10", "20"]
    run_to(LearnerProcess(config, ledger), 45)
    lines = read_metrics(tmp_path / "run" / TRAINED_FILE)
    assert [line["step"] for line in lines] == list(range(1, 46))
    trained = sorted(index for line in lines for index in line["prompt_indices"])
    assert trained == list(range(90))
    (aside,) = read_abandoned(tmp_path / "run")
    assert (aside.policy_version, aside.versions) == (10, (20, 30, 40))
    kept = read_metrics(tmp_path / "run" / aside.folder / TRAINED_FILE)
    assert [line["step"] for line in kept] == list(range(1, 41))
    check = check_folder(tmp_path / "run", audit(events), None, GROUPS_PER_STEP)
    assert check.faults == ()
    assert check.findings[2].startswith("abandoned after step 10: the checkpoints at version 20")


def test_a_learner_that_was_taken_over_writes_no_line_between_those_of_its_successor(tmp_path):
    ledger, _ = make_ledger()
    older = run_to(LearnerProcess(make_run(tmp_path), ledger), 3)
    run_to(LearnerProcess(make_run(tmp_path), ledger), 2)
    with pytest.raises(FencedError, match="another learner goes on"):
        older.records.log(4, [make_header(8, 3)], {})
    lines = read_metrics(tmp_path / "run" / TRAINED_FILE)
    assert [line["step"] for line in lines] == [1, 2]


def test_the_responses_of_abandoned_validations_are_no_longer_the_runs(tmp_path):
    """Else those of later versions would seem the newest, and the run's own be deleted first."""
    ledger, _ = make_ledger()
    config, run = make_run(tmp_path), tmp_path / "run"

    def validate(*versions: int) -> None:
        for version in versions:
            write_validation(run, version, (), keep=9)

    def names(folder: Path) -> list[int]:
        return [int(path.stem) for path in validation_files(folder)]

    run_to(LearnerProcess(config, ledger), 25)
    validate(0, 10, 20, 24)
    run_to(LearnerProcess(config, ledger), 21)
    assert names(run) == [0, 10, 20]
    run_to(LearnerProcess(make_run(tmp_path, resume=str(path_of(run, 10))), ledger), 11)
    (aside,) = read_abandoned(run)
    assert (names(run), names(run / aside.folder)) == ([0, 10], [20])


def test_a_learner_that_is_killed_as_it_goes_back_loses_no_response_of_a_validation(tmp_path):
    """As its history has become the surviving one, and nothing else has been changed."""
    ledger, _ = make_ledger()
    config, run = make_run(tmp_path), tmp_path / "run"
    run_to(LearnerProcess(config, ledger), 20)
    write_validation(run, 20, (), keep=9)
    real = abandoned.begin

    def killed(*arguments: Any) -> None:
        real(*arguments)
        raise KilledError

    back = make_run(tmp_path, resume=str(path_of(run, 10)))
    with patch.object(abandoned, "begin", killed), pytest.raises(KilledError):
        LearnerProcess(back, ledger).begin()
    run_to(LearnerProcess(resumed(back), ledger), 11)
    (aside,) = read_abandoned(run)
    assert [path.name for path in validation_files(run / aside.folder)] == ["00000020.jsonl"]
    assert not validation_files(run)


def test_a_checkpoint_of_the_run_that_is_named_in_another_way_is_the_runs(tmp_path):
    """Else its lines and its record would be taken for those of another run."""
    ledger, _ = make_ledger()
    run_to(LearnerProcess(make_run(tmp_path), ledger), 20)
    own = path_of(tmp_path / "run", 10)
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoints")
    for named in (
        tmp_path / "link" / own.name,
        tmp_path / "run" / ".." / own.relative_to(tmp_path),
    ):
        start = choose(make_run(tmp_path, resume=str(named)).run)
        assert start.checkpoint is not None
        assert (start.checkpoint.path, start.lines_from) == (own, tmp_path / "run")
        assert (start.history.base, start.history.resume) == (str(own), str(named))


def test_checkpoints_on_another_disk_are_set_aside(tmp_path):
    """As a person has them who links the folder to a larger disk."""
    elsewhere = Path(tempfile.mkdtemp(prefix="checkpoints-", dir="/dev/shm"))
    try:
        if elsewhere.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is on the disk of the temporary files")
        run = tmp_path / "run"
        run.mkdir()
        (run / "checkpoints").symlink_to(elsewhere)
        ledger, _ = make_ledger()
        run_to(LearnerProcess(make_run(tmp_path), ledger), 20)
        back = make_run(tmp_path, resume=str(path_of(run, 10)))
        run_to(LearnerProcess(back, ledger), 11)
        (aside,) = read_abandoned(run)
        assert (run / aside.folder / "step-00000020" / "manifest.json").exists()
        assert [path.name for path in list_checkpoints(run)] == ["step-00000010"]
    finally:
        shutil.rmtree(elsewhere)


@pytest.mark.parametrize(("remove", "version"), [(remove_newest, 10), (remove_all, 0)])
def test_a_run_whose_checkpoints_are_removed_goes_on_and_its_audit_is_in_order(
    tmp_path, remove, version
):
    """The books count the steps twice whose groups the buffer had freed for a checkpoint."""
    ledger, events = make_ledger()
    config = make_run(tmp_path)
    run_to(LearnerProcess(config, ledger), 20)
    remove(config.run.path)
    learner = LearnerProcess(config, ledger)
    assert learner.version == version
    run_to(learner, 20)
    assert ledger.books().acknowledged > 20 * GROUPS_PER_STEP
    for kept in (audit(events), None):
        assert check_folder(config.run.path, kept, 20, GROUPS_PER_STEP).faults == ()


def test_a_buffer_that_is_lost_after_a_checkpoint_was_forgets_why_the_books_count_twice(tmp_path):
    ledger, _ = make_ledger()
    config = make_run(tmp_path)
    run_to(LearnerProcess(config, ledger), 10)
    remove_newest(config.run.path)
    run_to(LearnerProcess(config, ledger), 10)
    # Nothing is set aside: the checkpoint that is gone on from is the newest.
    ledger, events = make_ledger()
    learner = LearnerProcess(config, ledger)
    run_to(learner, 12)
    assert ledger.books().acknowledged + ledger.books().trained > 12 * GROUPS_PER_STEP
    assert check_folder(config.run.path, audit(events), None, GROUPS_PER_STEP).faults == ()


@pytest.mark.parametrize("has_lines", [True, False])
def test_a_run_may_start_from_a_checkpoint_of_another_run(tmp_path, has_lines):
    other_ledger, _ = make_ledger()
    run_to(LearnerProcess(make_run(tmp_path / "other"), other_ledger), 20)
    source = path_of(tmp_path / "other" / "run", 10)
    if not has_lines:
        source = source.rename(tmp_path / "alone")
    ledger, events = make_ledger()
    fork = make_run(tmp_path, resume=str(source))
    run_to(LearnerProcess(fork, ledger), 13)
    # Killed before its first checkpoint, it starts from the same one again.
    run_to(LearnerProcess(resumed(fork), ledger), 23)
    lines = read_metrics(tmp_path / "run" / TRAINED_FILE)
    assert [line["step"] for line in lines] == list(range(1 if has_lines else 11, 24))
    assert sorted(i for line in lines[-13:] for i in line["prompt_indices"]) == [*range(20, 46)]
    run = tmp_path / "run"
    assert check_folder(run, audit(events), None, GROUPS_PER_STEP).faults == ()
    found = newest(run)
    steps = {line["step"]: line["prompt_indices"] for line in lines}
    assert list(event_faults(audit(events), steps, found, has_ended=True)) == []


def test_the_checkpoint_that_a_run_started_from_is_newer_than_its_own_older_ones(tmp_path):
    ledger, _ = make_ledger()
    run_to(LearnerProcess(make_run(tmp_path), ledger), 20)
    older = make_run(tmp_path, resume=str(path_of(tmp_path / "run", 10)))
    run_to(LearnerProcess(older, ledger), 11)
    (aside,) = read_abandoned(tmp_path / "run")
    back = make_run(tmp_path, resume=str(tmp_path / "run" / aside.folder / "step-00000020"))
    run_to(LearnerProcess(back, ledger), 21)
    assert [path.name[-2:] for path in list_checkpoints(tmp_path / "run")] == ["10"]
    again = LearnerProcess(resumed(back), ledger)
    assert again.version == 20
    run_to(again, 31)
    assert [path.name[-2:] for path in list_checkpoints(tmp_path / "run")] == ["10", "30"]
    lines = read_metrics(tmp_path / "run" / TRAINED_FILE)
    assert sorted(i for line in lines for i in line["prompt_indices"]) == [*range(62)]
