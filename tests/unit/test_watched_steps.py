"""The bound on staleness, of every step that a run makes: also of those that it abandons."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from streamrl.config import RunConfig, load_config
from tests.research.progress import MAX_FAULTS, WatchedSteps


def configure(folder: Path, overdue: str = "wait") -> RunConfig:
    file = folder / "run.yaml"
    file.write_text("model: {path: some-model}\ndata: {source: addition}\n")
    settings = (f"run.folder={folder}", "buffer.max_staleness=2", f"buffer.overdue={overdue}")
    config = load_config(file, settings, {}).config
    config.run.path.mkdir()
    return config


def text(*steps: tuple[int, int, int]) -> str:
    """Lines of a step, its oldest and its newest version."""
    names = ("step", "oldest_version", "newest_version")
    return "".join(json.dumps(dict(zip(names, step, strict=True))) + "\n" for step in steps)


def append(config: RunConfig, lines: Iterable[str]) -> None:
    with (config.run.path / "trained.jsonl").open("a") as file:
        file.writelines(lines)


@pytest.mark.parametrize(
    ("overdue", "step", "fault"),
    [
        ("wait", (10, 7, 9), ""),
        ("wait", (10, 9, 11), ""),
        ("wait", (10, 6, 9), "step 10 trained tokens 3 versions old; buffer.max_staleness 2"),
        ("train", (10, 6, 9), ""),
        ("wait", (10, 9, 12), "step 10 trained tokens 3 versions ahead; buffer.max_staleness 2"),
        ("train", (10, 9, 12), "step 10 trained tokens 3 versions ahead; buffer.max_staleness 2"),
    ],
)
def test_no_token_may_be_further_from_its_step_than_the_bound(tmp_path, overdue, step, fault):
    config = configure(tmp_path, overdue)
    watched = WatchedSteps(config)
    watched.read()
    assert (watched.step, watched.faults) == (0, ())
    append(config, [text(step)])
    watched.read()
    assert (watched.step, watched.faults) == (10, (fault,) if fault else ())


def test_steps_that_are_cut_off_have_been_judged(tmp_path):
    config = configure(tmp_path)
    record, watched = config.run.path / "trained.jsonl", WatchedSteps(config)
    append(config, [text((1, 0, 0), (2, 1, 1)), '{"step": 3, "oldest'])
    watched.read()
    assert watched.step == 2
    record.write_text(text((1, 0, 0), (2, 1, 1), (3, 9, 9), (4, 3, 3)))
    watched.read()
    assert watched.step == 4
    # The learner comes back at version 2.
    record.write_text(text((1, 0, 0), (2, 1, 1)))
    watched.read()
    assert watched.step == 2
    append(config, [text((3, 2, 2))])
    watched.read()
    assert watched.step == 3
    assert watched.faults == ("step 3 trained tokens 7 versions ahead; buffer.max_staleness 2",)


def test_a_run_that_is_always_beyond_the_bound_keeps_the_first_sentences(tmp_path):
    config = configure(tmp_path)
    watched = WatchedSteps(config)
    append(config, [text(*((step, step + 9, step + 9) for step in range(1, 100)))])
    watched.read()
    assert len(watched.faults) == MAX_FAULTS
    assert watched.faults[0].startswith("step 1 ")
    assert watched.step == 99
