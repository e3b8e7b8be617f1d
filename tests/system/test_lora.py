"""A run that trains an adapter: what generators sample with is what the learner trains."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from streamrl.cli.main import main
from tests.settings import set_options

NUM_STEPS = 8
LORA = ("learner.lora={rank: 4, alpha: 32}", "learner.optimizer.lr=1e-2")


@pytest.mark.parametrize(
    ("publish", "num_ranks"),
    [
        ("adapter", 2),
        pytest.param("merged", 2, marks=pytest.mark.long),
    ],
)
def test_generators_sample_with_the_adapter_that_is_trained(
    launch, model, tmp_path, publish, num_ranks
):
    # Synchronous, so that every token's log-probability can be compared with the learner's.
    overrides = (
        "buffer.max_staleness=0",
        f"run.max_steps={NUM_STEPS}",
        "algorithm.kl_loss.coef=0.01",
        f"learner.num_ranks={num_ranks}",
    )
    run = launch(*set_options(*LORA, f"learner.lora.publish={publish}", *overrides))
    assert run.end() == 0, run.output
    gaps = [abs(line["mismatch/staleness_0/kl"]) for line in run.lines]
    assert max(gaps) < 1e-4, gaps
    assert run.lines[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert run.lines[-1]["actor/kl_loss"] > 1e-6, "the reference moves with the policy"
    assert main(["buffer", "audit", str(run.folder)]) == 0
    assert_exported(run.folder, model, tmp_path, num_ranks)


def assert_exported(folder: Path, model: Path, tmp_path: Path, num_ranks: int) -> None:
    """Merged, and as an adapter that peft puts on the base."""
    from peft import PeftModel

    ids = torch.arange(2, 10)[None]
    merged, adapter = str(tmp_path / "merged"), str(tmp_path / "adapter")
    assert main(["export", str(folder), "--output", merged]) == 0
    assert main(["export", str(folder), "--output", adapter, "--adapter"]) == 0
    base = AutoModelForCausalLM.from_pretrained(model)
    before = base(ids).logits
    trained = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
    assert not torch.allclose(trained, before, atol=1e-2)
    assert torch.allclose(PeftModel.from_pretrained(base, adapter)(ids).logits, trained, atol=1e-4)
    described = json.loads((Path(adapter) / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (4, 32)
    newest = folder / "checkpoints" / f"step-{NUM_STEPS:08}"
    saved = load_file(newest / "model.safetensors")
    exported = load_file(Path(merged) / "model.safetensors")
    assert all(torch.equal(saved[name], exported[name]) for name in exported)
    shards = list((newest / "shards").glob("*.safetensors"))
    assert len(shards) == num_ranks
    assert all(".lora_" in name for shard in shards for name in load_file(shard))
