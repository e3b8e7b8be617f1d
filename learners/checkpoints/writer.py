"""Writes a checkpoint: a copy of the state in host memory first, then the files, in a thread.

    checkpoints/step-00000020/
        shards/rank-00000.safetensors    model, optimizer and critic, as each rank holds them
        model.safetensors                the policy, loads in transformers, vLLM and SGLang
        config.json, tokenizer...
        state.json                       version, books, history, random state, ...
        manifest.json                    size and checksum of each file

Every rank has a writer and calls it in lockstep; rank 0 also writes what belongs to no single rank,
and gives the folder its final name. Until then the name contains the learner's id, so a learner
that was replaced and wakes up cannot write into its successor's folder. Waits for the other ranks,
until they have written, or their connections close because they ended.

Invariant: a folder under its final name is complete and on disk; a kill before that costs only this
checkpoint. If one rank cannot write, the save fails on all ranks.
"""

import base64
import json
import logging
import math
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from learners.checkpoints.contents import (
    MODEL,
    SHARDS_FOLDER,
    Group,
    save_shards,
    shard_file,
    tensors_of,
    whole_tensors,
)
from learners.parallel.ranks import UNBOUNDED
from learners.policy.policy import Policy
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.checkpoints.find import FORMAT, STATE_FILE, base_digest, path_of
from streamrl.checkpoints.history import History, require_surviving
from streamrl.checkpoints.manifest import FileRecords, record_files, write_manifest
from streamrl.checkpoints.retention import Validated, delete_older
from streamrl.config import RunConfig
from streamrl.durable_files import share_weights, sync
from streamrl.errors import CheckpointWriteError, StreamRLError, TransportError
from streamrl.service import FORCED_S, force_s

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class WritingRanks:
    """The ranks' side of writing. All ranks create theirs together; `group` is None with a single
    rank. An error of one rank is raised by all, so none waits for a rank that has given up."""

    def __init__(self) -> None:
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        # A separate group, since messages of a writing thread must not mix with those of a step.
        self.group: Group = None if is_alone else dist.new_group(backend="gloo", timeout=UNBOUNDED)
        self.rank = 0 if is_alone else dist.get_rank()

    def run(self, work: Callable[[], Result]) -> list[Result]:
        """Run the work on every rank; the results in rank order.

        Raises:
            OSError, SafetensorError, StreamRLError: a rank's work has raised it.
        """
        mine: tuple[Result | None, Exception | None]
        try:
            mine = (work(), None)
        except (OSError, SafetensorError, StreamRLError) as error:
            mine = (None, error)
        outcomes = [mine]
        if self.group is not None:
            outcomes = [mine] * dist.get_world_size(self.group)
            dist.all_gather_object(outcomes, mine, group=self.group)
        for _, failure in outcomes:
            if failure is not None:
                raise failure
        results: list[Result] = [result for result, _ in outcomes]  # type: ignore[misc]
        return results


RandomState: TypeAlias = dict[str, Any]
"""The random state in its JSON form."""


def random_state() -> RandomState:
    """The random state of this process, and of its CUDA device if in use; asking would initialize
    CUDA."""
    name, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached_gaussian],
        "torch": _encoded(torch.get_rng_state()),
        "cuda": _encoded(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
    }


def restore_random_state(states: Sequence[RandomState], rank: int, world_size: int) -> None:
    """Restore this rank's state from those of all saving ranks; rank 0's if their number
    differs."""
    state = states[rank] if len(states) == world_size else states[0]
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_decoded(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decoded(state["cuda"]))


