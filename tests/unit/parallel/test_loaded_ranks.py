"""Models as they are loaded, with an adapter, train on two ranks as on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from learners.batch.packing import share
from learners.batch.training_batch import TrainingBatch
from learners.parallel.mesh import Mesh, full, make_mesh
from learners.parallel.ranks import Ranks
from learners.policy.policy import Policy
from learners.trainer import Trainer
from streamrl.config.learner import MeshSettings
from streamrl.config.weights import WeightSettings
from streamrl.types import GroupHeader
from streamrl.weights.layout import manifest_of
from tests.ranks import run_ranks
from tests.tiny_model import make_llama, save_llama
from tests.training import make_config, make_groups

LORA = {"rank": 4, "alpha": 16}
CASES: dict[str, dict[str, Any]] = {
    "adapter": {"lora": LORA},
    "factors": {"lora": {**LORA, "publish": "adapter"}},
    "bfloat16": {"lora": LORA, "dtype": "bfloat16"},
}


def trained(
    folder: str, learner: dict[str, Any], mesh: Mesh | None = None, ranks: Ranks | None = None
) -> dict[str, Any]:
    """What two steps train, what the generators are sent, and the metrics."""
    ranks = ranks or Ranks()
    config = make_config(
        model={"path": folder},
        # Weights of zeros get gradients only of their partners: a higher rate moves both.
        optimizer={"lr": 1e-2, "eps": 1e-5},
        learner={"max_tokens_per_micro_batch": 70, **learner},
        algorithm={"kl_loss": {"coef": 0.1}},
    )
    torch.manual_seed(0)
    policy = Policy.from_config(config, mesh=mesh)
    trainer = Trainer(config, policy, Policy.reference_of(config, policy, mesh), None, ranks)
    metrics = []
    for step in range(2):
        groups = {group.prompt_index: group for group in make_groups(step)}
        headers = [GroupHeader.of(group) for group in groups.values()]
        mine = [groups[h.prompt_index] for h in share(headers, ranks.count, ranks.index)]
        metrics.append(trainer.step(TrainingBatch.shared(headers, mine, step, ranks)))
    # The first rank alone: were another needed, this would wait for it.
    manifest = policy.layout(WeightSettings()).manifest if ranks.index == 0 else None
    weights = policy.weights()
    frozen = [p for p in policy.network.parameters() if not p.requires_grad]
    return {
        "frozen": {p.dtype for p in frozen},
        "manifest": manifest,
        "parameters": {n: full(p).clone() for n, p in policy.parameters().items()},
        "weights": {name: full(weights[name]).clone() for name in weights},
        "metrics": metrics,
    }


def on_rank(folder: str, names: tuple[str, ...]) -> dict[str, Any]:
    mesh = make_mesh(MeshSettings(), torch.device("cpu"))
    ranks = Ranks.of(dist.new_group(backend="gloo"))
    return {name: trained(folder, CASES[name], mesh, ranks) for name in names}


def test_two_ranks_make_the_steps_of_one(tmp_path: Path):
    names = ("adapter", "factors")
    folder = str(save_llama(tmp_path / "model", num_hidden_layers=1))
    expected = {name: trained(folder, CASES[name]) for name in names}
    for index, found in enumerate(run_ranks(on_rank, 2, tmp_path, folder, names)):
        for name in names:
            manifest = found[name]["manifest"]
            assert manifest == (None if index else manifest_of(expected[name]["weights"]))
            for kind in ("parameters", "weights"):
                assert_close(found[name][kind], expected[name][kind])
            for ours, theirs in zip(found[name]["metrics"], expected[name]["metrics"], strict=True):
                assert ours["learner/grad_norm"] == pytest.approx(
                    theirs["learner/grad_norm"], rel=1e-4
                )
                assert ours["actor/kl_loss"] == pytest.approx(theirs["actor/kl_loss"], abs=1e-5)
    moved = expected["adapter"]["parameters"]
    assert all(bool(tensor.any()) for name, tensor in moved.items() if "lora_B" in name)


def test_two_ranks_hold_what_is_frozen_in_the_narrow_dtype_as_one_does(tmp_path: Path):
    model = make_llama(num_hidden_layers=1).bfloat16()
    model.save_pretrained(tmp_path / "model")
    folder = str(tmp_path / "model")
    expected = trained(folder, CASES["bfloat16"])
    for index, found in enumerate(run_ranks(on_rank, 2, tmp_path, folder, ("bfloat16",))):
        ours = found["bfloat16"]
        assert ours["frozen"] == expected["frozen"] == {torch.bfloat16}
        assert index or ours["manifest"] == manifest_of(expected["weights"])
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(ours["weights"][name], tensor, rtol=0, atol=0.02)
        for name in ("learner/grad_norm", "actor/kl_loss"):
            pairs = zip(ours["metrics"], expected["metrics"], strict=True)
            assert all(
                one[name] == pytest.approx(two[name], rel=0.1, abs=1e-3) for one, two in pairs
            )


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert expected
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
