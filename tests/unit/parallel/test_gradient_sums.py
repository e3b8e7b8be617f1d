"""Gradients that are summed once an update are those that are summed after every micro-batch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from learners.batch.packing import share
from learners.batch.training_batch import TrainingBatch
from learners.parallel.mesh import full, make_mesh
from learners.parallel.ranks import Ranks
from streamrl.config.learner import MeshSettings
from streamrl.types import GroupHeader
from tests.ranks import run_ranks
from tests.training import make_config, make_groups, make_trainer


def on_rank() -> dict[bool, Any]:
    mesh = make_mesh(MeshSettings(), torch.device("cpu"))
    ranks = Ranks.of(dist.new_group(backend="gloo"))
    return {each: train(each, mesh, ranks) for each in (True, False)}


def train(each: bool, mesh: Any, ranks: Ranks) -> tuple[dict[str, torch.Tensor], int, float]:
    """Two steps: the parameters after them, and how many sums and micro-batches they had."""
    learner = {"max_tokens_per_micro_batch": 24, "sum_each_micro_batch": each}
    config = make_config(learner=learner, optimizer={"eps": 1e-5}, algorithm={"advantage": "gae"})
    trainer = make_trainer(config, mesh, ranks)
    num_sums = num_micro_batches = 0
    reduce_scatter = dist.reduce_scatter_tensor

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_sums
        num_sums += 1
        return reduce_scatter(*args, **kwargs)

    dist.reduce_scatter_tensor = counted
    try:
        for step in range(2):
            groups = {g.prompt_index: g for g in make_groups(seed=step, num_groups=6)}
            headers = [GroupHeader.of(group) for group in groups.values()]
            mine = [groups[h.prompt_index] for h in share(headers, ranks.count, ranks.index)]
            metrics = trainer.step(TrainingBatch.shared(headers, mine, step, ranks))
            num_micro_batches += metrics["learner/num_micro_batches"]
    finally:
        dist.reduce_scatter_tensor = reduce_scatter
    parameters = {n: full(p) for n, p in trainer.policy.parameters().items()}
    return parameters, num_sums, num_micro_batches


def test_summing_once_an_update_changes_the_traffic_and_nothing_else(tmp_path):
    for results in run_ranks(on_rank, 2, tmp_path):
        each, num_each, num_micro_batches = results[True]
        once, num_once, _ = results[False]
        assert num_micro_batches >= 6
        assert num_each == pytest.approx(num_once * num_micro_batches / 2)
        for name, parameter in each.items():
            assert torch.allclose(parameter, once[name], atol=1e-6), name
