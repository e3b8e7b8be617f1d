"""Checkpoints: everything a learner needs to repeat the next step exactly.

    checkpoints/step-00000020/
        model.safetensors, config.json, tokenizer...    loads in transformers, vLLM, SGLang
        optimizer.safetensors                           AdamW's moments and step, by parameter name
        critic.safetensors, critic_optimizer.safetensors   with advantage gae
        state.json                                      version, books, credit, random state

Invariant: a folder under its final name is complete and on disk. No pickle.
"""

import base64
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch.optim import AdamW

from learners.critic import Critic
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, OtherReleaseError
from streamrl.types import Books

log = logging.getLogger(__name__)

Parameters: TypeAlias = Mapping[str, torch.nn.Parameter]

_PREFIX = "step-"
FORMAT = 2
"""Of state.json; a checkpoint of another format is refused."""


def save(config: RunConfig, trainer: Trainer, state: LearnerState) -> Path:
    """Write the checkpoint of this state; delete those beyond `learner.checkpoint.keep`."""
    folder = config.run.path / "checkpoints"
    path = folder / f"{_PREFIX}{state.policy_version:08d}"
    unfinished = folder / f".{path.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model = config.model
    trainer.policy.save(unfinished, model.tokenizer_path, trust_remote_code=model.trust_remote_code)
    policy = trainer.policy.parameters()
    save_file(_optimizer_tensors(policy, trainer.optimizer), unfinished / "optimizer.safetensors")
    if trainer.critic is not None:
        _save_critic(trainer.critic, unfinished)
    record = {
        "format": FORMAT,
        "policy_version": state.policy_version,
        "books": msgspec.to_builtins(state.books, str_keys=True),
        "credit": trainer.credit.state_dict(),
        "torch_random_state": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    (unfinished / "state.json").write_text(json.dumps(record))
    _sync(unfinished)
    if path.exists():
        shutil.rmtree(path)
    unfinished.rename(path)
    _sync(folder)
    for older in list_checkpoints(folder)[: -config.learner.checkpoint.keep]:
        shutil.rmtree(older)
    return path


def find(config: RunConfig) -> Path | None:
    """The checkpoint that `run.resume` means, if any.

    Raises:
        ConfigError: a path was given and holds no checkpoint.
    """
    match config.run.resume:
        case "never":
            return None
        case "auto":
            checkpoints = list_checkpoints(config.run.path / "checkpoints")
            return checkpoints[-1] if checkpoints else None
        case path:
            if not (Path(path) / "state.json").is_file():
                raise ConfigError(f"run.resume: {path} is no checkpoint (it has no state.json)")
            return Path(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if (path / "state.json").is_file())


def restore(path: Path, trainer: Trainer) -> LearnerState:
    """Load optimizer, credit and random state into a trainer whose policy has these weights.

    Returns:
        The state of the learner itself.

    Raises:
        ConfigError: the checkpoint is of another model, or of another release of StreamRL.
    """
    record: dict[str, Any] = json.loads((path / "state.json").read_text())
    if (written := record.get("format", 1)) != FORMAT:
        what, remedy = f"run.resume: the checkpoint {path}", "start the run anew with --new"
        raise OtherReleaseError.of(what, written, FORMAT, remedy)
    _load_optimizer(trainer.policy.parameters(), trainer.optimizer, path / "optimizer.safetensors")
    if trainer.critic is not None:
        _load_critic(trainer.critic, path)
    trainer.credit.load_state_dict(record["credit"])
    random_state = bytearray(base64.b64decode(record["torch_random_state"]))
    torch.set_rng_state(torch.frombuffer(random_state, dtype=torch.uint8))
    return LearnerState(
        policy_version=record["policy_version"],
        books=msgspec.convert(record["books"], Books, str_keys=True, strict=False),
    )


def _save_critic(critic: Critic, folder: Path) -> None:
    parameters = critic.parameters()
    weights = {name: p.detach().contiguous() for name, p in parameters.items()}
    save_file(weights, folder / "critic.safetensors")
    moments = _optimizer_tensors(parameters, critic.optimizer)
    save_file(moments, folder / "critic_optimizer.safetensors")


def _load_critic(critic: Critic, path: Path) -> None:
    if not (path / "critic.safetensors").is_file():
        raise ConfigError(
            f"run.resume: {path} has no critic, which algorithm.advantage gae goes on with"
        )
    parameters = critic.parameters()
    for name, tensor in load_file(path / "critic.safetensors").items():
        _require_fit(parameters.get(name), tensor, name, path)
        parameters[name].data.copy_(tensor)
    _load_optimizer(parameters, critic.optimizer, path / "critic_optimizer.safetensors")


def _optimizer_tensors(parameters: Parameters, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """AdamW's state as "kind/parameter"."""
    return {
        f"{kind}/{name}": tensor.contiguous()
        for name, parameter in parameters.items()
        for kind, tensor in optimizer.state[parameter].items()
    }


def _load_optimizer(parameters: Parameters, optimizer: AdamW, file: Path) -> None:
    for key, tensor in load_file(file).items():
        kind, _, name = key.partition("/")
        if kind != "step":
            _require_fit(parameters.get(name), tensor, name, file.parent)
        optimizer.state[parameters[name]][kind] = tensor.to(parameters[name].device)


def _require_fit(
    parameter: torch.nn.Parameter | None, tensor: torch.Tensor, name: str, path: Path
) -> None:
    if parameter is None or tensor.shape != parameter.shape:
        raise ConfigError(f"run.resume: {path} is of another model: {name} does not fit")


def _sync(folder: Path) -> None:
    """Write the files to disk, then the folder that names them."""
    for file in (*(f for f in folder.iterdir() if f.is_file()), folder):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
