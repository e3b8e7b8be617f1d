"""What a checkpoint holds: everything a learner needs to repeat the next step exactly.

    checkpoints/step-00000020/
        model.safetensors, config.json, tokenizer...    loads in transformers, vLLM, SGLang
        optimizer.safetensors                           AdamW's moments and step, by parameter name
        critic.safetensors, critic_optimizer.safetensors   with advantage gae
        state.json                                      version, books, history, random state, ...
        manifest.json                                   size and checksum of each file

Invariant: a folder under its final name is complete and on disk, and a checkpoint is deleted only
after `keep` newer ones of its history are. No pickle.
"""

import base64
import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM

from learners.parallel.sharding import assign, full
from learners.policy.critic import Critic
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.checkpoints.find import (
    FORMAT,
    STATE_FILE,
    Checkpoint,
    checkpoints_of,
    foreign,
    list_checkpoints,
    path_of,
    version_of,
)
from streamrl.checkpoints.history import History, read_history
from streamrl.checkpoints.manifest import verify, write_manifest
from streamrl.config import RunConfig
from streamrl.durable_files import sync
from streamrl.errors import (
    CheckpointWriteError,
    ConfigError,
    DamagedCheckpointError,
    FencedError,
)

log = logging.getLogger(__name__)

Parameters: TypeAlias = Mapping[str, torch.nn.Parameter]
Tensors: TypeAlias = Mapping[str, Mapping[str, torch.Tensor]]
"""By file, then by name."""

_MODEL = "model"


def save(
    config: RunConfig,
    trainer: Trainer,
    state: LearnerState,
    history: History,
    tensors: Tensors | None = None,
) -> Path:
    """Write the checkpoint of this state; delete those beyond `learner.checkpoint.keep`.

    Of several ranks one calls it, with the tensors that all of them have gathered.

    Raises:
        CheckpointWriteError: it cannot be written; every other checkpoint is as it was.
        FencedError: another learner has made its history the surviving one.
    """
    tensors = gather(trainer) if tensors is None else tensors
    path = path_of(config.run.path, state.policy_version)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write(unfinished, config, trainer, state, history, tensors)
        _require_survivor(config.run.path, history)
        _replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointWriteError(f"{path} cannot be saved: {error}") from error
    _delete_older(config.run.path, history, state.policy_version, config.learner.checkpoint.keep)
    return path


def restore(checkpoint: Checkpoint, config: RunConfig, trainer: Trainer) -> LearnerState:
    """Load optimizer, credit and random state into a trainer whose policy has these weights.

    Returns:
        The state of the learner itself.

    Raises:
        ConfigError: the checkpoint is of another model than the run.
    """
    path, record = checkpoint.path, checkpoint.record
    policy = trainer.policy.parameters()
    _require_same_model(config, policy, path)
    _load_optimizer(policy, trainer.optimizer, path / "optimizer.safetensors")
    if trainer.critic is not None:
        _load_critic(trainer.critic, path)
    trainer.credit.load_state_dict(record["credit"])
    random_state = bytearray(base64.b64decode(record["torch_random_state"]))
    torch.set_rng_state(torch.frombuffer(random_state, dtype=torch.uint8))
    return LearnerState(policy_version=checkpoint.policy_version, books=checkpoint.books)


