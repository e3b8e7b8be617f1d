"""`streamrl launch FILE --ray`: the driver of a run on a Ray cluster.

Invariant: the driver needs no GPU, and no data of the run passes through it. A generator whose node
is lost or not there yet waits for one, however long. If a node of the learner or the buffer is
lost, all processes end, and the run starts again from its checkpoint.
"""

import argparse
import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from streamrl.cli.display.view import ProgressView
from streamrl.cli.launchers.ray.bundles import engine_bundles, host_of, learner_bundles
from streamrl.cli.launchers.ray.cluster import (
    RETRY_S,
    Copies,
    Group,
    LostError,
    Nodes,
    Place,
    connected,
    no_room,
    rooms,
)
from streamrl.cli.launchers.ray.files import handed_on, with_keys, write_secrets
from streamrl.cli.plan import print_plan
from streamrl.cli.processes.command import signals_raise, unless_signaled
from streamrl.cli.processes.daemons import RemoteChild, make_children, newest_step, supervise
from streamrl.cli.processes.mirror import Mirror
from streamrl.cli.processes.restarts import Child, RestartBudget
from streamrl.cli.processes.run_commands import (
    books_option,
    evaluation_may_fail,
    launching,
    make_missing_model,
    take_validated_score,
)
from streamrl.config import RunConfig, to_yaml
from streamrl.durable_files import write_file
from streamrl.errors import (
    EXIT_UNREACHABLE,
    ConfigError,
    ErrorRecord,
    StreamRLError,
    error_of,
    sentence_of,
)
from streamrl.placement.make_plan import make_plan
from streamrl.placement.plan import Plan, PlannedProcess
from streamrl.run_folder import resume_command


