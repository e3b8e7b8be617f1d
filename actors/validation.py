"""Validation: `streamrl validator`, a daemon of one engine, scores versions of the policy on
held-out prompts while a run trains.

Waits for the learner without limit; ends at a signal or when the run is over. An engine in this
process is created only after the run's first step, which so has the cores to itself.

Invariant: all responses of a validation are sampled by one version, since no other one is loaded
meanwhile. Nothing waits for a validator but the end of the run: while it is busy the learner sends
it nothing, and versions that come due then are not validated. It holds no leases of the buffer, so
training is admitted as without it. What a kill interrupts is begun anew with the newest version.
"""

import argparse
import asyncio
import contextlib
import logging
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from actors.concurrency import first_result
from actors.daemon import prepare
from actors.engines import make_engine
from actors.engines.weight_targets import weight_locality
from actors.episodes.mixed_runner import MixedRunner, make_runner
from actors.prompts import HeldOutStream, open_held_out_stream
from actors.rendering.renderer import ChatRenderer
from actors.rewards.answers import shown_number, whole_number, words, written
from buffers.connect import connect, try_stats
from streamrl import service
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, RolloutError, WeightTransferError
from streamrl.interfaces import Prompt, TrajectoryBuffer
from streamrl.samples.files import validation_file, write_validation
from streamrl.samples.record import Decoder, Sample, open_decoder, sample_of
from streamrl.shutdown import Shutdown
from streamrl.tracking.prometheus import exporting, of_validator
from streamrl.types import (
    LoadReport,
    Trajectory,
    TrajectoryGroup,
    ValidationReport,
    ValidatorStatus,
    WeightUpdate,
)
from streamrl.types.rollouts import ALIKE_WITHIN
from streamrl.types.validation import MAX_METRICS
from streamrl.weights.receiver import WeightReceiver


def vote(extracted: str) -> str:
    """An extracted answer as `math` compares it, but that formulas are compared as they are
    written: 0.5 and \\frac{1}{2} vote together, as "Left." and "left" do."""
    number = whole_number(extracted)
    return (words(extracted) or written(extracted)) if number is None else shown_number(number)


PREFIX = "validation"


@dataclass(frozen=True)
class PromptResult:
    """The k responses to one prompt: their rewards and their answers."""

    data_source: str
    rewards: tuple[float, ...]
    answers: tuple[str, ...]


def scores(
    results: Sequence[PromptResult], num_samples: int, pass_reward: float
) -> dict[str, float]:
    """mean@k, pass@k and majority@k over all prompts, equally weighted, and for each data source if
    there are several, as far as they fit into a report."""
    overall = dict(_named(PREFIX, results, num_samples, pass_reward))
    by_source: Mapping[str, list[PromptResult]] = defaultdict(list)
    for result in results:
        by_source[result.data_source].append(result)
    num_shown = (MAX_METRICS - 2 * len(overall)) // len(overall)
    largest = sorted(by_source, key=lambda source: (-len(by_source[source]), source))[:num_shown]
    of_sources = (
        _named(f"{PREFIX}/{source}", by_source[source], num_samples, pass_reward)
        for source in largest
        if len(by_source) > 1 or source
    )
    return {**overall, **{name: value for pairs in of_sources for name, value in pairs}}


def _named(
    prefix: str, results: Sequence[PromptResult], num_samples: int, pass_reward: float
) -> Iterator[tuple[str, float]]:
    mean = statistics.fmean
    yield f"{prefix}/mean@{num_samples}", mean(mean(r.rewards) for r in results)
    # A sum of equal parts may be below by rounding.
    least = pass_reward - ALIKE_WITHIN
    passed = [sum(reward >= least for reward in r.rewards) for r in results]
    for k in sizes(num_samples):
        yield f"{prefix}/pass@{k}", mean(pass_at(num_samples, c, k) for c in passed)
    if num_samples > 1:
        yield f"{prefix}/majority@{num_samples}", mean(map(majority, results))
    yield f"{prefix}/num_prompts", float(len(results))


def sizes(num_samples: int) -> tuple[int, ...]:
    """The k of pass@k: 1, the powers of two below the number of samples, and that number.

    >>> sizes(1), sizes(6), sizes(8)
    ((1,), (1, 2, 4, 6), (1, 2, 4, 8))
    """
    powers = tuple(2**i for i in range(num_samples.bit_length()) if 2**i < num_samples)
    return (*powers, num_samples)