def _encoded(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decoded(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


class CheckpointWriter:
    """One rank's writer; all ranks create theirs together, with one history. `validated` is asked
    when older checkpoints are deleted."""

    def __init__(
        self,
        config: RunConfig,
        history: History,
        validated: Callable[[], Validated] = Validated,
    ) -> None:
        self._config = config
        self._run = config.run.path
        self._history = history
        self._validated = validated
        self._ranks = WritingRanks()
        self._is_main = self._ranks.rank == 0
        has_base = config.learner.lora is not None or config.algorithm.needs_reference
        # At the start only, since others may write to the folder during the run.
        self._base = base_digest(config.model) if self._is_main and has_base else ""
        # A learner on a CPU uses no memory of a GPU that is there for others.
        self._has_gpu = torch.cuda.is_initialized()
        # `DefaultStager` of torch 2.11 and 2.12 copies only once, so its copying part is used
        # directly.
        self._stager = StateDictStager(pin_memory=self._has_gpu)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[Path] | None = None
        self._has_warned = False

    def save(
        self,
        trainer: Trainer,
        state: LearnerState,
        means: Mapping[str, float] | None = None,
        flush: Callable[[], None] = lambda: None,
    ) -> Future[Path]:
        """Copy the state, and write it in a thread, while the trainer may make steps. Waits until
        the previous save has ended.

        Args:
            means: of metrics by which the best checkpoints are kept; used on the first rank.
            flush: writes what must be on disk before the checkpoint; called after the copy.

        Returns:
            A future of the checkpoint, done once it is durable and older ones are deleted. It
            raises CheckpointWriteError: it cannot be written, every other checkpoint is as it was;
            FencedError: another learner has made its history the surviving one; TransportError:
            another rank has ended.
        """
        if self._saving is not None:
            wait([self._saving])
        begun_s = time.perf_counter()
        learner = self._config.learner
        contents = learner.checkpoint.contents
        record = {
            "format": FORMAT,
            "policy_version": state.policy_version,
            "books": msgspec.to_builtins(state.books, str_keys=True),
            "history": msgspec.to_builtins(self._history),
            "contents": contents,
            # The adapter's tensors hold everything else.
            "lora_alpha": learner.lora and learner.lora.alpha,
            "base": self._base,
            "means": means or {},
            "credit": trainer.state_dict(),
            "random": random_state(),
        }
        # Into memory that the next save uses again.
        copies = self._stager.stage(tensors_of(trainer, contents), non_blocking=self._has_gpu)
        if self._has_gpu:
            # Does not wait for the device, where a broadcast of weights may wait for its receivers.
            torch.cuda.current_stream().synchronize()
        failure: OSError | None = None
        try:
            flush()
        except OSError as error:
            failure = error
        copy_s = time.perf_counter() - begun_s

        def write() -> Path:
            path = self._save(trainer.policy, copies, record, failure)
            if self._is_main:
                self._say_saved(path, time.perf_counter() - begun_s, copy_s)
            return path

        self._saving = self._thread.submit(write)
        return self._saving

    def _say_saved(self, path: Path, took_s: float, copy_s: float) -> None:
        """Log the save; warn once if a signal would not leave enough time for one."""
        log.info("saved %s in %.2f s; the step waited %.2f s", path, took_s, copy_s)
        left_s = force_s(self._config)
        if self._has_warned or took_s <= left_s:
            return
        self._has_warned = True
        log.warning(
            "a checkpoint took %.0f s; a learner is ended by force %g s after a signal, and steps "
            "that it has not saved are trained again: set run.stop_s to %d",
            took_s,
            left_s,
            math.ceil(2 * took_s + FORCED_S),
        )

    def close(self) -> None:
        """Waits for a running save."""
        self._thread.shutdown()
        self._stager.close()

    def _save(
        self,
        policy: Policy,
        tensors: Mapping[str, torch.Tensor],
        record: Mapping[str, Any],
        failure: OSError | None,
    ) -> Path:
        version = record["policy_version"]
        path = path_of(self._run, version)
        unfinished = path.with_name(f".{path.name}.{self._history.learner_id}.unfinished")
        run = self._ranks.run
        try:
            states = run(lambda: self._begin(unfinished, record["random"], failure))
            save_shards(unfinished, tensors, self._ranks.group)
            whole_record = {**record, "random": states}
            files = run(lambda: self._write(unfinished, policy, whole_record))
            run(lambda: self._commit(unfinished, path, files))
        except (OSError, SafetensorError) as error:
            raise CheckpointWriteError(f"{path} cannot be saved: {error}") from error
        except RuntimeError as error:
            if self._ranks.group is None:
                raise
            raise TransportError(f"the ranks of the learner cannot save: {error}") from error
        finally:
            if self._is_main:
                shutil.rmtree(unfinished, ignore_errors=True)
        if self._is_main:
            kept = self._config.learner.checkpoint
            delete_older(self._run, self._history, version, kept, self._validated())
        return path

    def _begin(self, folder: Path, random: Any, failure: OSError | None) -> Any:
        """Create the folder; returns this rank's random state."""
        if failure is not None:
            raise failure
        if self._is_main:
            shutil.rmtree(folder, ignore_errors=True)
            (folder / SHARDS_FOLDER).mkdir(parents=True)
        return random

    def _write(self, folder: Path, policy: Policy, record: Mapping[str, Any]) -> FileRecords:
        """Write this rank's shard; the manifest's lines of all that this rank wrote."""
        shard = folder / shard_file(self._ranks.rank)
        files = [shard] if shard.exists() else []
        if self._is_main:
            has_weights = "hf_model" in record["contents"]
            weights = whole_tensors(folder, MODEL) if has_weights else {}
            policy.save(folder, self._config.model, weights)
            (folder / STATE_FILE).write_text(json.dumps(record))
            files += [path for path in folder.iterdir() if path.is_file()]
        return record_files(folder, files)

    def _commit(self, unfinished: Path, path: Path, files: list[FileRecords]) -> None:
        """Give a complete checkpoint its final name. A folder that had this name is deleted
        afterwards, or gets its name back if this fails."""
        if not self._is_main:
            return
        share_weights(unfinished)
        write_manifest(unfinished, {name: r for some in files for name, r in some.items()})
        require_surviving(path.parent, self._history)
        replaced = path.with_name(f".{path.name}.{self._history.learner_id}.replaced")
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        try:
            unfinished.rename(path)
        except OSError:
            if replaced.exists():
                replaced.rename(path)
            raise
        sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
