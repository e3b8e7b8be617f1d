"""`streamrl export`: the policy of a checkpoint as a Hugging Face folder, in a chosen dtype.

Reads what the ranks have saved, whatever their number, and needs neither a GPU nor `model.path`.
Invariant: the folder appears under its name once it is complete.
"""

import argparse
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from learners.checkpoints.contents import MODEL
from learners.checkpoints.shards import whole_tensors
from learners.policy.hugging_face import save_model
from streamrl.checkpoints.find import (
    Checkpoint,
    list_checkpoints,
    newest,
    path_of,
    read_checkpoint,
    version_of,
)
from streamrl.config.model import ModelSettings
from streamrl.errors import ConfigError
from streamrl.run_folder import find_run


def main(arguments: argparse.Namespace) -> int:
    disable_progress_bar()
    if not re.fullmatch(r"\d+(KB|MB|GB|TB)", arguments.max_shard_size):
        raise ConfigError(
            f"--max-shard-size: was {arguments.max_shard_size!r}, and must be a whole number of "
            "KB, MB, GB or TB, such as 500MB"
        )
    config = find_run(arguments.folder)
    run = config.run.path
    checkpoint = _newest(run) if arguments.step is None else _of_step(run, arguments.step)
    default = run / "export" / checkpoint.path.name
    folder = Path(arguments.output) if arguments.output else default
    dtype, size = getattr(torch, arguments.dtype), arguments.max_shard_size
    trust = config.model.trust_remote_code
    export(checkpoint.path, folder, dtype, size, trust_remote_code=trust)
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(
        f"{folder}: step {checkpoint.policy_version}, {arguments.dtype}, {num_bytes / 1e6:,.1f} MB"
    )
    return 0


def export(
    checkpoint: Path,
    folder: Path,
    dtype: torch.dtype,
    max_shard_size: str,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Write the policy of a checkpoint, whose files have been compared with its manifest.

    Raises:
        ConfigError: the folder exists already, or cannot be written.
    """
    if folder.exists():
        raise ConfigError(f"--output: {folder} exists already; name another folder, or remove it")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    model = ModelSettings(path=str(checkpoint), trust_remote_code=trust_remote_code)
    described = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in whole_tensors(checkpoint, MODEL).items()
    }
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_model(unfinished, described, model, weights, max_shard_size)
        unfinished.rename(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--output: {folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _newest(run: Path) -> Checkpoint:
    found = newest(run)
    if found.checkpoint is None:
        raise ConfigError(f"{run} has no checkpoint yet")
    for damage in found.damaged:
        print(f"{damage.sentence}; an older one is taken")
    return found.checkpoint


def _of_step(run: Path, step: int) -> Checkpoint:
    path = path_of(run, step)
    if not path.is_dir():
        steps = ", ".join(str(version_of(path)) for path in list_checkpoints(run)) or "none"
        raise ConfigError(f"--step: was {step}, and the checkpoints of {run} are of: {steps}")
    return read_checkpoint(path)
