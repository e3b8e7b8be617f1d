"""Saves one checkpoint again and again, each time killed a step further into its write.

    python -m tests.system.killed_saves RUN MODEL

Each attempt is a process of its own that SIGKILLs itself at its k-th operation on a file below the
folder of the checkpoints, k = 1, 2, ..., until one lives to the end. After each, the checkpoint
that the run goes on from is compared with the trainer that it was saved from.
"""

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from learners.checkpoints.contents import tensors_of, whole_tensors
from learners.checkpoints.writer import CheckpointWriter
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.checkpoints.find import newest, path_of
from streamrl.checkpoints.history import new_history, write_history
from streamrl.config import RunConfig
from tests.training import make_batch, make_config, make_trainer

HISTORY = new_history()
CONTENTS = ("model", "optimizer")


def save(config: RunConfig, trainer: Trainer, version: int) -> None:
    writer = CheckpointWriter(config, HISTORY)
    writer.save(trainer, LearnerState(version), {}, lambda: None).result()
    writer.close()


def killed_at(operation: int, checkpoints: Path) -> None:
    """This process, at so many-th operation on a file of the checkpoints."""
    seen = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            seen += str(arguments[0]).startswith(str(checkpoints))
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def attempt(config: RunConfig, trainer: Trainer, version: int, operation: int) -> bool:
    """Whether the save of this version was killed at this operation."""
    if (child := os.fork()) == 0:
        killed_at(operation, config.run.path / "checkpoints")
        save(config, trainer, version)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def main(run: Path, model: Path) -> None:
    # A forked process has none of the threads of its parent.
    torch.set_num_threads(1)
    config = make_config(
        model={"path": str(model)},
        run={"folder": run.parent, "name": run.name, "resume": "auto"},
        learner={"checkpoint": {"keep": 1}, "device": "cpu"},
    )
    checkpoints, trainers = run / "checkpoints", {}
    for version in (1, 2):
        trainers[version] = make_trainer(config)
        for seed in range(version):
            trainers[version].step(make_batch(seed))
    write_history(checkpoints, HISTORY)
    assert not attempt(config, trainers[1], 1, operation=0)
    kept = shutil.copytree(path_of(run, 1), run / "kept")
    seen: list[int] = []
    while attempt(config, trainers[2], 2, len(seen) + 1):
        seen.append(check(config, trainers))
        shutil.rmtree(path_of(run, 2), ignore_errors=True)
        shutil.copytree(kept, path_of(run, 1), dirs_exist_ok=True)
    assert check(config, trainers) == 2
    assert sorted(os.listdir(checkpoints)) == ["history.json", "step-00000002"]
    print(f"{seen.count(1)} kills before the rename, {seen.count(2)} after it")


def check(config: RunConfig, trainers: Mapping[int, Trainer]) -> int:
    """The version that the run goes on from, which has the parameters of its trainer."""
    found = newest(config.run.path)
    assert found is not None
    assert found.damaged == ()
    saved = whole_tensors(found.path, "")
    for name, tensor in tensors_of(trainers[found.policy_version], CONTENTS).items():
        assert torch.equal(tensor, saved[name]), name
    return found.policy_version


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
