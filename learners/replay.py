"""Recorded steps, trained again: by the settings of the run, and by others beside them.

Both policies begin with the same weights, of the configuration's model or of a checkpoint whose
next step is recorded, and see the same batches; each follows its own updates. The checkpoints of
the run say whether the settings of the run make its weights again: bit for bit on a CPU.
Shapes: P parameters.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import torch
from msgspec import Struct, structs

from learners.batch.training_batch import TrainingBatch
from learners.checkpoints.contents import tensors_of, whole_tensors
from learners.checkpoints.restore import load_trainer
from learners.checkpoints.writer import random_state, restore_random_state
from learners.parallel.ranks import Ranks
from learners.step_record import ReplayPart, first_change, read_step, recorded_steps, settings_of
from streamrl.algorithms.parts import accepts_parts
from streamrl.checkpoints.find import Checkpoint, checkpoints_of, list_checkpoints, read_checkpoint
from streamrl.checkpoints.history import read_history
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, DamagedCheckpointError, UnreadableCheckpointError
from streamrl.run_folder import config_of


def choose_start(run: Path, recorded: Collection[int], version: int | None) -> Checkpoint | None:
    """The checkpoint of this version, or the oldest one that the records continue; None for the
    model of the configuration. ConfigError if there is none."""
    if not recorded:
        raise ConfigError(f"{run}: nothing is recorded; set buffer.record: true before a run")
    candidates = dict(_candidates(run))
    possible = sorted(v for v in candidates if v + 1 in recorded)
    chosen = possible[0] if version is None and possible else version
    if chosen is None or chosen not in possible:
        wanted = "" if version is None else f"--from {version}: "
        where = f"from {', '.join(map(str, possible))}" if possible else "from nowhere"
        raise ConfigError(
            f"{wanted}the steps {min(recorded)} to {max(recorded)} of {run} are recorded, and "
            f"complete checkpoints are at {', '.join(map(str, sorted(candidates)))}: a replay can "
            f"begin {where}"
        )
    return candidates[chosen]


def _candidates(run: Path) -> Iterator[tuple[int, Checkpoint | None]]:
    """With their versions; the model of the configuration is version 0."""
    yield 0, None
    history = read_history(checkpoints_of(run))
    bases = [Path(history.base)] if history is not None and history.base else []
    for checkpoint in _complete([*bases, *list_checkpoints(run)]):
        yield checkpoint.policy_version, checkpoint


def _complete(paths: Iterable[Path]) -> Iterator[Checkpoint]:
    for path in paths:
        try:
            yield read_checkpoint(path)
        except (DamagedCheckpointError, UnreadableCheckpointError):
            continue


_LOG_BOUND = 20.0

MEASURES: Mapping[str, str] = {
    "loss": "actor/loss",
    "grad_norm": "learner/grad_norm",
    "lr": "learner/lr",
    "rollout_is_ess": "mismatch/rollout_is_eff_sample_size",
    "sequence_ess": "mismatch/sequence_eff_sample_size",
    "mismatch_k3_kl": "mismatch/mismatch_k3_kl",
    "trained_token_frac": "actor/trained_token_frac",
    "reward": "reward/mean",
}
"""What a report has of each step, by the metric it is."""


class Measured(Struct, frozen=True):
    """One policy's step."""

    metrics: Mapping[str, float]
    """By the names of `MEASURES`; one that the settings do not compute is left out."""
    estimated_reward: float
    """Of the policy before the step, from the batch that others sampled: sum(w R) / sum(w) over the
    episodes, w the ratio of a whole episode."""
    estimate_ess: float
    """(sum w)^2 / sum w^2 / episodes: how far to trust it."""
    update_norm: float


