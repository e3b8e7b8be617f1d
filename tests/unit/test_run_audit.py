"""The audit of a run finds every way in which its folder can be wrong, and nothing in a right one.

The plan of kills is a function of its seed.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.cli.chaos import plan
from streamrl.cli.main import main
from streamrl.cli.verification.run_audit import RunAudit, audit_run
from streamrl.config import RunConfig, to_yaml
from streamrl.types import Books, DropReason, ranges_of

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
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    state = {"policy_version": 2, "books": msgspec.to_builtins(books, str_keys=True)}
    (run / "checkpoints" / "step-00000002" / "state.json").write_text(json.dumps(state))
    write_lines(run / "metrics.jsonl", [{"buffer/books_balanced": 1.0}] * 2)
    write_lines(
        run / "trained.jsonl", [{"prompt_indices": prompt_indices} for prompt_indices in trained]
    )
    return config


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    numbered = ({"step": step, **line} for step, line in enumerate(lines, 1))
    path.write_text("".join(json.dumps(line) + "\n" for line in numbered))


def audit(config: RunConfig) -> RunAudit:
    return audit_run(config.run.path, complete=config)


def test_a_run_that_kept_its_promises_has_no_faults(tmp_path):
    result = audit(make_run(tmp_path, TRAINED, BOOKS))
    assert result.faults == ()
    (finding,) = result.findings[1:]
    assert "2 steps trained 4 prompts; of 6 granted 1 are open and 1 dropped" in finding


def test_a_run_that_has_not_ended_is_audited_by_its_events_only(tmp_path, capsys):
    run = make_run(tmp_path, [[0, 2], [2, 3]], BOOKS).run.path
    assert main(["buffer", "audit", str(run)]) == 2
    assert "nothing to audit yet" in capsys.readouterr().err
    (run / "learner.json").write_text('{"activity": "computes", "policy_version": 2}')
    assert main(["buffer", "audit", str(run)]) == 2
    (run / "learner.json").write_text('{"activity": "has ended", "policy_version": 2}')
    assert main(["buffer", "audit", str(run)]) == 1
    assert "prompt 2 was trained by the steps [1, 2]" in capsys.readouterr().out
    write_lines(run / "trained.jsonl", [{"prompt_indices": indices} for indices in TRAINED])
    assert main(["buffer", "audit", str(run)]) == 0
    assert capsys.readouterr().out.endswith("in order\n")


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


def test_a_seed_is_a_plan_that_spares_no_kind_of_daemon():
    roles = ("buffer", "learner", "generator-0", "generator-1")
    kills = plan(7, 20, 100, roles)
    assert kills == plan(7, 20, 100, roles) != plan(8, 20, 100, roles)
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    assert all(0 <= kill.step <= 70 and 0 <= kill.delay_s <= 0.2 for kill in kills)
    kinds = Counter(kill.role.partition("-")[0] for kill in kills)
    assert min(kinds.values()) >= 6
    assert {kill.role for kill in kills} == set(roles)
