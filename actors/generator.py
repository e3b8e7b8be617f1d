"""The generator: leases prompts, runs their groups, puts them, and loads the weights.

    lease_groups      leases for all the engine has room for, once the weights are new enough
    one task a group  wait for the lease's version, generate, score, put
    heartbeats        renew the leases, report, handle lost leases, scheduling state and end
    receiver.run      load the announced updates (`streamrl.weights.receiver`)

Invariant: a lease ends by its group's put, by a release with a reason, or with this process; a
group that fails does not affect others. Groups begin in the order in which they are due. Nothing
here waits for the learner, only for admission.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import time
import uuid

from actors.dynamic_sampling import UniformFilter
from actors.environments.runner import MixedRunner
from actors.episodes.rollout import GroupProgress, GroupRunner
from actors.failure_limit import FailureLimit
from actors.failures import FailureRecord
from actors.leased_group import LeasedGroup
from actors.locality import weight_locality
from actors.rendering.renderer import PromptTooLongError
from actors.version_gate import VersionGate
from streamrl.config import RunConfig
from streamrl.errors import (
    LedgerError,
    RolloutError,
    TransportError,
    UnknownLeaseError,
    WeightTransferError,
    WireError,
)
from streamrl.interfaces import GeneratorBuffer
from streamrl.types import (
    DropReason,
    GeneratorStatus,
    HeartbeatReply,
    Lease,
    LoadReport,
    SchedulingState,
    TrajectoryGroup,
    WeightUpdate,
    replace,
)
from streamrl.weights.receiver import WeightReceiver

log = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
SHUTDOWN_GRACE_S = 3.0
Runner = MixedRunner | GroupRunner


class Generator:
    """One generator; `run` returns when the run is over or `stop` was called."""

    def __init__(
        self, config: RunConfig, generator_id: str, runner: Runner, buffer: GeneratorBuffer
    ) -> None:
        self._config = config
        self._id = generator_id
        self._session = uuid.uuid4().hex[:12]
        self._runner = runner
        self._engine = runner.engine
        self._buffer = buffer
        self._numbers = itertools.count()
        self._incarnation = ""
        self._scheduling_state = SchedulingState.ACTIVE
        self._version_gate = VersionGate(
            config.weights.publish_every,
            config.buffer.max_staleness,
            lacks_weights=config.generator.lacks_weights,
        )
        self._groups: dict[str, LeasedGroup] = {}
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        self._uniform_filter = UniformFilter(
            config.algorithm.dynamic_sampling, config.learner.groups_per_step
        )
        self._failure_limit = FailureLimit()
        self._failure_record = FailureRecord()
        self._grace_s = config.generator.drain_s
        self._max_num_seqs = config.generator.max_num_seqs
        self._largest_group = config.max_group_size + config.generator.oversample.num_siblings
        self._last_report = (time.monotonic(), 0.0)

    def stop(self) -> None:
        """Request no more leases; finish the groups, or release their leases."""
        self._stopping.set()

    async def run(self) -> None:
        """Runs until stopped. An error in any of the loops ends the generator."""
        receiver = WeightReceiver(
            self._config.weights.address,
            self._id,
            self._load,
            locality=weight_locality(self._config.generator),
            num_ranks=self._config.generator.num_ranks,
            has_weights=not self._config.generator.lacks_weights,
            curve=self._config.buffer.curve,
        )
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(receiver.run())
            heartbeats = tasks.create_task(self._send_heartbeats())
            leasing = tasks.create_task(self._lease_groups(tasks))
            await self._stopping.wait()
            leasing.cancel()
            await self._drain()
            heartbeats.cancel()
            receiving.cancel()
        # If the buffer does not answer, the leases expire.
        with contextlib.suppress(TimeoutError, TransportError):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                await self._buffer.heartbeat(self._status(is_leaving=True))

    async def _lease_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Lease as many groups as the engine has room for; ends when cancelled.

        Waits for room in the engine and new enough weights, which a finished group or an update
        brings; then for admission.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_free() > 0 and self._is_current())
            numbers = itertools.islice(self._numbers, self._num_free())
            lease_ids = [f"{self._session}/{number}" for number in numbers]
            for lease in await self._buffer.lease(lease_ids, self._id, LEASE_WAIT_S):
                await self._begin(lease, tasks)

    async def _begin(self, lease: Lease, tasks: asyncio.TaskGroup) -> None:
        if self._version_gate.lacks_weights:
            # An update failed meanwhile; others can begin this group at once.
            await self._buffer.release(lease.lease_id, DropReason.RELEASED)
        else:
            task = tasks.create_task(self._generate(lease))
            self._groups[lease.lease_id] = LeasedGroup(
                lease=lease,
                task=task,
                leased_at_s=time.monotonic(),
                num_siblings=self._runner.num_siblings_of(lease),
                min_policy_version=lease.min_policy_version,
            )

    def _num_free(self) -> int:
        """Groups that the engine has room for; the last one may have to wait for some of it. Where
        groups differ in size, of the largest."""
        num_held = sum(group.num_siblings for group in self._groups.values())
        return math.ceil((self._max_num_seqs - num_held) / self._largest_group)

    def _is_current(self) -> bool:
        return self._version_gate.is_open(self._engine.policy_version)

    async def _generate(self, lease: Lease) -> None:
        """One group from lease to put. Waits for the lease's version, the engine and the reward."""
        lease_id = lease.lease_id
        try:
            progress = await self._wait_for_turn(lease_id)
            group = await self._runner.run(lease, progress)
            self._failure_limit.on_success()
            if self._uniform_filter.leaves_out(group):
                await self._buffer.release(lease_id, DropReason.UNIFORM, group.sampled_lengths)
            else:
                await self._put(lease_id, group)
        except PromptTooLongError as error:
            log.info("prompt %d filtered: its prompt has %s", lease.prompt_index, error)
            await self._buffer.release(lease_id, DropReason.FILTERED)
        except RolloutError as error:
            row = self._runner.origin(lease)
            message = self._failure_record.add(lease.prompt_index, row, error)
            log.warning("%s", message, **self._failure_limit.details(error))
            await self._buffer.release(lease_id, DropReason.FAILED)
            self._failure_limit.on_failure(error)
        except LedgerError as error:
            log.warning("prompt %d was not taken in: %s", lease.prompt_index, error)
        except WireError as error:
            log.error("prompt %d was refused as malformed: %s", lease.prompt_index, error)
            self._failure_limit.on_failure(error)
        finally:
            self._groups.pop(lease_id, None)
            await self._notify()

    async def _put(self, lease_id: str, group: TrajectoryGroup) -> None:
        """Put the group; again if the buffer restarted with an older state meanwhile."""
        known = self._incarnation
        try:
            await self._buffer.put(lease_id, group)
        except UnknownLeaseError:
            reply = await self._report()
            if reply.incarnation == known or lease_id in reply.lost_lease_ids:
                raise
            await self._buffer.put(lease_id, group)

    async def _wait_for_turn(self, lease_id: str) -> GroupProgress:
        """Waits for the version that may sample the group, and for the groups due before it to
        begin. Returns the group's progress."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_next(lease_id))
            group = self._groups[lease_id]
            group.has_begun = True
            self._changed.notify_all()
        return group.progress

    def _is_next(self, lease_id: str) -> bool:
        groups = self._groups
        return groups[lease_id].is_next(groups.values(), self._engine.policy_version)

    async def _load(self, update: WeightUpdate) -> LoadReport:
        try:
            report = await self._engine.load_weights(update)
        except WeightTransferError:
            self._version_gate.on_load_failed()
            raise
        self._version_gate.on_loaded()
        await self._notify()
        return report

    async def _send_heartbeats(self) -> None:
        """Waits a quarter of the leases' time to live between two; ends when cancelled."""
        while True:
            held = tuple(self._groups)
            reply = await self._report()
            self._on_heartbeat_reply(reply, held)
            await self._notify()
            await asyncio.sleep(min(1.0, self._config.buffer.lease_ttl_s / 4))

    def _on_heartbeat_reply(self, reply: HeartbeatReply, held: tuple[str, ...]) -> None:
        """Handle the reply to a heartbeat that reported the leases `held`."""
        for lease_id in reply.lost_lease_ids:
            if group := self._groups.get(lease_id):
                log.warning("lease %s is lost; its group is given up", lease_id)
                group.task.cancel()
        # A learner that restarted at an earlier version will not publish a newer one soon.
        for lease_id in self._groups.keys() & set(held):
            group = self._groups[lease_id]
            group.min_policy_version = min(group.min_policy_version, reply.policy_version)
        self._version_gate.on_learner_version(reply.policy_version)
        if reply.scheduling_state is not self._scheduling_state:
            log.info("scheduling state: %s", reply.scheduling_state)
            self._scheduling_state = reply.scheduling_state
        if reply.scheduling_state is SchedulingState.DRAINING and not self._groups:
            log.info("drained")
            self.stop()
        if reply.finished or reply.is_fenced:
            log.info("the run is over" if reply.finished else "another process has taken this id")
            self._grace_s = 0.0
            self.stop()

    async def _report(self) -> HeartbeatReply:
        """Send a heartbeat. If the buffer has restarted, reassert every lease before one is lost.

        Waits for the buffer's reply.
        """
        reply = await self._buffer.heartbeat(self._status())
        while self._incarnation and reply.incarnation != self._incarnation:
            log.warning("the buffer has restarted: reasserting %d leases", len(self._groups))
            self._incarnation = reply.incarnation
            held = tuple(group.lease for group in self._groups.values())
            status = replace(self._status(), held=held)
            reply = await self._buffer.heartbeat(status)
        self._incarnation = reply.incarnation
        return reply

    async def _drain(self) -> None:
        """Wait `drain_s` for the groups, none if they are not needed; cancel the others.

        The leases of the others end with the last heartbeat.
        """
        if tasks := [group.task for group in self._groups.values()]:
            _, unfinished = await asyncio.wait(tasks, timeout=self._grace_s)
            for task in unfinished:
                task.cancel()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _status(self, *, is_leaving: bool = False) -> GeneratorStatus:
        gauges = self._engine.gauges()
        now_s, num_tokens = time.monotonic(), gauges["num_tokens"]
        before_s, before = self._last_report
        self._last_report = (now_s, num_tokens)
        return GeneratorStatus(
            generator_id=self._id,
            session=self._session,
            policy_version=self._engine.policy_version,
            lease_ids=tuple(self._groups),
            lease_ages_s=tuple(now_s - group.leased_at_s for group in self._groups.values()),
            lease_num_tokens=tuple(group.progress.num_tokens for group in self._groups.values()),
            num_active=int(gauges["num_active"]),
            num_waiting=int(gauges["num_waiting"]),
            num_tokens=int(num_tokens),
            tokens_per_s=(num_tokens - before) / max(now_s - before_s, 1e-3),
            pause_s=gauges["pause_s"],
            is_leaving=is_leaving,
            is_catching_up=not self._is_current(),
            last_failure=self._failure_record.last,
            failed_rows=self._failure_record.rows,
            num_lost_agents=self._failure_record.num_lost_agents,
        )