class Replayed:
    """One policy that is trained as the learner trained it: the same batches in the same parts,
    with random generators of its own. Starts from a checkpoint, or from `model.path` without one.
    """

    def __init__(self, config: RunConfig, checkpoint: Checkpoint | None) -> None:
        if config.learner.num_threads:
            torch.set_num_threads(config.learner.num_threads)
        self._trainer, state = load_trainer(config, checkpoint)
        self._random = random_state()
        self.policy_version = state.policy_version
        self._takes_parts = accepts_parts(config.algorithm, config.learner.num_updates)

    @property
    def is_on_cpu(self) -> bool:
        return self._trainer.policy.device.type == "cpu"

    def step(self, parts: Sequence[ReplayPart]) -> tuple[Measured, torch.Tensor]:
        """Train the next recorded step; also what was added to the parameters [P]."""
        restore_random_state([self._random], 0, 1)
        whole = ReplayPart(
            tuple(header for part in parts for header in part.headers),
            tuple(group for part in parts for group in part.groups),
        )
        reward, ess = self._estimated_reward(self._batch(whole))
        before = self.parameters()
        for part in parts if self._takes_parts else [whole]:
            self._trainer.accumulate(self._batch(part))
        found = self._trainer.update()
        self.policy_version += 1
        self._random = random_state()
        update = self.parameters() - before
        metrics = {name: float(found[key]) for name, key in MEASURES.items() if key in found}
        return Measured(metrics, reward, ess, float(update.norm())), update

    def parameters(self) -> torch.Tensor:
        """[P] a copy, in host memory."""
        parameters = self._trainer.policy.parameters().values()
        return torch.cat([p.detach().float().cpu().flatten() for p in parameters])

    def difference(self, checkpoint: Path) -> float:
        """The largest difference from any number of the saved state; 0 only if every bit of the
        parameters and of the optimizer's state is the same."""
        ours = tensors_of(self._trainer, ("model", "optimizer"))
        largest = 0.0
        for name, saved in whole_tensors(checkpoint, "").items():
            mine = ours[name].detach().cpu()
            if not _is_same(mine, saved):
                gap = (mine.double() - saved.double()).abs().max()
                largest = max(largest, float(gap) if gap > 0 else math.ulp(0.0))
        return largest

    def checksum(self) -> str:
        """SHA-256 of the parameters, by name."""
        digest = hashlib.sha256()
        for name, tensor in sorted(tensors_of(self._trainer, ("model",)).items()):
            digest.update(name.encode())
            digest.update(_bytes(tensor.detach().cpu()).numpy().tobytes())
        return digest.hexdigest()

    def _batch(self, part: ReplayPart) -> TrainingBatch:
        return TrainingBatch.shared(part.headers, part.groups, self.policy_version, Ranks())

    def _estimated_reward(self, batch: TrainingBatch) -> tuple[float, float]:
        """By self-normalized importance sampling, with its effective sample size."""
        log_ratios = self._trainer.logprobs(batch) - batch.behavior_logprobs
        episodes = batch.episodes
        sums = episodes.sequences.sum(log_ratios.double())
        weights = sums.clamp(-_LOG_BOUND, _LOG_BOUND).exp()
        rewards = episodes.each(batch.rewards).double()
        total = weights.sum()
        ess = total.square() / weights.square().sum() / len(weights)
        return float((weights * rewards).sum() / total), float(ess)


def _is_same(ours: torch.Tensor, saved: torch.Tensor) -> bool:
    return ours.shape == saved.shape and torch.equal(_bytes(ours), _bytes(saved))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


class ComparedStep(Struct, frozen=True):
    """`changed` and what compares the two are None without other settings."""

    step: int
    recorded: Measured
    changed: Measured | None = None
    cosine: float | None = None
    """Of the two updates."""
    distance: float | None = None
    """Norm of the difference of the two policies after the step, by that of what the recorded one
    has moved since the start."""


class ComparedCheckpoint(Struct, frozen=True):
    policy_version: int
    path: str
    largest_difference: float
    """See `Replayed.difference`."""


