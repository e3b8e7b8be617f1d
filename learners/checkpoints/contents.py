"""What a checkpoint holds of a trainer, by `learner.checkpoint.contents`.

    model      parameters and buffers of the policy, and parameters of the critic
    optimizer  AdamW's state of each
    extra      what rewards and KL controller have measured, and the random generators

On disk the tensors are in one file of each rank, by torch.distributed.checkpoint, without pickle.

    shards/rank-00000.safetensors    the parts of tensors that this rank has written

Invariant: a tensor is saved under the name of its parameter, so that the optimizer may order and
group parameters otherwise. Every part of a tensor has its place in the whole, so that ranks of any
number load what they need of it, into the trainer's own tensors.
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

# Said at each save and load of a world of one.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def shard_file(rank: int) -> str:
    """The name, in the folder of a checkpoint, of what a rank has written."""
    return f"{SHARDS_FOLDER}/rank-{rank:05d}.safetensors"


def save_shards(checkpoint: Path, tensors: Tensors, group: Group) -> None:
    """Write this rank's parts of tensors in host memory; each rank of the group calls it. Without a
    group this process has the whole of every tensor.

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
        # It is no Exception, and says nothing but the tracebacks of all ranks.
        raise next(iter(error.failures.values()))[0] from error


def load_shards(checkpoint: Path, tensors: Tensors) -> None:
    """Copy saved tensors into these, each rank by itself; a DTensor gets the parts that it has."""
    try:
        load(dict(tensors), storage_reader=_reader(checkpoint), no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What the shards hold, by name: tensors on the meta device."""
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
    """Names a file by its rank, and streams it to the disk: the class of torch serializes a file as
    one `bytes` object first, during which no other thread of the process runs."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(str(checkpoint / SHARDS_FOLDER), save_distributed=True)
        self._checkpoint = checkpoint

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Of this rank's part of the plan."""
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
            # As the reader of torch expects it.
            save_file(tensors, file, {"DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"})
        written: Future[list[WriteResult]] = Future()
        sizes = ((item.index, tensors[item.index.fqn].nbytes) for item in plan.items)
        written.set_result([WriteResult(index, num_bytes, None) for index, num_bytes in sizes])
        return written


MODEL, CRITIC = "model/", "critic/"
"""The names of the policy's tensors begin with the one, of the critic's with the other."""


@dataclass(frozen=True)
class _Role:
    """Names of tensors begin with `model` or `optimizer`, those of the latter then with a kind."""

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
        """Of the optimizer's state, the tensor with this name in a checkpoint."""
        kind, _, of = name.removeprefix(self.optimizer).partition("/")
        parameter = self.parameters[of]
        if saved.shape == parameter.shape:
            allocated = torch.zeros_like(parameter, dtype=saved.dtype)
        else:
            allocated = torch.zeros_like(saved, device=parameter.device)
        self.adamw.state[parameter][kind] = allocated


def tensors_of(trainer: Trainer, contents: Sequence[str]) -> dict[str, torch.Tensor]:
    """Those to save, by name."""
    tensors = {}
    for role in _roles(trainer):
        tensors.update(role.weights if "model" in contents else {})
        tensors.update(role.moments if "optimizer" in contents else {})
    return tensors


def load_tensors(
    checkpoint: Path, contents: Sequence[str], trainer: Trainer, model_path: str
) -> None:
    """Into the trainer, those that `contents` name; `model_path` is where its model is from.
    ConfigError if the checkpoint is of another model."""
    saved = saved_tensors(checkpoint)
    policy, *critics = _roles(trainer)
    _require_same_model(policy.weights, saved, checkpoint, model_path)
    for critic in critics:
        _require_critic(critic.weights, saved, checkpoint)
    if "optimizer" in contents:
        for role in (policy, *critics):
            for name in (name for name in saved if name.startswith(role.optimizer)):
                role.allocate(name, saved[name])
    load_shards(checkpoint, tensors_of(trainer, contents))


def _roles(trainer: Trainer) -> Iterator[_Role]:
    """The policy, and the critic if there is one."""
    policy, critic = trainer.policy, trainer.critic
    yield _Role(MODEL, "optimizer/", policy.parameters(), trainer.optimizer, policy.buffers())
    if critic is not None:
        yield _Role(CRITIC, "critic_optimizer/", critic.parameters(), critic.optimizer)


def _require_same_model(ours: Tensors, saved: Tensors, path: Path, model_path: str) -> None:
    theirs = {name: t.shape for name, t in saved.items() if name.startswith(MODEL)}
    other = f"run.resume: {path} is of another model:"
    for name in (name for name in (*ours, *theirs) if name in theirs):
        shape = theirs[name]
        expected = tuple(ours[name].shape) if name in ours else "it does not exist"
        if expected != tuple(shape):
            raise ConfigError(
                f"{other} {name.removeprefix(MODEL)} has the shape {tuple(shape)}, in model.path "
                f"{model_path} {expected}"
            )
    if missing := sorted(ours.keys() - theirs.keys()):
        raise ConfigError(f"{other} it has no {missing[0].removeprefix(MODEL)}")


def _require_critic(ours: Tensors, saved: Tensors, path: Path) -> None:
    if not any(name.startswith(CRITIC) for name in saved):
        raise ConfigError(
            f"run.resume: {path} has no critic, which algorithm.advantage gae goes on with"
        )
    for name, tensor in ours.items():
        if name not in saved or saved[name].shape != tensor.shape:
            raise ConfigError(
                f"run.resume: {path} is of another model: {name} does not fit; "
                "algorithm.value.model_path names the model that its critic began as"
            )