def pass_at(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that one of k responses passes, drawn without replacement from these: the
    unbiased estimator of Chen et al. 2021 (arXiv 2107.03374).

    >>> pass_at(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def majority(result: PromptResult) -> float:
    """The mean reward of the responses with the most common answer; ties are averaged.

    >>> majority(PromptResult("", (1.0, 0.0, 0.0), ("7", "8", "8")))
    0.0
    """
    counts = Counter(result.answers)
    most = max(counts.values())
    given = list(zip(result.answers, result.rewards, strict=True))
    commonest = [answer for answer, count in counts.items() if count == most]
    return statistics.fmean(
        statistics.fmean(reward for other, reward in given if other == answer)
        for answer in commonest
    )


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
        """Called whenever its status changes."""
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
        """Validate version 0, the model of `model.path`, and then what the learner sends, until
        cancelled. Waits for versions without limit."""
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
            self._num_prompts,
            "validation",
            self._config.generator.max_num_seqs,
            lambda: self._set(num_done=self._status.num_done + 1),
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
            # Decoding takes a while, and the receiver has to answer meanwhile.
            await asyncio.sleep(0)
        metrics = {
            **scores(results, self._settings.num_samples, self._settings.pass_reward),
            **length_metrics(first.groups),
            f"{PREFIX}/num_failed": float(first.num_failed),
            f"{PREFIX}/num_too_long": float(first.num_too_long),
            f"{PREFIX}/time_s": time.monotonic() - start_s,
        }
        self._write(policy_version, samples)
        shown = [f"{name.removeprefix(f'{PREFIX}/')} {metrics[name]:.3g}" for name in metrics]
        log.info("version %d: %s", policy_version, ", ".join(shown[:8]))
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
        """Wait without limit for the next version. After the rest, which the last version cuts
        short, a newer one may have come."""
        if self._status.is_resting:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._loaded.get(), self._rest_s)
            self._set(is_resting=False)
            self._receiver.say_hello()
        return await self._loaded.get()

    async def _load_weights(self, update: WeightUpdate) -> LoadReport:
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
        """The group's data source; if its row has none, its environment if there are several."""
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
        """Scores count even if the file of responses cannot be written."""
        try:
            write_validation(self._config.run.path, policy_version, samples, self._settings.keep)
        except OSError as error:
            log.warning("the responses of version %d are not kept: %s", policy_version, error)

    def _set(self, **fields: object) -> None:
        self._status = structs.replace(self._status, **fields)
        self._receiver.set_validator(self._status)
        self.on_status(self._status)


def _episodes(group: TrajectoryGroup) -> list[list[Trajectory]]:
    indices = group.episode_indices or tuple(range(len(group.trajectories)))
    by_sibling: dict[int, list[Trajectory]] = {i: [] for i in sorted(set(indices))}
    for index, trajectory in zip(indices, group.trajectories, strict=True):
        by_sibling[index].append(trajectory)
    return list(by_sibling.values())


def length_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Means over the episodes, over all segments of each."""
    episodes = [segments for group in groups for segments in _episodes(group)]
    num_tokens = sum(t.num_response_tokens for segments in episodes for t in segments)
    num_cut = sum(segments[-1].finish_reason.is_truncated for segments in episodes)
    return {
        f"{PREFIX}/response_length_mean": num_tokens / len(episodes),
        f"{PREFIX}/truncated_frac": num_cut / len(episodes),
    }


NAME = "validator"
ASK_S = 1.0


def main(arguments: argparse.Namespace) -> int:
    config: RunConfig = arguments.run_config
    return service.run(partial(validate, config), role=NAME, config=config)


async def validate(config: RunConfig, shutdown: Shutdown) -> None:
    """Validates until the run is over or a signal arrives.

    Raises:
        ConfigError: the run is not validated, or there are no held-out prompts.
    """
    if not config.is_validated:
        raise ConfigError(
            f"validation.every: was {config.validation.every}, so there is nothing to validate; a "
            "number is the versions between two validations, auto takes 5 % of the time"
        )
    config = config.for_validator()
    with shutdown.empty_handed():
        config.require_ports()
        prepare(config)
        stream = open_held_out_stream(config)
    buffer = connect(config)
    try:
        if config.generator.engine == "hf" and not await _first_step(buffer, shutdown):
            return
        await _validate(config, shutdown, buffer, stream)
    finally:
        await buffer.close()


async def _first_step(buffer: TrajectoryBuffer, shutdown: Shutdown) -> bool:
    """Waits for the first step of the run; whether it came before a signal, or the run's end."""
    log.info("waiting for the first step of the run")
    return await first_result(_is_running(buffer, is_stepping=True), _signaled(shutdown))


async def _is_running(buffer: TrajectoryBuffer, *, is_stepping: bool) -> bool:
    """False once the run is over; true once it has made a step, if that is waited for. Asks every
    ASK_S; while waiting for a step, logs why there is no answer."""
    said = ""
    while True:
        stats, reason = await try_stats(buffer)
        if is_stepping and reason not in ("", said):
            log.warning("%s", reason)
            said = reason
        if stats is not None and stats.is_over:
            log.info("the run is over")
            return False
        if is_stepping and stats is not None and stats.policy_version > 0:
            return True
        await asyncio.sleep(ASK_S)


async def _signaled(shutdown: Shutdown) -> bool:
    await shutdown.requested.wait()
    return False


async def _validate(
    config: RunConfig, shutdown: Shutdown, buffer: TrajectoryBuffer, stream: HeldOutStream
) -> None:
    with shutdown.empty_handed():
        renderer, decoder = ChatRenderer.from_config(config), open_decoder(config.model)
        engine = make_engine(config, seed=config.run.seed)
    try:
        runner = make_runner(config, engine, renderer, stream).single()
        several = runner.changed(group_size=config.validation.num_samples)
        validator = Validator(config, NAME, several, len(stream), decoder)
        log.info("%s serves %s with %s", NAME, config.model.path, config.generator.engine)
        with exporting(config, "validator", NAME) as exported:
            validator.on_status = lambda status: exported.show(
                "status", lambda: of_validator(status, engine.gauges()["num_tokens"])
            )
            over = _is_running(buffer, is_stepping=False)
            await first_result(validator.run(), over, _signaled(shutdown))
    finally:
        await engine.close()