def launch(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Run on the cluster, or print the plan with `--dry-run`. Return the exit code."""
    # The run's folder must have the same path on every node. Within a Ray job the working folder is
    # a copy that Ray removes, so a relative path is taken relative to the home folder.
    base = Path.home() if "runtime_resources" in Path.cwd().parts else Path.cwd()
    config, console = config.with_values(run={"folder": base / config.run.folder}), Console()
    with connected(arguments.ray), signals_raise():
        if arguments.dry_run:
            print_plan(_Run(with_keys(config), arguments, console).plan())
            return 0
        return _launch(config, arguments, console)


def _launch(given: RunConfig, arguments: argparse.Namespace, console: Console) -> int:
    try:
        with launching(with_keys(given), arguments, console, binds=False) as (config, mirror):
            make_missing_model(config, console)
            write_secrets(given)
            lost = asyncio.run(_Run(config, arguments, console, mirror).to_its_end())
            if lost is not None:
                raise lost
    except KeyboardInterrupt:
        remedy = resume_command(given.run.path)
        console.print(f"stopped; to continue: {remedy}", soft_wrap=True, highlight=False)
        raise
    return 0


class _Run:
    """One run, whose learner may move to other nodes when it is lost."""

    def __init__(
        self,
        config: RunConfig,
        arguments: argparse.Namespace,
        console: Console,
        mirror: Mirror | None = None,
    ) -> None:
        self._config, self._arguments, self._resume = config, arguments, arguments.resume
        self._mirror = mirror
        self._view = ProgressView(config, console, live=not arguments.no_view)
        self._learner = Group(learner_bundles(config, rooms()))
        self._engines = [Group([bundle]) for bundle in engine_bundles(config, rooms())]

    async def to_its_end(self) -> StreamRLError | None:
        """Run to the end; returns as `supervise` does. Waits for the end."""
        self._nodes = Nodes(self._config.run.path)
        step = newest_step(self._config.run.path)
        budget = RestartBudget(self._config.run, step)
        try:
            for group in (self._learner, *self._engines):
                group.open()
            while True:
                try:
                    return await self._supervised(await unless_signaled(self._begin()))
                except (LearnerLostError, LostError) as lost:
                    error = LearnerLostError("the learner's node is lost")
                    if self._arguments.strict:
                        raise error from lost
                    step, record = newest_step(self._config.run.path), ErrorRecord.of(error)
                    delay_s = budget.delay_s(EXIT_UNREACHABLE, record, step)
                    self._view.print(f"{error}; the run goes on from its newest checkpoint")
                    self._learner.close()
                    self._learner = Group(learner_bundles(self._config, rooms()))
                    await unless_signaled(asyncio.sleep(delay_s))
                    self._resume = True
        finally:
            for group in (self._learner, *self._engines):
                group.close()

    def plan(self) -> Plan:
        """Make the plan with what is known about the nodes by now."""
        hosts = [host_of(place.bundle, place.found) for place in self._places]
        return make_plan(self._config, hosts, resume=self._resume)

    async def _begin(self) -> Plan:
        """Wait until the learner's nodes are there and have what they need; return the plan. Raises
        ConfigError if that takes longer than `cluster.start_s`, or they cannot be used."""
        await self._nodes.require(self._learner, self._config.cluster.start_s)
        first = await self._nodes.hold_ports(self._learner.places[0], self._config)
        self._config = self._config.with_values(cluster={"first_port": first})
        plan = self.plan()
        write_file(plan.config_file, to_yaml(plan.config))
        for note in plan.notes:
            self._view.print(f"note: {note.sentence}")
        self._require_folder()
        self._nodes.plan = plan
        if self._resume and self._mirror is not None:
            while True:
                if await asyncio.to_thread(self._mirror.is_brought_up_to_date):
                    break
                await asyncio.sleep(RETRY_S)
            await self._nodes.fetch(self._learner.places[0], handed_on(plan.config))
        for place in self._learner.places:
            await self._nodes.prepare(place)
        for group in self._engines:
            # What was prepared before the learner was lost has other addresses.
            group.places[0].is_ready = False
        return plan

    async def _supervised(self, plan: Plan) -> StreamRLError | None:
        """Run the plan's processes, with the commands before and after them."""
        arguments = self._arguments
        is_new = arguments.new and not self._resume
        option = books_option(resume=self._resume, new=is_new)
        if option is not None and not plan.config.buffer.binds_url:
            await self._call(plan, "buffer books", option)
        copies = Copies(plan.config.run.path, self._places)

        async def beside(children: Sequence[Child]) -> None:
            await asyncio.gather(copies.run(), self._require_generators(children))

        try:
            lost = await supervise(
                self._children(plan),
                view=self._view.run,
                notify=self._view.print,
                background=beside,
                stop_s=plan.config.stop_within_s,
                strict=arguments.strict,
            )
            with evaluation_may_fail():
                if plan.config.is_evaluated and not take_validated_score(plan.config):
                    await self._call(plan, "evaluate")
            return lost
        finally:
            await copies.bring()

    def _require_folder(self) -> None:
        found = [place.found for place in self._learner.places]
        apart = [one["address"] for one in found if not one.get("shares_folder")]
        has_mirror = self._mirror is not None
        if apart and (len(found) > 1 or (self._resume and not has_mirror)):
            why, remedy = "ranks on several nodes work", ""
            if len(found) == 1:
                why, remedy = "a run goes on", ", or a store as run.folder_mirror"
            raise ConfigError(
                f"run.folder: node {apart[0]} does not see {self._config.run.path} of this "
                f"machine, and {why} only on storage that both have: name a folder there{remedy}"
            )

    @property
    def _places(self) -> list[Place]:
        return [place for group in (self._learner, *self._engines) for place in group.places]

    def _children(self, plan: Plan) -> "list[RayChild]":
        homes = {
            place.bundle.name: {"group": group, "place": place}
            for group in (self._learner, *self._engines)
            for place in group.places
        }

        def own(process: PlannedProcess) -> Mapping[str, Any]:
            may_wait = process.role not in ("buffer", "learner")
            all_have = {"nodes": self._nodes, "may_wait": may_wait, "plan": self.plan}
            return {**all_have, **homes[process.host]}

        children = make_children(RayChild, plan, self._view.print, own, handed_on(plan.config))
        for child in children:
            child.family = children
        return children

    async def _require_generators(self, children: Sequence[Child]) -> None:
        """Wait `cluster.start_s`, then raise ConfigError if fewer generators than the run needs
        have reached a node."""
        within_s, least = self._config.cluster.start_s, self._config.generator.min_count
        await asyncio.sleep(within_s)
        reached = [c for c in children if isinstance(c, RayChild) and c.was_reached]
        if sum(child.role.startswith("generator") for child in reached) < least:
            waiting = next(g for g in self._engines if not g.places[0].is_ready)
            raise ConfigError(no_room(waiting, within_s))

    async def _call(self, plan: Plan, command: str, *arguments: str) -> None:
        """Run `streamrl COMMAND` on the learner's node. Waits for its end, or for a signal.

        Raises:
            StreamRLError: it failed; the class is that of the failure.
            Interrupted: a signal came first.
        """
        learner = next(process for process in plan.processes if process.name == "learner")
        words = ("streamrl", *command.split(), *arguments, "--config", str(plan.config_file))
        environment = {**handed_on(plan.config), **learner.environment}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        running = self._learner.places[0].run(
            command.split()[-1], words, environment, plan.config.run.log_format
        )
        try:
            code, record = await unless_signaled(running)
        except LostError:
            raise StreamRLError(f"{command}: the learner's node is lost") from None
        if code != 0:
            raise error_of(code, f"{command}: {sentence_of(code, record)}")


ABORT_S = 3.0
WAITS = "waits for a node"


class LearnerLostError(StreamRLError):
    """A node of the learner or the buffer is gone."""


@dataclass(kw_only=True)
class RayChild(RemoteChild):
    """A child on a Ray node. `place` is its bundle, part of `group`; `family` are all children of
    the run; `plan` makes the plan from what is known about the nodes now."""

    nodes: Nodes
    group: Group
    place: Place
    may_wait: bool
    plan: Callable[[], Plan]
    family: "list[RayChild]" = field(default_factory=list)
    was_reached: bool = False

    def begin_kill(self) -> None:
        self.place.signal(self.role, signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Have the supervisor send the signal. A node that does not react to SIGKILL is given
        up."""
        self.begin_stop()
        self.place.signal(self.role, number)
        if number == signal.SIGKILL:
            asyncio.get_running_loop().call_later(ABORT_S, self._abort)

    def _abort(self) -> None:
        if self.state == "stopping":
            self.group.close()

    async def _run(self) -> tuple[int, ErrorRecord | None]:
        """Run the process on a node, again after each lost node; return its exit code and record.
        Waits for its end, or for a node; `stop` ends both waits."""
        while await self._is_reached():
            process = next(p for p in self.plan().processes if p.name == self.role)
            command = process.restart_command if self.num_restarts else process.command
            # Ray has already chosen the bundle's devices.
            environment = {**self.environment, **process.environment}
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            self.budget.on_start()
            self.state, self.was_reached = "running", True
            try:
                return await self.place.run(self.role, command, environment, self.log_format)
            except LostError:
                self.state = WAITS
                if self.stopping.is_set():
                    break
                lost = f"{self.role}: its node is lost"
                if not self.may_wait:
                    for child in self.family:
                        child.stop(signal.SIGKILL)
                    raise LearnerLostError(lost) from None
                self.group.close()
                self.num_restarts += 1
                self.notify(f"{lost}; the run goes on without it until it has one")
        return 0, None

    async def _is_reached(self) -> bool:
        """Wait until the node is there (True) or this child is told to stop (False)."""
        said = ""
        while not self.stopping.is_set() and not self.place.is_ready:
            self.state = WAITS
            waiting = asyncio.create_task(self.stopping.wait())
            reaching = asyncio.create_task(self._reach())
            await asyncio.wait({waiting, reaching}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not reaching.done():
                reaching.cancel()
                return False
            error = reaching.exception()
            if error is not None and not isinstance(error, ConfigError | LostError):
                raise error
            if error is not None:
                if str(error) != said:
                    said = str(error)
                    self.notify(f"{self.role}: {said}")
                self.group.close()
                await asyncio.wait({asyncio.create_task(self.stopping.wait())}, timeout=RETRY_S)
        return not self.stopping.is_set()

    async def _reach(self) -> None:
        await self.nodes.reach(self.group)
        await self.nodes.prepare(self.place)

    def _log(self, sentence: str) -> None:
        """Nothing to do: the supervisor has written it into the log on its node."""

    def _delay_s(self, code: int, record: ErrorRecord | None) -> float:
        """A generator that cannot reach the run keeps trying, since only its node may be at
        fault."""
        if code == EXIT_UNREACHABLE and self.may_wait:
            return RETRY_S
        return super()._delay_s(code, record)
