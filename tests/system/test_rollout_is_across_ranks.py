"""Two real ranks with uneven shards report the metrics of the whole batch."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from streamrl.algorithms.rollout_is import (
    rollout_is_weights,
)
from streamrl.algorithms.sequences import Sequences
from tests.settings import RolloutISConfig

LENGTHS = (5, 0, 3, 9, 1)
FIRST_ROWS = 3
CONFIG = RolloutISConfig(mode="clip", veto_threshold=0.2)


def test_ranks_agree_on_the_metrics_of_the_whole_batch(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    train, behavior = _logprobs()
    whole = rollout_is_weights(train, behavior, Sequences.from_lengths(LENGTHS), CONFIG)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert ranks[0] == ranks[1]
    for name, value in whole.metrics.items():
        tolerance = 1e-2 if name.split("_p")[-1].isdigit() else 1e-6
        assert math.isclose(ranks[0][name], value, rel_tol=tolerance), name


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    rows = slice(0, FIRST_ROWS) if rank == 0 else slice(FIRST_ROWS, len(LENGTHS))
    split = sum(LENGTHS[:FIRST_ROWS])
    tokens = slice(0, split) if rank == 0 else slice(split, None)
    train, behavior = _logprobs()
    sequences = Sequences.from_lengths(LENGTHS[rows])
    mine = rollout_is_weights(train[tokens], behavior[tokens], sequences, CONFIG).statistics
    assert mine is not None
    torch.save(mine.merge_ranks().metrics(CONFIG), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _logprobs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(sum(LENGTHS), generator=generator)
    return behavior + 0.6 * torch.randn(sum(LENGTHS), generator=generator), behavior
