"""The generator: leases prompts, runs their groups, puts them, and loads the weights.

    lease_groups      leases for all the engine has room for, once the weights are new enough
    one task a group  wait for the learner's weights, of the lease's version; generate, score, put
    heartbeats        renew the leases, report, handle lost leases, scheduling state and end
    keep_siblings     put what is sampled of groups, so that it outlasts this process
    receiver.run      load the announced updates (`streamrl.weights.receiver`)

Invariant: a lease ends when its group is put, when it is released with a reason, or with this
process. A group that fails does not affect others. Groups begin in the order in which they are due.
Nothing here waits for the learner, only for admission and weights.
"""

import asyncio
import itertools
import logging
import math
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from actors.dynamic_sampling import UniformFilter
from actors.engines.weight_targets import WeightTarget, receiver_of, weight_targets
from actors.episode_record import Rollout
from actors.episodes.group import GroupProgress, GroupRunner, TruncatedGroupError
from actors.failures import FailureLimit, FailureRecord
from actors.leased_group import LeasedGroup, due_of, next_groups, num_free_groups
from actors.rendering.renderer import PromptTooLongError
from actors.status_report import Occupancy, StatusReport
from actors.version_gate import StarvedLeases, VersionGate
from streamrl import wire
from streamrl.config import RunConfig
from streamrl.errors import (
    BufferFullError,
    LedgerError,
    RolloutError,
    TransportError,
    UnknownLeaseError,
    WeightTransferError,
    WireError,
)
from streamrl.interfaces import Engine, GeneratorBuffer
from streamrl.types import (
    DropReason,
    GeneratorStatus,
    HeartbeatReply,
    Lease,
    LoadReport,
    SchedulingState,
    SiblingHeader,
    TrajectoryGroup,
    WeightUpdate,
    replace,
)

log = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
KEEP_EVERY_S, ASK_S = 0.5, 0.1
GOODBYE_S = 2.0


