"""Differences, by a store alone or by broadcasts: killed or not, generators have the learner's very
weights."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.checkpoints.find import list_checkpoints
from streamrl.weights.transports.receive import TransferReceiver
from streamrl.weights.transports.store import ObjectStore, StoreReader
from tests.ports import free_port
from tests.settings import set_options
from tests.system.conftest import DEADLINE_S, STREAMRL, Launched, slow_reward
from tests.system.test_launch import (
    assert_audit_passes,
    assert_books_close,
    assert_every_step_once,
    output_of,
)


def stored_weights(folder: Path, scratch: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The newest version in the store, as a generator reads it."""
    reader = StoreReader(ObjectStore(f"file://{folder}", "run"), scratch, "test")
    update = reader.newest(None)
    assert update is not None
    received = {name: t.clone() for name, t in TransferReceiver().tensors(update)}
    return update.policy_version, received


def saved_weights(run: Launched) -> tuple[int, dict[str, torch.Tensor]]:
    newest = list_checkpoints(run.folder)[-1]
    files = sorted(newest.rglob("*.safetensors"))
    return int(newest.name.rpartition("-")[2]), {
        k: v for f in files for k, v in load_file(f).items()
    }


BROADCAST = ("weights.backend=gloo", "weights.delta=true", "weights.catch_up=broadcast")


@pytest.mark.parametrize("way", ["store", pytest.param("broadcast", marks=pytest.mark.long)])
def test_a_run_by_differences_survives_kill_9_and_samples_with_the_very_weights(
    launch: Callable[..., Launched], tmp_path: Path, way: str
):
    """The generator and the learner that start again have no version that a difference changes.

    Synchronous, so that every token's log-probability can be compared with the learner's.
    """
    store = tmp_path / "store"
    settings = ("run.max_steps=100000", "generator.count=2", "buffer.max_staleness=0")
    settings += ("weights.full_every=8",)
    by_store = (f"weights.store=file://{store}", "weights.transport=store")
    by_way = by_store if way == "store" else BROADCAST
    run = launch(*set_options(*settings, *by_way), strict=False)
    run.until_step(4)
    run.child("generator-0").send_signal(signal.SIGKILL)
    run.until(lambda: "was killed by SIGKILL" in run.log("generator-0"))
    run.until_step(12)
    run.kill("learner")
    run.until(lambda: run.log("learner").count("attached at version") == 2)
    run.until_step(run.newest["step"] + 10)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    lines = assert_every_step_once(run, len(run.lines))
    assert_books_close(run)
    assert_audit_passes(run)
    gaps = [abs(line["mismatch/staleness_0/kl"]) for line in lines]
    assert max(gaps) < 1e-4, gaps
    if way == "broadcast":
        assert "gets its weights by broadcast" in run.log("learner")
        assert lines[-1]["weights/difference_bytes"] > 0
        assert lines[-1]["weights/num_failed_loads"] <= 1, "no difference that cannot be used"
        return
    assert lines[-1]["weights/store_bytes"] > 0
    version, weights = stored_weights(store, tmp_path / "scratch")
    step, saved = saved_weights(run)
    assert version == step == len(lines)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights.items())


@pytest.mark.long
def test_a_generator_that_cannot_reach_the_learner_joins_by_the_store(
    launch: Callable[..., Launched], tmp_path: Path
):
    """Beside one that gets its weights from the learner; both keep the bound."""
    store = tmp_path / "store"
    reward = f"data.reward={slow_reward(tmp_path, seconds=0.2)}"
    run = launch(*set_options("run.max_steps=100000", f"weights.store=file://{store}", reward))
    run.until_generators(1)
    config = str(run.folder / "config.yaml")
    unreachable = f"weights.address=tcp://127.0.0.1:{free_port()}"
    words = [STREAMRL, "generator", "--config", config, "--id", "far"]
    far = subprocess.Popen([*words, *set_options("weights.transport=store", unreachable)])
    try:
        run.until_generators(2)
        first = _version(config, "far")
        run.until(lambda: _version(config, "far") > first + 3)
        run.child("generator-0").send_signal(signal.SIGSTOP)
        try:
            run.until_generators(1)
            run.until_step(len(run.lines) + 4)
        finally:
            run.child("generator-0").send_signal(signal.SIGCONT)
        assert all(line["buffer/staleness_max"] <= 2 for line in run.lines)
    finally:
        far.send_signal(signal.SIGTERM)
        assert far.wait(DEADLINE_S) == 0
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert_books_close(run)
    assert f"follows file://{store}/run" in run.log("far")


def _version(config: str, name: str) -> int:
    listed = json.loads(output_of("generators", config, "--json"))
    return max([int(row["policy_version"]) for row in listed if row["id"] == name], default=-1)