class ReplayReport(Struct, frozen=True):
    run: str
    settings: Sequence[str]
    policy_version: int
    """The steps begin after it."""
    is_exact: bool
    """Whether the weights of the run must come out bit for bit: a CPU, and a run of one rank."""
    steps: Sequence[ComparedStep]
    checkpoints: Sequence[ComparedCheckpoint]
    sha256: str
    """Of the recorded policy's parameters at the end."""
    changed_sha256: str = ""


class Replay:
    """Of the run in this folder, from a version, for so many steps; by default all that it can.

    Raises:
        ConfigError: there is no such run, nothing is recorded from there on, or a setting cannot be
            used.
    """

    def __init__(
        self,
        run: Path,
        overrides: Sequence[str] = (),
        version: int | None = None,
        num_steps: int | None = None,
    ) -> None:
        if num_steps is not None and num_steps < 1:
            raise ConfigError(f"--steps: was {num_steps}; must be at least 1")
        self._run = run
        self._overrides = tuple(overrides)
        config = config_of(run)
        self._files = recorded_steps(run)
        start = choose_start(run, self._files, version)
        first = 1 if start is None else start.policy_version + 1
        settings = settings_of(config, first)
        other = settings_of(config, first, overrides) if overrides else None
        self._mesh = settings.learner.mesh
        self._recorded = Replayed(settings, start)
        self._changed = None if other is None else Replayed(other, start)
        self._first = self._recorded.policy_version
        last = next(v for v in count(self._first) if v + 1 not in self._files)
        last = last if num_steps is None else min(last, self._first + num_steps)
        self.change = first_change(settings, range(first, last + 1))
        """The first step asked for that other settings made, before which the replay ends."""
        self.last_step = last if self.change is None else self.change[0] - 1
        self._steps: tuple[ComparedStep, ...] = ()
        self._checkpoints: tuple[ComparedCheckpoint, ...] = ()

    def steps(self) -> Iterator[ComparedStep]:
        """Train them one after the other."""
        begun = self._recorded.parameters()
        saved = {c.policy_version: c.path for c in _complete(list_checkpoints(self._run))}
        for number in range(self._first + 1, self.last_step + 1):
            parts = read_step(self._files[number])
            recorded, update = self._recorded.step(parts)
            compared = ComparedStep(number, recorded)
            if self._changed is not None:
                compared = self._compare(compared, update, *self._changed.step(parts), begun)
            self._steps = (*self._steps, compared)
            if (path := saved.get(number)) is not None:
                difference = self._recorded.difference(path)
                found = ComparedCheckpoint(number, str(path), difference)
                self._checkpoints = (*self._checkpoints, found)
            yield compared

    def report(self) -> ReplayReport:
        """Of the steps so far."""
        # Those of one sequence x tensor block share the file of a step.
        is_one_share = self._mesh.sequence * self._mesh.tensor == 1
        has_one_rank = is_one_share and all(len(files) == 1 for files in self._files.values())
        return ReplayReport(
            run=str(self._run),
            settings=self._overrides,
            policy_version=self._first,
            is_exact=self._recorded.is_on_cpu and has_one_rank,
            steps=self._steps,
            checkpoints=self._checkpoints,
            sha256=self._recorded.checksum(),
            changed_sha256="" if self._changed is None else self._changed.checksum(),
        )

    def _compare(
        self,
        compared: ComparedStep,
        update: torch.Tensor,
        changed: Measured,
        changed_update: torch.Tensor,
        begun: torch.Tensor,
    ) -> ComparedStep:
        assert self._changed is not None, "there are other settings"
        ours, theirs = update.double(), changed_update.double()
        norms = ours.norm() * theirs.norm()
        now = self._recorded.parameters()
        moved, apart = (now - begun).norm(), (self._changed.parameters() - now).norm()
        return structs.replace(
            compared,
            changed=changed,
            cosine=float(torch.dot(ours, theirs) / norms) if norms > 0 else None,
            distance=float(apart / moved) if moved > 0 else None,
        )