class Generator:
    """One generator; `run` returns when the run is over or `stop` was called."""

    def __init__(
        self,
        config: RunConfig,
        generator_id: str,
        engine: Engine,
        runner_of: Callable[[int], GroupRunner],
        buffer: GeneratorBuffer,
    ) -> None:
        """
        Args:
            runner_of: the runner for the prompt with this index, on the engine.
        """
        self._config = config
        self._id = generator_id
        self._session = uuid.uuid4().hex[:12]
        self._engine = engine
        self._runner_of = runner_of
        self._buffer = buffer
        self._numbers = itertools.count()
        self._incarnation = ""
        self._scheduling_state = SchedulingState.ACTIVE
        self._version_gate = VersionGate(
            config.weights.publish_every,
            config.buffer.largest_staleness,
            lacks_weights=config.generator.lacks_weights,
        )
        self._starved_leases = StarvedLeases(self._version_gate)
        self._groups: dict[str, LeasedGroup] = {}
        self._changed = asyncio.Event()
        self._is_notified = False
        self._stopping, self._is_over = asyncio.Event(), False
        self._uniform_filter = UniformFilter(config.algorithm, config.learner.groups_per_step)
        self._failure_limit = FailureLimit()
        self._failure_record = FailureRecord()
        self._grace_s = config.generator.drain_s
        self._occupancy = Occupancy(config.generator, config.max_num_episodes)
        self._report_of = StatusReport(
            self._id, self._session, self._engine, self._failure_record, self._occupancy
        )
        self.on_report: Callable[[GeneratorStatus], None] = lambda _: None
        """Called with each heartbeat."""

    def stop(self) -> None:
        """Request no more leases; finish the running groups, or release their leases."""
        self._stopping.set()

    async def run(self) -> None:
        """Runs until stopped. An error in any of the loops ends the generator."""
        receivers = [
            receiver_of(target, self._config, self._id, partial(self._load_weights, target))
            for target in weight_targets(self._engine, self._config.generator)
        ]
        loops = [receiver.run() for receiver in receivers]
        loops += [self._send_heartbeats(), self._keep_siblings()]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(loop) for loop in loops]
            leasing = tasks.create_task(self._lease_groups(tasks))
            await self._stopping.wait()
            leasing.cancel()
            await self._drain()
            for task in running:
                task.cancel()
            await self._leave()

    async def _leave(self) -> None:
        """Give back all leases, including those of canceled groups. Waits at most GOODBYE_S."""
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._buffer.heartbeat(self._status(is_leaving=True))
        except (TimeoutError, TransportError) as error:
            if not self._is_over:
                url = self._config.buffer.url
                sentence = f"the buffer at {url} does not answer; stopped, and its leases expire"
                raise TransportError(sentence) from error

    async def _lease_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Lease as many groups as the engine has room for; ends when cancelled.

        Waits until the engine has room (an episode has ended, or waits for its environment) and new
        enough weights, then for admission.
        """
        while True:
            while not ((num_free := self._num_free()) > 0 and self._is_current()):
                await self._changed.wait()
            numbers = itertools.islice(self._numbers, num_free)
            lease_ids = [f"{self._session}/{number}" for number in numbers]
            learner_id = self._engine.learner_id
            leases = await self._buffer.lease(lease_ids, self._id, LEASE_WAIT_S, learner_id)
            for lease in sorted(leases, key=due_of):
                await self._begin(lease, tasks)
            self._notify()

    async def _begin(self, lease: Lease, tasks: asyncio.TaskGroup) -> None:
        if self._version_gate.lacks_weights:
            # An update failed since the request; other generators can begin this group at once.
            await self._buffer.release(lease.lease_id, DropReason.RELEASED)
        else:
            runner = self._runner_of(lease.prompt_index)
            task = tasks.create_task(self._generate(lease, runner))
            progress = GroupProgress(runner.num_episodes, on_slot_free=self._notify, is_kept=True)
            self._groups[lease.lease_id] = LeasedGroup(lease, task, progress)

    def _num_free(self) -> int:
        """How many more groups the engine has room for; the last one may have to wait for part of
        it."""
        groups, largest = self._groups.values(), self._config.max_num_episodes
        return num_free_groups(groups, self._config.generator, largest)

    def _is_current(self) -> bool:
        return self._version_gate.is_open(self._engine.policy_version, self._engine.learner_id)

    async def _generate(self, lease: Lease, runner: GroupRunner) -> None:
        """One group from lease to put. Waits for the lease's version, the engine and the reward."""
        lease_id = lease.lease_id
        try:
            leased = self._groups[lease_id]
            await leased.turn.wait()
            if leased.is_given_back:
                await self._buffer.release(lease_id, DropReason.RELEASED)
                return
            if lease.kept_siblings:
                await self._restore_siblings(leased)
            group = await runner.run(lease, leased.progress)
            if self._uniform_filter.leaves_out(group):
                await self._buffer.release(lease_id, DropReason.UNIFORM, group.sampled_lengths)
            else:
                await self._put(lease_id, group)
            self._failure_limit.on_success()
        except PromptTooLongError as error:
            log.info("prompt %d filtered: its prompt has %s", lease.prompt_index, error)
            await self._buffer.release(lease_id, DropReason.FILTERED)
        except TruncatedGroupError as error:
            log.info("prompt %d filtered: %s", lease.prompt_index, error)
            await self._buffer.release(lease_id, DropReason.FILTERED, error.lengths)
        except RolloutError as error:
            row = runner.prompts[lease.prompt_index].origin
            message = self._failure_record.add(lease.prompt_index, row, error)
            remedy = self._failure_limit.first_remedy(error)
            log.warning("%s%s", message, remedy, **self._failure_limit.details(error))
            await self._buffer.release(lease_id, DropReason.FAILED)
            self._failure_limit.on_failure(error)
        except LedgerError as error:
            log.warning("prompt %d was not taken in: %s", lease.prompt_index, error)
        except WireError as error:
            log.error("prompt %d was refused as malformed: %s", lease.prompt_index, error)
            self._failure_limit.on_failure(error)
        finally:
            self._groups.pop(lease_id, None)
            self._notify()

    async def _put(self, lease_id: str, group: TrajectoryGroup) -> None:
        """Put the group; repeat it if the buffer has restarted with an older state."""
        known = self._incarnation
        try:
            await self._buffer.put(lease_id, group)
        except WireError:
            # A group that cannot be encoded never reached the buffer.
            await self._buffer.release(lease_id, DropReason.MALFORMED)
            raise
        except UnknownLeaseError:
            reply = await self._report()
            if reply.incarnation == known or lease_id in reply.lost_lease_ids:
                raise
            await self._buffer.put(lease_id, group)

    async def _restore_siblings(self, leased: LeasedGroup) -> None:
        """Fetch the siblings that an earlier lease left. Waits for the buffer."""
        lease, finished = leased.lease, leased.progress.finished
        left: dict[int, Rollout] = {}
        payloads = await self._buffer.fetch_siblings(lease.lease_id)
        for number, payload in zip(lease.kept_siblings, payloads, strict=False):
            try:
                rollout = wire.decode(payload, Rollout, max_bytes=len(payload))
            except WireError as error:
                log.warning("sibling %d of prompt %d: %s", number, lease.prompt_index, error)
                continue
            is_finished = rollout.open_turn is None
            (finished if is_finished else left)[number] = rollout
            leased.kept[number] = math.inf if is_finished else rollout.num_sampled_tokens
        leased.progress.left = left
        counts = (lease.prompt_index, len(finished), len(left))
        log.info("prompt %d goes on with %d siblings, and %d unfinished ones", *counts)

    async def _keep_siblings(self) -> None:
        """Put the siblings of unfinished groups every KEEP_EVERY_S; ends when cancelled."""
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            await self._put_siblings(at_once=False)

    async def _put_siblings(self, *, at_once: bool) -> None:
        """Put the siblings that `LeasedGroup.next_to_keep` selects. Waits ASK_S for the engine to
        report unfinished ones, and for the buffer."""
        for group in self._groups.values():
            group.progress.ask()
        await asyncio.sleep(ASK_S)
        groups = [(group, group.next_to_keep(at_once=at_once)) for group in self._groups.values()]
        puts = [self._put_sibling(group, *sibling) for group, due in groups for sibling in due]
        await asyncio.gather(*puts)

    async def _put_sibling(self, group: LeasedGroup, number: int, rollout: Rollout) -> None:
        lease, known = group.lease, group.kept.get(number, 0)
        # A sibling that cannot be kept is lost if this process ends; its group goes on.
        is_finished = rollout.open_turn is None
        group.kept[number] = math.inf if is_finished else rollout.num_sampled_tokens
        try:
            payload = wire.encode(rollout)
            sibling = SiblingHeader(
                number=number,
                lease_id=lease.lease_id,
                oldest_version=rollout.oldest_version,
                num_tokens=rollout.num_sampled_tokens,
                num_bytes=len(payload),
            )
            await self._buffer.put_sibling(sibling, payload)
        except (UnknownLeaseError, BufferFullError):
            # Try again later: a restarted buffer learns of the lease from the next heartbeat, and a
            # checkpoint may free memory.
            group.kept[number] = known
        except WireError as error:
            group.kept[number] = math.inf
            log.warning("prompt %d: a sibling is not kept: %s", lease.prompt_index, error)

    async def _load_weights(self, target: WeightTarget, update: WeightUpdate) -> LoadReport:
        try:
            report = await target.load_weights(update)
        except WeightTransferError:
            if not target.is_spare():
                self._version_gate.lacks_weights = True
                self._notify()
            raise
        is_sent = self._config.weights.transport != "store"
        self._version_gate.on_loaded(update.learner_id if is_sent else "")
        self._starved_leases.on_loaded(report)
        self._notify()
        return report

    async def _send_heartbeats(self) -> None:
        """Send heartbeats, a quarter of the leases' time to live apart, at most 1 s; ends when
        cancelled."""
        while True:
            held = tuple(self._groups)
            reply = await self._report()
            self._on_heartbeat_reply(reply, held)
            having = (self._engine.policy_version, self._engine.learner_id)
            self._starved_leases.give_back(self._groups.values(), *having)
            self._notify()
            await asyncio.sleep(min(1.0, self._config.buffer.lease_ttl_s / 4))

    def _on_heartbeat_reply(self, reply: HeartbeatReply, held: tuple[str, ...]) -> None:
        """Handle the reply to a heartbeat that reported the leases `held`."""
        for lease_id in reply.lost_lease_ids:
            if group := self._groups.get(lease_id):
                log.warning("lease %s is lost; its group is given up", lease_id)
                group.task.cancel()
        for lease_id in self._groups.keys() & set(held):
            self._groups[lease_id].on_learner_version(reply.policy_version)
        self._version_gate.on_learner_version(reply.policy_version, reply.learner_id)
        if reply.scheduling_state is not self._scheduling_state:
            log.info("scheduling state: %s", reply.scheduling_state)
            self._scheduling_state = reply.scheduling_state
        if reply.scheduling_state is SchedulingState.DRAINING and not self._groups:
            log.info("drained")
            self.stop()
        if reply.finished or reply.is_fenced:
            log.info("the run is over" if reply.finished else "another process has taken this id")
            self._grace_s, self._is_over = 0.0, True
            self.stop()

    async def _report(self) -> HeartbeatReply:
        """Send a heartbeat. If the buffer has restarted, reassert every lease before one is lost.

        Several may be under way at once. Waits for the buffer's reply.
        """
        known, status = self._incarnation, self._status()
        self.on_report(status)
        reply = await self._buffer.heartbeat(status)
        while known and reply.incarnation != known:
            log.warning("the buffer has restarted: reasserting %d leases", len(self._groups))
            known = reply.incarnation
            for group in self._groups.values():
                group.kept.clear()
            held = tuple(group.lease for group in self._groups.values())
            status = replace(self._status(), held=held)
            reply = await self._buffer.heartbeat(status)
        self._incarnation = reply.incarnation
        return reply

    async def _drain(self) -> None:
        """Wait `drain_s` for the groups, not at all if the run is over; then cancel the unfinished
        ones, whose siblings are kept.

        Their leases end with the last heartbeat.
        """
        if tasks := [group.task for group in self._groups.values()]:
            _, unfinished = await asyncio.wait(tasks, timeout=self._grace_s)
            if unfinished and not self._is_over:
                with suppress(TimeoutError, TransportError):
                    async with asyncio.timeout(GOODBYE_S):
                        await self._put_siblings(at_once=True)
            for task in unfinished:
                task.cancel()

    def _notify(self) -> None:
        """Groups, slots or versions have changed. Changes of one turn of the event loop are handled
        together after it."""
        if not self._is_notified:
            self._is_notified = True
            asyncio.get_running_loop().call_soon(self._on_change)

    def _on_change(self) -> None:
        """Begin the groups whose turn it is, and wake up whoever waits for a change."""
        self._is_notified = False
        if self._version_gate.is_of_learner(self._engine.learner_id):
            for group in next_groups(self._groups.values(), self._engine.policy_version):
                group.turn.set()
        elif self._version_gate.lacks_weights:
            # New weights may take long; other generators can begin these groups at once.
            for group in self._groups.values():
                group.give_back()
        self._occupancy.update(self._groups.values())
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self, *, is_leaving: bool = False) -> GeneratorStatus:
        catches_up = not self._is_current()
        return self._report_of.make(self._groups, is_leaving=is_leaving, is_catching_up=catches_up)
