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
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from msgspec import structs

from actors.engines.targets import weight_locality
from actors.episodes.runner import MixedRunner
from actors.validation.scores import PREFIX, PromptResult, scores, vote
from streamrl.config import RunConfig
from streamrl.errors import RolloutError, WeightTransferError
from streamrl.interfaces import Prompt
from streamrl.samples.files import validation_file, write_validation
from streamrl.samples.record import Decoder, Sample, sample_of
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


class Validator:
    """Of the run of `config`, whose `generator` has the validator's sampling. `runner` samples
    `validation.num_samples` responses to a prompt."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        runner: MixedRunner,
        num_prompts: int,
        decoder: Decoder,
    ) -> None:
        self._config = config
        self._settings = config.validation
        self._runner = runner
        self._decoder = decoder
        self._num_prompts = num_prompts
        is_done = validation_file(config.run.path, 0).exists()
        lacks_weights = config.generator.lacks_weights
        self._has_first = self._settings.at_start and not is_done and not lacks_weights
        self._status = ValidatorStatus(
            next_version=0 if self._settings.at_start else self._settings.next_version(0),
            is_busy=self._has_first,
            num_prompts=self._num_prompts,
        )
        self.on_status: Callable[[ValidatorStatus], None] = lambda _: None
        """Called with each change of what it does."""
        self._rest_s = 0.0
        self._loaded: asyncio.Queue[WeightUpdate] = asyncio.Queue()
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
                update = await self._next_update()
                await self._validate_and_report(update.policy_version, update.learner_id)

    async def validate(self, policy_version: int, learner_id: str) -> ValidationReport:
        """Sample and score all prompts with the weights that the engine has.

        Raises:
            RolloutError: every prompt failed.
        """
        start_s = time.monotonic()
        log.info("validating version %d on %d prompts", policy_version, self._num_prompts)
        first = await self._runner.run_first(
            self._num_prompts, "validation", self._config.generator.max_num_seqs, self._note_done
        )
        if not first.groups:
            raise RolloutError(
                "validation: none of the held-out prompts fits into data.max_prompt_length"
            )
        results: list[PromptResult] = []
        samples: list[Sample] = []
        for group in first.groups:
            prompt = self._runner.stream[group.prompt_index]
            results.append(self._result(prompt, group))
            samples += self._samples(policy_version, prompt, group)
            # What is decoded takes a while, and the receiver has to answer.
            await asyncio.sleep(0)
        metrics = {
            **scores(results, self._settings.num_samples, self._settings.pass_reward),
            **_length_metrics([t for group in first.groups for t in group.trajectories]),
            f"{PREFIX}/num_failed": float(first.num_failed),
            f"{PREFIX}/num_too_long": float(first.num_too_long),
            f"{PREFIX}/time_s": time.monotonic() - start_s,
        }
        self._write(policy_version, samples)
        log.info("version %d: %s", policy_version, _sentence(metrics))
        return ValidationReport(
            policy_version=policy_version, learner_id=learner_id, metrics=tuple(metrics.items())
        )

    async def _validate_and_report(self, policy_version: int, learner_id: str) -> None:
        start_s = time.monotonic()
        report = await self.validate(policy_version, learner_id)
        self._rest_s = self._settings.rest_s(time.monotonic() - start_s)
        next_version = self._settings.next_version(policy_version)
        is_resting = self._rest_s > 0
        self._set(is_busy=False, is_resting=is_resting, next_version=next_version, report=report)
        self._receiver.say_hello()

    async def _next_update(self) -> WeightUpdate:
        """Waits for it without a limit; after the rest, which the last version cuts short, another
        one may come."""
        if self._status.is_resting:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._loaded.get(), self._rest_s)
            self._set(is_resting=False)
            self._receiver.say_hello()
        return await self._loaded.get()

    async def _load_weights(self, update: WeightUpdate) -> LoadReport:
        """
        Raises:
            WeightTransferError: the engine did not load it, or a version is being validated.
        """
        if self._status.is_busy:
            raise WeightTransferError("the validator is busy with another version")
        self._set(is_busy=True, is_resting=False, num_done=0)
        try:
            report = await self._runner.engine.load_weights(update)
        except WeightTransferError:
            self._set(is_busy=False)
            raise
        self._loaded.put_nowait(update)
        return report

    def _note_done(self) -> None:
        self._set(num_done=self._status.num_done + 1)

    def _result(self, prompt: Prompt, group: TrajectoryGroup) -> PromptResult:
        number = group.prompt_index
        episodes = _episodes(group)
        return PromptResult(
            data_source=self._source(prompt),
            rewards=tuple(segments[-1].reward for segments in episodes),
            answers=tuple(
                vote(segments[-1].extracted or "") or self._turn(number, prompt, segments).strip()
                for segments in episodes
            ),
        )

    def _samples(
        self, policy_version: int, prompt: Prompt, group: TrajectoryGroup
    ) -> Iterator[Sample]:
        for i, segments in enumerate(_episodes(group)):
            for trajectory in segments:
                yield sample_of(
                    trajectory,
                    self._decoder,
                    step=policy_version,
                    prompt_index=group.prompt_index,
                    sibling=i,
                    environment=group.environment,
                    data_source=self._source(prompt),
                    answer=group.answer,
                )

    def _source(self, prompt: Prompt) -> str:
        """Its data source; where its row has none, its environment if there are several."""
        source = prompt.row.get("data_source")
        if source is None and self._config.environments:
            source = prompt.environment
        return "" if source is None else str(source)[:64]

    def _turn(self, number: int, prompt: Prompt, segments: Sequence[Trajectory]) -> str:
        """The last turn, as the reward reads it."""
        runner, last = self._runner.of(number), segments[-1]
        sampled = last.token_ids[last.response_mask].tolist()
        num_last = last.turns[-1].num_completion_tokens if last.turns else len(sampled)
        prefill = runner.prefill(prompt, sum(len(segment.turns) for segment in segments))
        return prefill + runner.renderer.decode(sampled[len(sampled) - num_last :])

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
