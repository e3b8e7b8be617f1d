"""The audit of a run finds every way in which its folder can be wrong, and nothing in a right one.

The plan of kills is a function of its seed.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from buffers.audit import audit as audit_events
from streamrl.checkpoints.find import list_checkpoints, newest, path_of
from streamrl.cli.buffer.audit import RunAudit, audit_run, event_faults
from streamrl.cli.main import main
from streamrl.config import RunConfig, to_yaml
from streamrl.types import Books, DropReason, ranges_of
from tests.checkpoints import write_checkpoint
from tests.research import chaos, soak
from tests.research.faults import FaultKind, plan, remove_all, remove_newest
from tests.research.script import run_script
from tests.unit.test_audit import events

BOOKS = Books(
    granted=8,
    trained=2,
    acknowledged=2,
    dropped={DropReason.STALE: 1, DropReason.EXPIRED: 2},
    buffered=1,
    next_prompt_index=6,
    learner_term=1,
    open_ranges=ranges_of((5,)),
)
TRAINED = [[0, 2], [3, 4]]


def make_run(folder: Path, trained: list[list[int]], books: Books) -> RunConfig:
    config = RunConfig.model_validate(
        {
            "run": {"folder": folder, "name": "run", "max_steps": 2},
            "model": {"path": "m"},
            "data": {"source": "addition"},
            "learner": {"groups_per_step": 2},
        }
    )
    run = config.run.path
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    write_checkpoint(run, 2, books)
    write_lines(run / "metrics.jsonl", [{"buffer/books_balanced": 1.0}] * 2)
    write_trained(run, trained)
    return config


def write_trained(run: Path, trained: Sequence[Sequence[int]]) -> None:
    """Each step with tokens of the version that it trains."""
    bound = {"max_staleness": 1, "overdue": "wait"}
    versions = ({"oldest_version": i, "newest_version": i, **bound} for i in range(len(trained)))
    lines = [{"prompt_indices": p, **v} for p, v in zip(trained, versions, strict=True)]
    write_lines(run / "trained.jsonl", lines)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    numbered = ({"step": step, **line} for step, line in enumerate(lines, 1))
    path.write_text("".join(json.dumps(line) + "\n" for line in numbered))


def audit(config: RunConfig) -> RunAudit:
    return audit_run(config.run.path, complete=config)


def test_a_run_that_kept_its_promises_has_no_faults(tmp_path):
    result = audit(make_run(tmp_path, TRAINED, BOOKS))
    assert result.faults == ()
    finding = result.findings[1]
    assert "2 steps trained 4 prompts; of 6 granted 1 are open and 1 dropped" in finding


def test_lines_without_versions_as_older_releases_wrote_them_are_no_faults(tmp_path):
    config = make_run(tmp_path, TRAINED, BOOKS)
    lines = [{"prompt_indices": prompt_indices} for prompt_indices in TRAINED]
    write_lines(config.run.path / "trained.jsonl", lines)
    result = audit(config)
    assert (result.faults, len(result.findings)) == ((), 2)


def test_what_an_abandoned_history_has_dropped_and_a_step_has_trained_since_is_not_dropped(
    tmp_path,
):
    dropped = {DropReason.STALE: 3, DropReason.EXPIRED: 2}
    books = msgspec.structs.replace(
        BOOKS, dropped=dropped, granted=BOOKS.granted + 2, learner_term=2
    )
    finding = audit(make_run(tmp_path, TRAINED, books)).findings[1]
    assert "of 6 granted 1 are open and 1 dropped for good" in finding


def test_a_run_is_audited_once_it_has_a_checkpoint(tmp_path, capsys):
    run = make_run(tmp_path, [[0, 2], [2, 3]], BOOKS).run.path
    assert main(["buffer", "audit", str(run)]) == 1
    assert "prompt 2 was trained by the steps [1, 2]" in capsys.readouterr().out
    later = [*TRAINED, [5, 7]]
    write_trained(run, later)
    assert main(["buffer", "audit", str(run)]) == 0
    assert capsys.readouterr().out.endswith("in order\n")
    (run / "learner.json").write_text('{"activity": "has ended", "policy_version": 3}')
    assert main(["buffer", "audit", str(run)]) == 1
    assert "the last checkpoint is of version 2, not of 3" in capsys.readouterr().out
    (run / "config.yaml").touch()
    old = '{"activity": "has ended", "policy_version": 3, "time_s": 1.0}'
    (run / "learner.json").write_text(old)
    assert main(["buffer", "audit", str(run)]) == 0, "a launch has begun since"
    capsys.readouterr()
    (run / "learner.json").unlink()
    (run / "checkpoints" / "step-00000002").rename(tmp_path / "elsewhere")
    assert main(["buffer", "audit", str(run)]) == 2
    assert "nothing to audit yet" in capsys.readouterr().err


def test_a_step_after_the_checkpoint_that_trains_again_what_is_in_it_is_named(tmp_path):
    run = make_run(tmp_path, [*TRAINED, [1, 5]], BOOKS).run.path
    assert audit_run(run).faults == (
        "trained after version 2, yet finished in its checkpoint: [1]",
    )


def test_steps_that_the_newest_checkpoint_contains_and_no_line_names_are_missing(tmp_path):
    """What retention by number leaves after an older checkpoint was resumed from."""
    run = make_run(tmp_path, TRAINED, BOOKS).run.path
    books = msgspec.structs.replace(
        BOOKS, granted=12, acknowledged=6, next_prompt_index=10, open_ranges=ranges_of((5,))
    )
    write_checkpoint(run, 4, books)
    assert audit_run(run).faults[:3] == (
        "metrics.jsonl lacks the steps [3, 4]",
        "trained.jsonl lacks the steps [3, 4]",
        "prompts are lost: neither trained nor open: [1, 6, 7, 8, 9]; the books count 1 dropped "
        "for good",
    )


def test_a_token_further_from_its_step_than_the_bound_is_named_either_way(tmp_path):
    run = make_run(tmp_path, TRAINED, BOOKS).run.path
    bound = {"max_staleness": 1, "overdue": "wait"}

    def write(*versions: tuple[int, int], **changed: Any) -> None:
        lines = [
            {"prompt_indices": prompts, "oldest_version": oldest, "newest_version": newest}
            for prompts, (oldest, newest) in zip([*TRAINED, [5]], versions, strict=True)
        ]
        write_lines(run / "trained.jsonl", [{**line, **bound, **changed} for line in lines])

    write((0, 1), (0, 2), (1, 3))
    assert audit_run(run).faults == ()
    assert audit_run(run).findings[2] == (
        "tokens were at most 1 versions behind the one that trained them and 1 ahead of it, in 3 "
        "steps; buffer.max_staleness 1"
    )
    write((0, 2), (1, 1), (0, 4))
    ahead = (
        "step 1 trained version 0 with tokens of version 2, 2 ahead; buffer.max_staleness was 1",
        "step 3 trained version 2 with tokens of version 4, 2 ahead; buffer.max_staleness was 1",
    )
    behind = (
        "step 3 trained version 2 with tokens of version 0, 2 behind; buffer.max_staleness was 1"
    )
    assert audit_run(run).faults == (ahead[0], behind, ahead[1])
    write((0, 2), (1, 1), (0, 4), overdue="train")
    assert audit_run(run).faults == ahead
    write((0, 2), (1, 1), (0, 4), max_staleness=2)
    assert audit_run(run).faults == ()


def test_a_damaged_checkpoint_is_named(tmp_path):
    run = make_run(tmp_path, TRAINED, BOOKS).run.path
    (run / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    (fault,) = audit_run(run).faults
    assert "step-00000002 is damaged: manifest.json is missing" in fault


@pytest.mark.parametrize(
    ("history", "fault"),
    [
        (("0 a LBTRA", "2 b LBTRA", "3 c LBTRA", "4 d LBTRA", "1 e LBs", "5 f L"), ""),
        (("0 a LBTRA", "5 f LBTRA"), "acknowledged beyond the newest checkpoint (version 2): [5]"),
        (("0 a LBTRA", "1 e LBTRA"), "no line of trained.jsonl has trained them: [1]"),
        (("0 a LBTRA", "1 e LBK"), ""),
    ],
)
def test_what_the_buffer_has_acknowledged_is_in_the_checkpoint(tmp_path, history, fault):
    run = make_run(tmp_path, TRAINED, BOOKS).run.path
    steps = dict(enumerate(TRAINED, 1))
    checkpoint = newest(run)
    found = list(event_faults(audit_events(events(*history)), steps, checkpoint, has_ended=False))
    assert [fault in sentence for sentence in found] == [True] * bool(fault)


def test_what_the_buffer_would_lend_again_after_the_end_is_named(tmp_path):
    run = make_run(tmp_path, TRAINED, BOOKS).run.path
    steps, checkpoint = dict(enumerate(TRAINED, 1)), newest(run)
    found = audit_events(events("0 a LBTR", "2 b LB", "3 c Le", "5 d L"))
    assert list(event_faults(found, steps, checkpoint, has_ended=True)) == [
        "finished in the newest checkpoint, and the buffer would lend them again: [2, 3]"
    ]


@pytest.mark.parametrize(
    ("trained", "changed", "fault"),
    [
        (
            [[0, 2], [2, 3]],
            {"open_ranges": ranges_of((4, 5))},
            "prompt 2 was trained by the steps",
        ),
        ([[0, 2], [3]], {}, "step 2 trained 1 groups, not 2"),
        ([[0, 2]], {}, "trained.jsonl lacks the steps [2]"),
        (
            TRAINED,
            {"next_prompt_index": 7},
            "neither trained nor open: [1, 6]; the books count 1 dropped",
        ),
        (TRAINED, {"open_ranges": ranges_of((4, 5))}, "yet still to be trained by"),
        (
            TRAINED,
            {"next_prompt_index": 4, "open_ranges": ranges_of(())},
            "never granted by the last",
        ),
        (TRAINED, {"granted": 9}, "the books of the last checkpoint do not close"),
        (
            TRAINED,
            {"granted": 9, "trained": 3},
            "the books count 5 trained groups; trained.jsonl names 4",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, trained, changed, fault):
    books = msgspec.structs.replace(BOOKS, **changed)
    assert fault in "\n".join(audit(make_run(tmp_path, trained, books)).faults)


def test_a_run_that_should_be_complete_and_is_not_is_named(tmp_path):
    config = make_run(tmp_path, TRAINED, BOOKS)
    (config.run.path / "checkpoints" / "step-00000002").rename(tmp_path / "elsewhere")
    write_lines(config.run.path / "metrics.jsonl", [{"buffer/books_balanced": 0.0}])
    (config.run.path / "books.json").write_text('{"balanced": false}')
    assert audit(config).faults == (
        "metrics.jsonl lacks the steps [2]",
        "the books do not close at the steps [1]",
        "the buffer's last books (books.json) do not close",
        "the last checkpoint is of version none, not of 2",
    )


ROLES = ("buffer", "learner", "generator-0", "generator-1")


def test_a_seed_is_a_plan_that_spares_no_kind_of_daemon():
    counts, roles = {FaultKind.KILL: 20}, ROLES
    kills = plan(7, counts, 100, roles)
    assert kills == plan(7, counts, 100, roles) != plan(8, counts, 100, roles)
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    assert all(0 <= kill.step <= 70 and 0 <= kill.delay_s <= 0.2 for kill in kills)
    kinds = Counter(kill.role.partition("-")[0] for kill in kills)
    assert min(kinds.values()) >= 6
    assert {kill.role for kill in kills} == set(roles)


def test_other_faults_are_of_the_learner_and_leave_the_kills_as_they_are():
    kills = plan(7, {FaultKind.KILL: 9}, 100, ROLES)
    counts = {kind: 1 + number % 3 for number, kind in enumerate(FaultKind)} | {FaultKind.KILL: 9}
    faults = plan(7, counts, 100, ROLES)
    assert Counter(fault.kind for fault in faults) == counts
    assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
    assert tuple(fault for fault in faults if fault.kind is FaultKind.KILL) == kills
    assert {fault.role for fault in faults if fault.kind is not FaultKind.KILL} == {"learner"}


def test_what_is_removed_is_the_newest_complete_checkpoint_or_all(tmp_path):
    run = make_run(tmp_path, TRAINED, BOOKS).run.path
    for version in (4, 6):
        write_checkpoint(run, version, BOOKS)
    (path_of(run, 6) / "state.json").write_text("")
    assert remove_newest(run) == "SIGKILL, and step-00000004, step-00000006 removed"
    assert [path.name for path in list_checkpoints(run)] == ["step-00000002"]
    found = newest(run, contents=False)
    assert found is not None
    assert (found.policy_version, found.damaged) == (2, ())
    assert remove_all(run) == "SIGKILL, and step-00000002 removed"
    assert newest(run) is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--kills", "0"), "no other fault is asked for"),
        (("--resumes", "-1"), "--resumes: was -1; it must be >= 0"),
        (
            ("--damages", "1", "--set", "learner.checkpoint.keep=1"),
            "learner.checkpoint.keep: was 1; --damages need an older checkpoint to go on from",
        ),
        (
            ("--resumes=1", "--removals=2", "--losses=1", "--set=learner.checkpoint.keep=1"),
            "learner.checkpoint.keep: was 1; --resumes, --removals need an older checkpoint",
        ),
        (("--losses", "-1"), "--losses: was -1; it must be >= 0"),
        (("--fresh-starts", "-2"), "--fresh-starts: was -2; it must be >= 0"),
    ],
)
def test_faults_that_cannot_be_injected_are_refused(tmp_path, capsys, arguments, sentence):
    config = make_run(tmp_path, TRAINED, BOOKS)
    command = [str(config.run.path / "config.yaml"), *arguments]
    assert run_script(chaos.make_parser(), chaos.main, command) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("script", [chaos, soak])
@pytest.mark.parametrize("value", ["-3", "nan", "inf", "soon"])
def test_a_time_that_cannot_be_waited_for_is_refused(capsys, script, value):
    with pytest.raises(SystemExit) as ended:
        script.make_parser().parse_args(["run.yaml", "--stall-timeout", value])
    assert ended.value.code == 2
    said = f"argument --stall-timeout: was {value!r}; it must be a number of seconds, 0 or more"
    assert said in capsys.readouterr().err
