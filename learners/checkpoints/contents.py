"""What a checkpoint holds of a trainer, by `learner.checkpoint.contents`.

    model      parameters and buffers of the policy, and parameters of the critic
    optimizer  AdamW's state of each
    extra      what rewards and KL controller have measured, and the random generators

Invariant: a tensor is saved under the name of its parameter, so that the optimizer may order and
group parameters otherwise; what is loaded is written into the trainer's own tensors, which ranks
may have sharded in another way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from learners.checkpoints.shards import Tensors, load_shards, saved_tensors
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.errors import ConfigError

MODEL = "model/"
"""The names of the policy's tensors begin with it."""


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


def tensors_of(trainer: Trainer, contents: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Those to save, by name."""
    tensors = {}
    for role in _roles(trainer):
        tensors.update(role.weights if "model" in contents else {})
        tensors.update(role.moments if "optimizer" in contents else {})
    return tensors


def load_tensors(checkpoint: Path, config: RunConfig, trainer: Trainer) -> None:
    """Into the trainer, those that `learner.checkpoint.load_contents` names.

    Raises:
        ConfigError: the checkpoint is of another model than the run.
    """
    contents, saved = config.learner.checkpoint.loaded, saved_tensors(checkpoint)
    policy, *critics = _roles(trainer)
    _require_same_model(policy.weights, saved, checkpoint, config)
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
        yield _Role("critic/", "critic_optimizer/", critic.parameters(), critic.optimizer)


def _require_same_model(ours: Tensors, saved: Tensors, path: Path, config: RunConfig) -> None:
    theirs = {name: t.shape for name, t in saved.items() if name.startswith(MODEL)}
    other = f"run.resume: {path} is of another model:"
    for name in (name for name in (*ours, *theirs) if name in theirs):
        shape = theirs[name]
        expected = tuple(ours[name].shape) if name in ours else "it does not exist"
        if expected != tuple(shape):
            raise ConfigError(
                f"{other} {name.removeprefix(MODEL)} has the shape {tuple(shape)}, in model.path "
                f"{config.model.path} {expected}"
            )
    if missing := sorted(ours.keys() - theirs.keys()):
        raise ConfigError(f"{other} it has no {missing[0].removeprefix(MODEL)}")


def _require_critic(ours: Tensors, saved: Tensors, path: Path) -> None:
    for name, tensor in ours.items():
        if name not in saved:
            raise ConfigError(
                f"run.resume: {path} has no critic, which algorithm.advantage gae goes on with"
            )
        if saved[name].shape != tensor.shape:
            raise ConfigError(f"run.resume: {path} is of another model: {name} does not fit")
