"""The examples of the pages on engines, buffer backends and trackers, and those in docstrings, run
as they stand there."""

import csv
import doctest
import importlib
import importlib.util
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from streamrl import wire
from streamrl.types import SamplingParams, TrajectoryGroup
from tests.documents import ROOT, write_files
from tests.records import make_group

PACKAGES = ("actors", "buffers", "learners", "streamrl")
WITH_EXAMPLES = [
    file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for package in PACKAGES
    for file in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_hold(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted > 0
    assert failed == 0


@pytest.fixture
def example(tmp_path: Path, request: pytest.FixtureRequest) -> ModuleType:
    """The module that the page shows."""
    (file,) = write_files(tmp_path, f"docs/extending/{request.param}.md")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", ["engine"], indirect=True)
async def test_an_engine_samples_and_changes_its_version(example: ModuleType):
    engine = example.UniformEngine(vocab_size=8)
    first = await engine.generate((1, 2), SamplingParams(max_new_tokens=5))
    assert len(first.token_ids) == 5
    assert first.logprobs == pytest.approx(-math.log(8))
    await engine.load_weights(SimpleNamespace(policy_version=3))
    second = await engine.generate((1, 2), SamplingParams(max_new_tokens=5))
    assert (first.policy_versions.max(), second.policy_versions.min()) == (0, 3)
    assert engine.gauges()["num_tokens"] == 10
    await engine.close()


@pytest.mark.parametrize("example", ["buffer"], indirect=True)
async def test_a_backend_keeps_a_copy_of_what_it_lends(example: ModuleType, tmp_path: Path):
    ledger = Ledger(groups_per_step=1, max_staleness=0)
    buffer = example.MirroredBuffer(BufferState(ledger, lease_ttl_s=30), tmp_path)
    await buffer.attach(0, None)
    (lease,) = await buffer.lease(["a"], "g", 0.0)
    group = make_group(lease.prompt_index, lease_id="a")
    await buffer.put("a", group)
    loan = await buffer.take(1, 0, 0.0)
    assert [header.group_id for header in loan.headers] == [group.group_id]
    mirrored = wire.decode((tmp_path / "0.msgpack").read_bytes(), TrajectoryGroup)
    assert mirrored.group_id == group.group_id


@pytest.mark.parametrize("example", ["tracker"], indirect=True)
def test_a_tracker_writes_a_row_for_each_step(example: ModuleType, tmp_path: Path):
    tracker = example.CsvTracker(tmp_path / "metrics.csv")
    tracker.log({"reward/mean": 0.5}, 1)
    tracker.log({"reward/mean": 0.75, "late": 1.0}, 2)
    tracker.close()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"step": "1", "reward/mean": "0.5"},
        {"step": "2", "reward/mean": "0.75"},
    ]
