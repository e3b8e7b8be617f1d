"""Recorded steps, trained again: by the settings of the run, and by others beside them.

Both policies begin with the same weights and see the same batches; each follows its own updates.
The checkpoints of the run say whether the settings of the run make its weights again.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import torch
from msgspec import Struct

from learners.replay.record import read_step, recorded_steps
from learners.replay.replayed import Replayed, ReplayedStep
from learners.replay.settings import first_change, settings_of
from learners.replay.starts import choose_start, complete_checkpoints
from streamrl.errors import ConfigError
from streamrl.run_folder import config_of

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
    estimate_ess: float
    update_norm: float

    @classmethod
    def of(cls, step: ReplayedStep) -> "Measured":
        metrics = {
            name: float(step.metrics[metric])
            for name, metric in MEASURES.items()
            if metric in step.metrics
        }
        estimate = step.estimate
        return cls(metrics, estimate.reward, estimate.ess, float(step.update.norm()))


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
    """`largest_difference` is 0 only if every bit is the same."""

    policy_version: int
    path: str
    largest_difference: float


class Report(Struct, frozen=True):
    """A replay. Its steps begin after `policy_version`."""

    run: str
    settings: Sequence[str]
    policy_version: int
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
        saved = {c.policy_version: c.path for c in complete_checkpoints(self._run)}
        for number in range(self._first + 1, self.last_step + 1):
            parts = read_step(self._files[number])
            recorded = self._recorded.step(parts)
            compared = ComparedStep(number, Measured.of(recorded))
            if self._changed is not None:
                compared = self._compare(compared, recorded, self._changed.step(parts), begun)
            self._steps = (*self._steps, compared)
            if (path := saved.get(number)) is not None:
                difference = self._recorded.difference(path)
                found = ComparedCheckpoint(number, str(path), difference)
                self._checkpoints = (*self._checkpoints, found)
            yield compared

    def report(self) -> Report:
        """Of the steps so far."""
        return Report(
            run=str(self._run),
            settings=self._overrides,
            policy_version=self._first,
            is_exact=self._recorded.is_on_cpu and not self._has_several_ranks(),
            steps=self._steps,
            checkpoints=self._checkpoints,
            sha256=self._recorded.checksum(),
            changed_sha256="" if self._changed is None else self._changed.checksum(),
        )

    def _has_several_ranks(self) -> bool:
        """Those of one sequence x tensor block share the file of a step."""
        mesh = self._mesh
        return mesh.sequence * mesh.tensor > 1 or any(len(f) > 1 for f in self._files.values())

    def _compare(
        self,
        compared: ComparedStep,
        recorded: ReplayedStep,
        changed: ReplayedStep,
        begun: torch.Tensor,
    ) -> ComparedStep:
        assert self._changed is not None, "there are other settings"
        ours, theirs = recorded.update.double(), changed.update.double()
        norms = ours.norm() * theirs.norm()
        now = self._recorded.parameters()
        moved, apart = (now - begun).norm(), (self._changed.parameters() - now).norm()
        return ComparedStep(
            compared.step,
            compared.recorded,
            Measured.of(changed),
            cosine=float(torch.dot(ours, theirs) / norms) if norms > 0 else None,
            distance=float(apart / moved) if moved > 0 else None,
        )
