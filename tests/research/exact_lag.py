"""A run of an ablation in one process, whose lag is a setting in place of an outcome.

The engine samples the groups of a step with weights that the trainer had `buffer.max_staleness`
versions before (`even`), or with those of, for each group, 0 to twice as many versions before
(`uneven`); the first steps have only newer ones. `--lag` of an ablation calls `main` in a
process for each run.

Invariant: no daemon, buffer or clock takes part, so on CPUs with the same vector instructions the
same settings give the same run, whatever else the machine does; where episodes have several turns,
their order is that of replies.
The engine is idle while its weights are replaced.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from actors.engines.hf.engine import HfEngine
from actors.episodes.group import unbuffered_lease
from actors.episodes.mixed_runner import MixedRunner, make_runner
from actors.evaluation import greedy_groups_of, scores_of
from actors.prompts import open_stream
from actors.rendering.renderer import ChatRenderer, PromptTooLongError
from learners.batch.training_batch import TrainingBatch
from learners.checkpoints.restore import load_trainer
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.durable_files import write_file
from streamrl.errors import EXIT_CONFIG, ConfigError, StreamRLError, exit_code_of
from streamrl.metrics import staleness_metrics
from streamrl.tracking.jsonl import METRICS_FILE, JsonlTracker
from streamrl.types import GroupHeader, TrajectoryGroup
from streamrl.weights.layout import manifest_of
from tests.research.lag import LAG_FILE, Lag

QUIET_TURNS = 100
T = TypeVar("T")
Weights = Mapping[str, torch.Tensor]


class ReloadedEngine(HfEngine):
    """Takes weights from this process, while nothing runs. Requests that are made together join
    together: how many the decoding thread finds when it looks would be chance."""

    _is_held = False

    async def generate_together(self, work: Sequence[Awaitable[T]]) -> list[T]:
        """Waits until the last one is done; the engine begins once no more requests come."""
        self._is_held = True
        together = asyncio.gather(*work)
        num_waiting, num_quiet = 0, 0
        while num_quiet < QUIET_TURNS and not together.done():
            await asyncio.sleep(0)
            before, num_waiting = num_waiting, len(self._waiting)
            num_quiet = num_quiet + 1 if num_waiting == before else 0
        with self._wake:
            self._is_held = False
            self._wake.notify()
        return await together

    def _has_work(self) -> bool:
        return (not self._is_held or self._is_closed) and super()._has_work()

    def reload(self, weights: Weights, policy_version: int) -> None:
        self._weights.landing(manifest_of(weights))
        self._weights.stage(weights.items())
        self._weights.swap()
        self.policy_version = policy_version


class LaggedRun:
    """Made in the event loop that runs it."""

    def __init__(self, config: RunConfig, lag: Lag) -> None:
        _require_possible(config)
        torch.set_num_threads(config.learner.num_threads or 1)
        self._config = config
        self._num_groups = config.learner.groups_per_step
        self._rng = np.random.default_rng(config.run.seed)
        self._lag = lag
        self._trainer, _ = load_trainer(config, None)
        self._engine = ReloadedEngine.from_config(config, seed=config.run.seed)
        renderer = ChatRenderer.from_config(config)
        stream = open_stream(config, renderer)
        self._runner: MixedRunner = make_runner(config, self._engine, renderer, stream)
        self._layout = self._trainer.policy.layout(config.weights)
        self._past: Mapping[int, Weights] = {}

    async def run(self) -> None:
        """Make `run.max_steps` steps, and score the last policy on held-out prompts."""
        run = self._config.run
        run.path.mkdir(parents=True, exist_ok=True)
        write_file(run.path / "config.yaml", to_yaml(self._config))
        write_file(run.path / LAG_FILE, self._lag)
        tracker = JsonlTracker(run.path / METRICS_FILE, first_step=1)
        try:
            for version in range(run.max_steps):
                start_s = time.perf_counter()
                self._remember(version)
                groups = await self._sample(self._leases(version))
                self._trainer.accumulate(TrainingBatch.of(groups, version))
                metrics = self._trainer.update()
                stale = staleness_metrics(tuple(map(GroupHeader.of, groups)), version)
                seconds = {"learner/step_s": time.perf_counter() - start_s}
                tracker.log({**metrics, **stale, **seconds}, version + 1)
            self._remember(run.max_steps)
            scores = await self._score(run.max_steps)
            write_file(run.path / "evaluation.json", msgspec.json.encode(scores).decode())
        finally:
            tracker.close()
            await self._engine.close()

    def _remember(self, version: int) -> None:
        """Keep what the trainer has now, as long as a group may be sampled with it."""
        oldest = version - self._lag.most(self._config.buffer.largest_staleness)
        kept = {past: weights for past, weights in self._past.items() if past >= oldest}
        self._past = {**kept, version: self._received()}

    @torch.no_grad()
    def _received(self) -> Weights:
        """What generators would have of the weights: a copy, rounded as `weights.dtype` says."""
        policy = self._trainer.policy
        weights = policy.weights()
        data = torch.empty(self._layout.num_bytes, dtype=torch.uint8, device=policy.device)
        for slot in self._layout.slots:
            slot.write(slot.of(data), weights[slot.spec.name])
        return {slot.spec.name: slot.read(slot.of(data)) for slot in self._layout.slots}

    def _leases(self, version: int) -> list[tuple[int, int]]:
        """Of the groups that make the next version: the version that samples it, its prompt."""
        most = self._config.buffer.largest_staleness
        lags = self._lag.of_groups(self._num_groups, most, self._rng)
        first = version * self._num_groups
        return [(max(0, version - lag), first + i) for i, lag in enumerate(lags)]

    async def _sample(self, versions: Sequence[tuple[int, int]]) -> list[TrajectoryGroup]:
        """The groups of these versions and prompts, in the order of the prompts."""
        groups: list[TrajectoryGroup] = []
        for sampled_by, of_version in groupby(sorted(versions), key=lambda pair: pair[0]):
            self._engine.reload(self._past[sampled_by], sampled_by)
            leases = [unbuffered_lease("lag", index) for _, index in of_version]
            groups += await self._engine.generate_together(
                [self._runner.of(one.prompt_index).run(one) for one in leases]
            )
        return sorted(groups, key=lambda group: group.prompt_index)

    async def _score(self, version: int) -> dict[str, Any]:
        self._engine.reload(self._past[version], version)
        greedy = await greedy_groups_of(self._config, self._engine)
        return scores_of(self._config.model.path, greedy)


def _require_possible(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: a setting asks for what is not in one process.
    """
    if config.generator.engine != "hf":
        raise ConfigError(f"generator.engine: was {config.generator.engine!r}; --lag samples by hf")
    if config.algorithm.dynamic_sampling is not None:
        raise ConfigError("algorithm.dynamic_sampling: --lag trains every group that it samples")
    if config.learner.num_ranks != 1:
        raise ConfigError(f"learner.num_ranks: was {config.learner.num_ranks}; --lag has one")


def main(lag: Lag, source: str, overrides: Sequence[str]) -> None:
    """Make the run of the configuration file `source`; what is wrong with it goes to stderr.

    Raises:
        SystemExit: it failed, with the exit code of the reason.
    """
    disable_progress_bar()

    async def run() -> None:
        await LaggedRun(load_config(source, overrides).config, lag).run()

    try:
        asyncio.run(run())
    except PromptTooLongError as error:
        print(
            f"data.max_prompt_length: a prompt has {error}; --lag trains them all", file=sys.stderr
        )
        sys.exit(EXIT_CONFIG)
    except StreamRLError as error:
        print(error, file=sys.stderr)
        sys.exit(exit_code_of(error))