def gather(trainer: Trainer) -> Tensors:
    """The whole tensors of a checkpoint, in host memory; all ranks call it together."""
    policy = trainer.policy.parameters()
    tensors: dict[str, Mapping[str, torch.Tensor]] = {
        _MODEL: trainer.policy.state_dict(),
        "optimizer.safetensors": _optimizer_tensors(policy, trainer.optimizer),
    }
    if trainer.critic is not None:
        critic = trainer.critic.parameters()
        tensors["critic.safetensors"] = critic
        moments = _optimizer_tensors(critic, trainer.critic.optimizer)
        tensors["critic_optimizer.safetensors"] = moments
    return {file: {name: _whole(t) for name, t in of.items()} for file, of in tensors.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return full(tensor).cpu()
    return tensor.detach().contiguous()


def _write(
    folder: Path,
    config: RunConfig,
    trainer: Trainer,
    state: LearnerState,
    history: History,
    tensors: Tensors,
) -> None:
    model = config.model
    trainer.policy.save(
        folder,
        model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        state_dict=tensors[_MODEL],
    )
    for file in tensors.keys() - {_MODEL}:
        save_file(dict(tensors[file]), folder / file)
    record = {
        "format": FORMAT,
        "policy_version": state.policy_version,
        "books": msgspec.to_builtins(state.books, str_keys=True),
        "history": msgspec.to_builtins(history),
        "credit": trainer.credit.state_dict(),
        "torch_random_state": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    (folder / STATE_FILE).write_text(json.dumps(record))
    write_manifest(folder)


def _replace(unfinished: Path, path: Path) -> None:
    """Give a complete checkpoint its name; what had it before is deleted after that."""
    replaced = path.with_name(f".{path.name}.replaced")
    if path.exists():
        path.rename(replaced)
    unfinished.rename(path)
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _require_survivor(run: Path, history: History) -> None:
    surviving = read_history(checkpoints_of(run))
    if surviving is not None and surviving.learner_id != history.learner_id:
        raise FencedError(f"another learner goes on with {run}; this one saves no more checkpoints")


def _delete_older(run: Path, history: History, policy_version: int, keep: int) -> None:
    """Those before the `keep` newest complete ones of the history; what fails is left there."""
    others = set(foreign(run, history, policy_version))
    ours = [path for path in list_checkpoints(run) if path not in others]
    complete = [path for path in ours if _is_complete(path)]
    for path in ours:
        if version_of(path) < version_of(complete[-keep:][0]):
            with _logged(path):
                shutil.rmtree(path)


def _is_complete(path: Path) -> bool:
    try:
        verify(path, contents=False)
    except DamagedCheckpointError:
        return False
    return True


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("cannot delete the older checkpoint %s: %s", path, error)


def _require_same_model(config: RunConfig, policy: Parameters, path: Path) -> None:
    """The policy has the checkpoint's shapes; the run's are those of `model.path`."""
    model = config.model
    trust = model.trust_remote_code
    with torch.device("meta"):
        described = AutoConfig.from_pretrained(model.path, trust_remote_code=trust)
        expected = AutoModelForCausalLM.from_config(described, trust_remote_code=trust)
    shapes = {name: parameter.shape for name, parameter in expected.named_parameters()}
    for name, parameter in policy.items():
        if shapes.get(name) != parameter.shape:
            raise ConfigError(
                f"run.resume: {path} is of another model: {name} has the shape "
                f"{tuple(parameter.shape)}, in model.path {model.path} "
                f"{tuple(shapes[name]) if name in shapes else 'it does not exist'}"
            )
    if missing := sorted(shapes.keys() - policy.keys()):
        raise ConfigError(f"run.resume: {path} is of another model: it has no {missing[0]}")


def _load_critic(critic: Critic, path: Path) -> None:
    if not (path / "critic.safetensors").is_file():
        raise ConfigError(
            f"run.resume: {path} has no critic, which algorithm.advantage gae goes on with"
        )
    parameters = critic.parameters()
    for name, tensor in load_file(path / "critic.safetensors").items():
        _require_fit(parameters.get(name), tensor, name, path)
        assign(parameters[name], tensor)
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
        optimizer.state[parameters[name]][kind] = _like(parameters[name], tensor, kind)


def _like(parameter: torch.nn.Parameter, tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The state as the optimizer holds it: sharded as its parameter is, but for the step."""
    if kind == "step" or not isinstance(parameter, DTensor):
        return tensor.to(parameter.device)
    state = torch.zeros_like(parameter.detach())
    assign(state, tensor)
    return state


def _require_fit(
    parameter: torch.nn.Parameter | None, tensor: torch.Tensor, name: str, path: Path
) -> None:
    if parameter is None or tensor.shape != parameter.shape:
        raise ConfigError(f"run.resume: {path} is of another model: {name} does not fit")
