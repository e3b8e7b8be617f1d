"""What a checkpoint stores of a trainer, as `learner.checkpoint.contents` selects.

    model      parameters and buffers of the policy, and parameters of the critic
    optimizer  AdamW's state of each
    extra      what rewards and KL controller have measured, and the random generators

On disk each rank has one file of tensors, written by torch.distributed.checkpoint without pickle.

    shards/rank-00000.safetensors    the parts of tensors that this rank has written

Invariant: a tensor is saved under the name of its parameter, so the optimizer may order and group
parameters differently later. Every part of a tensor records its place in the whole, so any number
of ranks can load what they need, into the trainer's own tensors.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from learners.trainer import Trainer
from streamrl.errors import ConfigError

Tensors: TypeAlias = Mapping[str, torch.Tensor]
Group: TypeAlias = dist.ProcessGroup | None

SHARDS_FOLDER = "shards"

# torch warns of this at each save and load with a single rank.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def shard_file(rank: int) -> str:
    """The name of a rank's file, relative to the checkpoint's folder."""
    return f"{SHARDS_FOLDER}/rank-{rank:05d}.safetensors"


def save_shards(checkpoint: Path, tensors: Tensors, group: Group) -> None:
    """Write this rank's parts of the tensors, which are in host memory; each rank of the group
    calls it. Without a group this process has every tensor whole.

    Raises:
        OSError, SafetensorError: a rank cannot write; every rank raises.
    """
    try:
        save(
            dict(tensors),
            storage_writer=_ShardWriter(checkpoint),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        # It is not an Exception, and holds only the tracebacks of all ranks.
        raise next(iter(error.failures.values()))[0] from error


def load_shards(checkpoint: Path, tensors: Tensors) -> None:
    """Copy saved tensors into these, each rank by itself; a DTensor gets only its own parts."""
    try:
        load(dict(tensors), storage_reader=_reader(checkpoint), no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The saved tensors by name, on the meta device."""
    metadata: Metadata = _reader(checkpoint).read_metadata()
    return {
        name: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        for name, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }


def whole_tensors(checkpoint: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The saved tensors whose names begin with the prefix, without it, whole and in host memory."""
    whole = {
        name: torch.empty_like(saved, device="cpu")
        for name, saved in saved_tensors(checkpoint).items()
        if name.startswith(prefix)
    }
    load_shards(checkpoint, whole)
    return {name.removeprefix(prefix): tensor for name, tensor in whole.items()}


def _reader(checkpoint: Path) -> HuggingFaceStorageReader:
    return HuggingFaceStorageReader(str(checkpoint / SHARDS_FOLDER))


class _ShardWriter(HuggingFaceStorageWriter):
    """Names a file by its rank and streams it to disk: torch's own class first serializes a file
    into one `bytes` object, during which no other thread of the process runs."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(str(checkpoint / SHARDS_FOLDER), save_distributed=True)
        self._checkpoint = checkpoint

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the plan."""
        tensors: dict[str, torch.Tensor] = {}
        offsets: dict[str, Any] = {}
        for item in plan.items:
            data, part = planner.resolve_data(item), item.tensor_data
            assert isinstance(data, torch.Tensor), "there is nothing else in a checkpoint"
            assert part is not None, "a tensor has a place"
            tensors[item.index.fqn] = data.contiguous()
            offsets[item.index.fqn] = {"saved_offsets": part.chunk.offsets}
        if tensors:
            file = self._checkpoint / shard_file(plan.storage_data["shard_index"] - 1)
            # As torch's reader expects it.
            save_file(tensors, file, {"DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"})
        written: Future[list[WriteResult]] = Future()
        sizes = ((item.index, tensors[item.index.fqn].nbytes) for item in plan.items)
        written.set_result([WriteResult(index, num_bytes, None) for index, num_bytes in sizes])
        return written


MODEL, CRITIC = "model/", "critic/"
"""Prefixes of the names of the policy's and the critic's tensors."""


@dataclass(frozen=True)
class _Role:
    """Names of tensors begin with `model` or `optimizer`; an optimizer's then have a kind."""

    model: str
    optimizer: str
    parameters: Mapping[str, torch.nn.Parameter]
    adamw: torch.optim.Optimizer
    buffers: Tensors = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        detached = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {self.model + name: t for name, t in {**detached, **self.buffers}.items()}

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        return {
            f"{self.optimizer}{kind}/{name}": tensor
            for name, parameter in self.parameters.items()
            for kind, tensor in self.adamw.state.get(parameter, {}).items()
        }

    def allocate(self, name: str, saved: torch.Tensor) -> None:
        """The tensor of the optimizer's state with this name in a checkpoint."""
        kind, _, of = name.removeprefix(self.optimizer).partition("/")
        parameter = self.parameters[of]
        if saved.shape == parameter.shape:
            allocated = torch.zeros_like(parameter, dtype=saved.dtype)
        else:
            allocated = torch.zeros_like(saved, device=parameter.device)
        self.adamw.state[parameter][kind] = allocated


def tensors_of(trainer: Trainer, contents: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors to save, by name."""
    tensors = {}
    for role in _roles(trainer):
        tensors.update(role.weights if "model" in contents else {})
        tensors.update(role.moments if "optimizer" in contents else {})
    return tensors


def load_tensors(
    checkpoint: Path, contents: Sequence[str], trainer: Trainer, model_path: str
) -> None:
    """Load the tensors that `contents` names into the trainer, whose model came from `model_path`.
    ConfigError if the checkpoint is of another model."""
    saved = saved_tensors(checkpoint)
    policy, *critics = _roles(trainer)
    _require_same(policy, saved, checkpoint, f"model.path {model_path}")
    for critic in critics:
        if not any(name.startswith(CRITIC) for name in saved):
            raise ConfigError(
                f"run.resume: {checkpoint} has no critic, which algorithm.advantage gae goes on "
                "with"
            )
        _require_same(critic, saved, checkpoint, "algorithm.value.model_path or model.path")
    if "optimizer" in contents:
        for role in (policy, *critics):
            for name in (name for name in saved if name.startswith(role.optimizer)):
                role.allocate(name, saved[name])
    load_shards(checkpoint, tensors_of(trainer, contents))


def _roles(trainer: Trainer) -> Iterator[_Role]:
    """The roles of the policy, and of the critic if there is one."""
    policy, critic = trainer.policy, trainer.critic
    yield _Role(MODEL, "optimizer/", policy.parameters(), trainer.optimizer, policy.buffers())
    if critic is not None:
        yield _Role(CRITIC, "critic_optimizer/", critic.parameters(), critic.optimizer)


def _require_same(role: _Role, saved: Tensors, path: Path, place: str) -> None:
    """Raise ConfigError unless the checkpoint has this role's tensors, which `place` led to."""
    ours = {name: tuple(tensor.shape) for name, tensor in role.weights.items()}
    theirs = {name: tuple(t.shape) for name, t in saved.items() if name.startswith(role.model)}
    for name in ours | theirs:
        here, there = (shapes.get(name, "none") for shapes in (ours, theirs))
        if here != there:
            raise ConfigError(
                f"run.resume: {path} is of another model: {name.removeprefix(MODEL)} has the "
                f"shape {there}, in {place} {here}"
            )
