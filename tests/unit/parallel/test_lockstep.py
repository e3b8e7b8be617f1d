"""What the first rank commands, every rank does: fetches, steps, snapshots, checkpoints."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from actors.make_model import make_tokenizer
from learners.batch.training_batch import TrainingBatch
from learners.checkpoints.contents import tensors_of
from learners.checkpoints.restore import restore
from learners.checkpoints.writer import CheckpointWriter
from learners.executor.lockstep import Accumulate, LearnerRank, Lockstep, Save, Snapshot, Update
from learners.parallel.mesh import full, make_mesh
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.checkpoints.find import read_checkpoint
from streamrl.checkpoints.history import History
from streamrl.config import RunConfig
from streamrl.config.learner import MeshSettings
from streamrl.errors import LostMemoryError
from streamrl.types import Books, GroupHeader, TrajectoryGroup
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.transports.shared_memory import SendBuffers
from tests.ranks import run_ranks
from tests.tiny_model import save_llama
from tests.training import make_config, make_groups

CPU = torch.device("cpu")
HISTORY = History(learner_id="first")
STATE = LearnerState(1, Books(granted=6, trained=6))


def make_run(folder: Path) -> RunConfig:
    return make_config(
        model={"path": str(folder / "model")},
        run={"folder": folder, "name": "run"},
        learner={"device": "cpu", "max_tokens_per_micro_batch": 70},
        algorithm={"advantage": "gae"},
        optimizer={"eps": 1e-5},
    )


class CountedBuffer:
    """Holds the groups, and which of them were fetched last; at first one rank's has lost them."""

    def __init__(self, rank: int) -> None:
        self.groups = {group.prompt_index: group for group in make_groups(num_groups=6)}
        self.fetched: list[int] = []
        self._has_lost = rank == 1

    async def fetch(self, prompt_indices: Sequence[int]) -> tuple[TrajectoryGroup, ...]:
        if self._has_lost:
            self._has_lost = False
            raise LostMemoryError("it restarted")
        self.fetched = list(prompt_indices)
        return tuple(self.groups[i] for i in prompt_indices)


def make_trainer(config: RunConfig, mesh: Any, ranks: Ranks) -> Trainer:
    policy = Policy.from_config(config, mesh=mesh)
    return Trainer(config, policy, None, Critic.from_config(config, mesh), ranks)


class Rank:
    """One rank and what it has at the end of its commands."""

    def __init__(self, folder: Path) -> None:
        self.config = make_run(folder)
        self.mesh = make_mesh(MeshSettings(), CPU)
        self.ranks = Ranks.of(dist.new_group(backend="gloo"))
        self.buffer = CountedBuffer(self.ranks.index)
        self.trainer = make_trainer(self.config, self.mesh, self.ranks)
        manifest = manifest_of(self.trainer.policy.parameters(), torch.bfloat16)
        self.layout = Layout(manifest, bucket_bytes=1000)
        self.buffers = SendBuffers(self.layout, CPU)
        self.writer = CheckpointWriter(self.config, HISTORY)
        is_first = self.ranks.index == 0
        rank = LearnerRank(
            self.trainer,
            self.ranks,
            fetch=self.buffer.fetch,
            save=self.writer.save,
            snapshot=self.buffers.write if is_first else lambda all_, _: [all_[n] for n in all_],
        )
        self.lockstep = Lockstep(rank, self.ranks)

    async def run(self) -> dict[str, Any]:
        if self.ranks.index:
            await self.lockstep.follow()
            self.writer.close()
            await self.lockstep.end()
            return {}
        headers = tuple(map(GroupHeader.of, self.buffer.groups.values()))
        with pytest.raises(LostMemoryError, match="it restarted"):
            await self.lockstep.fetch(headers)
        groups = await self.lockstep.fetch(headers)
        await self.lockstep.run(Accumulate(headers, 0), groups)
        metrics = await self.lockstep.run(Update())
        await self.lockstep.run(Snapshot(1))
        path = (await self.lockstep.run(Save(STATE))).result()
        await self.lockstep.end()
        with self.buffers.reading() as held:
            assert held is not None
            buckets = ((bucket, bucket.of(held.data)) for bucket in self.layout.buckets)
            sent = {name: t.clone() for bucket, data in buckets for name, t in bucket.views(data)}
            return {"metrics": metrics, "sent": sent, "version": held.policy_version, "path": path}


def on_rank(folder: Path) -> dict[str, Any]:
    rank = Rank(folder)
    result = asyncio.run(rank.run())
    # From the checkpoint of all ranks, with as many ranks.
    path = folder / "run" / "checkpoints" / "step-00000001"
    trainer = make_trainer(rank.config, rank.mesh, rank.ranks)
    assert restore(read_checkpoint(path), rank.config, trainer) == STATE
    state = whole(trainer)
    trained = {n: full(p) for n, p in rank.trainer.policy.parameters().items()}
    return {**result, "fetched": rank.buffer.fetched, "state": state, "trained": trained}


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that is in the shards of a checkpoint."""
    return {n: full(t) for n, t in tensors_of(trainer, ("model", "optimizer")).items()}


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    save_llama(folder / "model")
    make_tokenizer("abc").save_pretrained(folder / "model")
    return folder, run_ranks(on_rank, 2, folder, folder)


def test_the_compute_thread_has_the_gpu_of_the_thread_that_made_it(monkeypatch) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda i: chosen.append((threading.current_thread().name, i))
    )

    async def compute() -> str:
        lockstep = Lockstep(None)  # type: ignore[arg-type]
        name = await lockstep._in_thread(lambda: threading.current_thread().name)
        await lockstep.end()
        return name

    assert chosen == [(asyncio.run(compute()), 3)]


def test_a_group_is_fetched_by_one_rank_alone(by_rank):
    _, ranks = by_rank
    assert sorted(i for rank in ranks for i in rank["fetched"]) == list(range(6))
    assert all(rank["fetched"] for rank in ranks)


def test_the_snapshot_is_that_of_the_whole_parameters(by_rank):
    _, ranks = by_rank
    first = ranks[0]
    assert first["version"] == 1
    assert first["sent"].keys() == first["trained"].keys()
    for name, tensor in first["trained"].items():
        assert torch.equal(first["sent"][name], tensor.to(torch.bfloat16)), name


def test_the_checkpoint_of_several_ranks_is_that_of_one(by_rank):
    folder, ranks = by_rank
    config = make_run(folder)
    trainer = make_trainer(config, None, Ranks())
    trainer.step(TrainingBatch.of(make_groups(num_groups=6), policy_version=0))
    again = make_trainer(config, None, Ranks())
    restore(read_checkpoint(ranks[0]["path"]), config, again)
    expected = whole(trainer)
    for state in (whole(again), *(rank["state"] for rank in ranks)):
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-5)
