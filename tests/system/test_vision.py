"""A vision-language model through the whole system: it learns to name the color of an image."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from streamrl.cli.main import main
from tests.settings import set_options
from tests.system.test_launch import assert_books_close

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "colors"
NUM_STEPS = 40


@pytest.mark.long
def test_a_tiny_qwen_learns_to_name_colors(launch, tmp_path, monkeypatch):
    monkeypatch.chdir(RECIPE)
    model = tmp_path / "model"
    # Synchronous, so that every token's log-probability can be compared with the learner's.
    overrides = (
        "buffer.max_staleness=0",
        f"run={{name: run, folder: {tmp_path}, max_steps: {NUM_STEPS}, evaluate: false}}",
        f"model.path={model}",
        "model.recipe.batch_size=48",
        "learner.groups_per_step=8",
        "learner.optimizer.lr=2e-3",
        "buffer.url=zmq://127.0.0.1:0",
        "weights.address=tcp://127.0.0.1:0",
    )
    run = launch(*set_options(*overrides), file=Path("config.yaml"))
    assert run.end() == 0, run.output
    rewards = [line["reward/mean"] for line in run.lines]
    assert len(rewards) == NUM_STEPS
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 10 * 0.15, rewards
    # What the engine sampled with images is what the learner computes with them.
    gaps = [abs(line.get("mismatch/staleness_0/kl", 0.0)) for line in run.lines]
    assert 0 < max(gaps) < 1e-4, gaps
    assert_books_close(run)
    assert main(["buffer", "audit", str(run.folder)]) == 0
    newest = run.folder / "checkpoints" / f"step-{NUM_STEPS:08}"
    before, after = (load_file(f / "model.safetensors") for f in (model, newest))
    assert before.keys() == after.keys()
    assert any("visual" in name and not before[name].equal(after[name]) for name in before)
    described = json.loads((newest / "preprocessor_config.json").read_text())
    assert described["patch_size"] == 8
