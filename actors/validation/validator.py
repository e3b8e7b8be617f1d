"""The validator: it loads a version, keeps it until held-out prompts are scored, and reports.

    receiver.run      receives the versions that are due, as a generator does
    run               waits for a version, samples and scores all prompts with it, reports

It begins with version 0, the model of `model.path`, which it has without the learner.

Invariant: all responses of a validation are sampled by one version, since no other one is loaded
meanwhile. Nothing waits for a validator but the end of the run: while it is busy the learner sends
it nothing, and versions that come due then are not validated. It holds no leases of the buffer, so
training is admitted as without it. What a kill interrupts is begun anew with the newest version.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from actors.engines.targets import weight_locality
from actors.environments.runner import MixedRunner
from actors.episodes.rollout import unbuffered_lease
from actors.rendering.renderer import PromptTooLongError
from actors.validation.scores import PREFIX, PromptResult, answer_of, scores
from streamrl.config import RunConfig
from streamrl.errors import RolloutError, WeightTransferError
from streamrl.samples.files import validation_file, write_validation
from streamrl.samples.record import Decode, Sample, sample_of
from streamrl.types import (
    LoadReport,
    Trajectory,
    TrajectoryGroup,
    ValidationReport,
    ValidatorStatus,
    WeightUpdate,
)
from streamrl.weights.receiver import WeightReceiver

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptOutcome:
    """What came of one prompt; without a result it was too long, or it failed."""

    result: PromptResult | None = None
    samples: tuple[Sample, ...] = ()
    trajectories: tuple[Trajectory, ...] = ()
    failure: RolloutError | None = None


class Validator:
    """Of the run of `config`, whose `generator` has the validator's sampling. `runner` samples
    `validation.num_samples` responses to a prompt."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        runner: MixedRunner,
        num_prompts: int,
        decode: Decode,
    ) -> None:
        self._config = config
        self._settings = config.validation
        self._runner = runner
        self._decode = decode
        self._num_prompts = num_prompts
        is_done = validation_file(config.run.path, 0).exists()
        lacks_weights = config.generator.lacks_weights
        self._has_first = self._settings.at_start and not is_done and not lacks_weights
        self._status = ValidatorStatus(
            next_version=0 if self._settings.at_start else self._settings.every,
            is_busy=self._has_first,
            num_prompts=self._num_prompts,
        )
        self.on_status: Callable[[ValidatorStatus], None] = lambda _: None
        """Called with each change of what it does."""
        self._loaded: asyncio.Queue[WeightUpdate] = asyncio.Queue()
        num_groups = math.ceil(config.generator.max_num_seqs / self._settings.num_samples)
        self._room = asyncio.Semaphore(num_groups)
        self._receiver = WeightReceiver(
            config.weights.address,
            name,
            self._load_weights,
            locality=weight_locality(config.generator),
            num_ranks=config.generator.num_ranks,
            has_weights=self._has_first,
            validator=self._status,
            curve=config.buffer.curve,
        )

    async def run(self) -> None:
        """Until cancelled: validate what the learner sends. Waits for versions without a limit."""
        self.on_status(self._status)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receiver.run())
            if self._has_first:
                await self._validate_and_report(0, "")
            while True:
                update = await self._loaded.get()
                await self._validate_and_report(update.policy_version, update.learner_id)

    async def validate(self, policy_version: int, learner_id: str) -> ValidationReport:
        """Sample and score all prompts with the weights that the engine has.

        Raises:
            RolloutError: every prompt failed.
        """
        start_s = time.monotonic()
        log.info("validating version %d on %d prompts", policy_version, self._num_prompts)
        numbers = range(self._num_prompts)
        outcomes = await asyncio.gather(*(self._outcome(policy_version, n) for n in numbers))
        results = [outcome.result for outcome in outcomes if outcome.result is not None]
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if not results:
            raise (
                failures[0]
                if failures
                else RolloutError(
                    "validation: none of the held-out prompts fits into data.max_prompt_length"
                )
            )
        if failures:
            log.warning("%d prompts failed, the first: %s", len(failures), failures[0])
        metrics = {
            **scores(results, self._settings.num_samples, self._settings.pass_reward),
            **_length_metrics([t for outcome in outcomes for t in outcome.trajectories]),
            f"{PREFIX}/num_failed": float(len(failures)),
            f"{PREFIX}/num_too_long": float(len(outcomes) - len(results) - len(failures)),
            f"{PREFIX}/time_s": time.monotonic() - start_s,
        }
        self._write(policy_version, [sample for o in outcomes for sample in o.samples])
        log.info("version %d: %s", policy_version, _sentence(metrics))
        return ValidationReport(
            policy_version=policy_version, learner_id=learner_id, metrics=tuple(metrics.items())
        )

    async def _validate_and_report(self, policy_version: int, learner_id: str) -> None:
        report = await self.validate(policy_version, learner_id)
        every = self._settings.every
        next_version = (policy_version // every + 1) * every
        self._set(is_busy=False, next_version=next_version, report=report)
        self._receiver.say_hello()

    async def _load_weights(self, update: WeightUpdate) -> LoadReport:
        """
        Raises:
            WeightTransferError: the engine did not load it, or a version is being validated.
        """
        if self._status.is_busy:
            raise WeightTransferError("the validator is busy with another version")
        self._set(is_busy=True, num_done=0)
        try:
            report = await self._runner.engine.load_weights(update)
        except WeightTransferError:
            self._set(is_busy=False)
            raise
        self._loaded.put_nowait(update)
        return report

    async def _outcome(self, policy_version: int, number: int) -> PromptOutcome:
        """Waits for room in the engine, the responses and the reward."""
        async with self._room:
            try:
                group = await self._runner.run(unbuffered_lease("validation", number))
            except PromptTooLongError:
                return PromptOutcome()
            except RolloutError as error:
                return PromptOutcome(failure=error)
            finally:
                self._set(num_done=self._status.num_done + 1)
        return self._scored(policy_version, number, group)

    def _scored(self, policy_version: int, number: int, group: TrajectoryGroup) -> PromptOutcome:
        prompt, data = self._runner.stream[number], self._runner.stream.entry_at(number).data
        source = prompt.row.get("data_source")
        if source is None and self._config.environments:
            source = prompt.environment
        source = "" if source is None else str(source)[:64]
        read = answer_of([reward.reward for reward in data.all_rewards])
        episodes = _episodes(group)
        samples = tuple(
            sample_of(
                trajectory,
                self._decode,
                step=policy_version,
                prompt_index=number,
                sibling=i,
                environment=group.environment,
                data_source=source,
                answer=prompt.answer,
            )
            for i, segments in enumerate(episodes)
            for trajectory in segments
        )
        result = PromptResult(
            data_source=source,
            rewards=tuple(segments[-1].reward for segments in episodes),
            answers=tuple(read(self._response(number, segments[-1])) for segments in episodes),
        )
        return PromptOutcome(result, samples, group.trajectories)

    def _response(self, number: int, trajectory: Trajectory) -> str:
        """The last turn of the policy, as the reward reads it."""
        sampled = trajectory.token_ids[trajectory.response_mask].tolist()
        num_last = trajectory.turns[-1].num_completion_tokens if trajectory.turns else len(sampled)
        return self._runner.of(number).renderer.decode(sampled[len(sampled) - num_last :])

    def _write(self, policy_version: int, samples: Sequence[Sample]) -> None:
        """Scores count without the file of what was written."""
        try:
            write_validation(self._config.run.path, policy_version, samples, self._settings.keep)
        except OSError as error:
            log.warning("the responses of version %d are not kept: %s", policy_version, error)

    def _set(self, **fields: object) -> None:
        self._status = structs.replace(self._status, **fields)
        self._receiver.set_validator(self._status)
        self.on_status(self._status)


def _episodes(group: TrajectoryGroup) -> list[list[Trajectory]]:
    """The segments of each sibling."""
    indices = group.episode_indices or tuple(range(len(group.trajectories)))
    by_sibling: dict[int, list[Trajectory]] = {i: [] for i in sorted(set(indices))}
    for index, trajectory in zip(indices, group.trajectories, strict=True):
        by_sibling[index].append(trajectory)
    return list(by_sibling.values())


def _length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    num_tokens = sum(t.num_response_tokens for t in trajectories)
    num_cut = sum(t.finish_reason.is_truncated for t in trajectories)
    return {
        f"{PREFIX}/response_length_mean": num_tokens / len(trajectories),
        f"{PREFIX}/truncated_frac": num_cut / len(trajectories),
    }


def _sentence(metrics: dict[str, float]) -> str:
    shown = [f"{name.removeprefix('validation/')} {value:.3g}" for name, value in metrics.items()]
    return ", ".join(shown[:8])
