"""The Ray cluster of a run: connects to it, requests bundles, and reaches the supervisors there.
Copies what nodes write to folders that the driver does not see: logs, and the whole run of a
learner.

Invariant: everything that the cluster has given is returned when the driver ends, in whatever way,
since placement groups and actors belong to its job. The bundles of a group come together or not at
all.

Invariant of `Copies`: a copy has what its node had written by the last look; a rewritten file is
replaced as a whole. History and records are copied before the checkpoints that need them, each
manifest after its files, and the buffer's journal, which is consistent only when nobody writes it,
at the end. A checkpoint that the node deletes is deleted here, too.
"""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from streamrl import __version__
from streamrl.checkpoints.find import list_checkpoints, version_of
from streamrl.checkpoints.manifest import MANIFEST_FILE
from streamrl.cli.launchers.ray.bundles import Bundle, Room, missing
from streamrl.cli.launchers.ray.files import archive, private_files, required
from streamrl.cli.launchers.ray.supervisor import Supervisor
from streamrl.cli.processes.mirror import complete_checkpoints
from streamrl.config import RunConfig
from streamrl.config.addresses import port_of
from streamrl.errors import ConfigError, ErrorRecord
from streamrl.placement.plan import Plan

CONNECT_S, RETRY_S = 10.0, 5.0
LostError = ray.exceptions.RayActorError


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the cluster for the block. Raises ConfigError if there is none, or its version
    differs."""
    _require_listener(address)
    try:
        # Output of the nodes' workers is not printed here: the commands that they run have their
        # own logs.
        ray.init(
            address=address,
            namespace=f"streamrl-{uuid.uuid4().hex[:8]}",
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--ray: {_refusal(address, str(error))}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Require that something listens at the address. Waits at most CONNECT_S; Ray itself would try
    for minutes."""
    given = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = given.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"--ray: {_refusal(given, str(error))}") from None


def _refusal(address: str, message: str) -> str:
    where = "here" if address == "auto" else f"at {address}"
    return (
        f"no Ray cluster {where} can be used: start one with `ray start --head`, with the same Ray "
        f"and Python on all machines, or name another address ({' '.join(message.split())[:300]})"
    )


def rooms() -> tuple[Room, ...]:
    """The room on each of the cluster's nodes that are up now."""
    totals = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return tuple(Room(int(t.get("GPU", 0)), int(t.get("CPU", 0))) for t in totals)


class Place:
    """One bundle of a group; `found` is its supervisor's answer, {} before it is there."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.actor: Any = None
        self.found: Mapping[str, Any] = {}
        self.is_ready = False

    async def run(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log_format: str
    ) -> tuple[int, ErrorRecord | None]:
        """See `Supervisor.run`. Raises LostError if the node or the supervisor is lost."""
        answer: tuple[int, ErrorRecord | None] = await self.actor.run.remote(
            name, tuple(command), dict(environment), log_format
        )
        return answer

    def signal(self, name: str, number: int) -> None:
        if self.actor is not None:
            self.actor.signal.remote(name, int(number))


class Group:
    """Bundles that come together: those of a learner, or the single one of an engine."""

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        self.places = tuple(Place(bundle) for bundle in bundles)
        self._group: Any = None

    def open(self) -> None:
        """Request the bundles; their supervisors start when the bundles are there."""
        bundles = [dict(place.bundle.resources) for place in self.places]
        strategy = "SPREAD" if len(bundles) == 1 else "PACK"
        self._group = placement_group(bundles, strategy=strategy)
        for index, place in enumerate(self.places):
            place.actor = (
                ray.remote(Supervisor)
                .options(
                    num_cpus=place.bundle.needs.cpus,
                    num_gpus=place.bundle.needs.gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                )
                .remote()
            )

    def close(self) -> None:
        """Return the bundles to the cluster; their processes are killed."""
        for place in self.places:
            if place.actor is not None:
                with contextlib.suppress(Exception):
                    ray.kill(place.actor)
            place.actor, place.found, place.is_ready = None, {}, False
        if self._group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
        self._group = None


class Nodes:
    """Reaches the groups of one run, whose folder the driver has prepared."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._launch_id = uuid.uuid4().hex
        # A node that sees the same folder recognizes it by this file.
        (folder / "launch.id").write_text(self._launch_id)
        self._homes: dict[str, str] = {}
        self.plan: Plan | None = None
        self._is_fetched = False

    async def reach(self, group: Group) -> None:
        """Wait until the group is there, however long that takes.

        Raises:
            ConfigError: a node has another release of StreamRL, or none.
            LostError: a node was lost again.
        """
        if group.places[0].actor is None:
            group.open()
        await asyncio.gather(*(self._hello(place) for place in group.places))

    async def _hello(self, place: Place) -> None:
        directory = os.getcwd()
        try:
            found = await place.actor.hello.remote(
                str(self._folder), self._launch_id, (directory, os.stat(directory).st_ino)
            )
        except LostError as error:
            if (refusal := _import_refusal(str(error))) is not None:
                raise ConfigError(refusal) from None
            raise
        if found["release"] != __version__:
            raise ConfigError(
                f"node {found['address']}: has StreamRL {found['release']}, and this machine "
                f"{__version__}: install the same release on all nodes"
            )
        node = self._homes[place.bundle.name] = found["node"]
        sharing = list(self._homes.values()).count(node)
        cores = next((n["Resources"].get("CPU", 1) for n in ray.nodes() if n["NodeID"] == node), 1)
        place.found = {**found, "num_cores": max(1, int(cores) // sharing)}

    async def hold_ports(self, place: Place, config: RunConfig) -> int:
        """Have the node hold free ports for the plan's addresses; return the first one. Raises
        ConfigError if a port that a setting names is taken."""
        urls = {"weights.address": config.weights.address}
        if config.buffer.binds_url:
            urls["buffer.url"] = config.buffer.url
        named = {setting: port for setting, url in urls.items() if (port := port_of(url))}
        first: int
        first, why = await place.actor.hold_ports.remote(place.found["address"], named)
        if why:
            raise ConfigError(f"{why}; is another run using it? Port 0 picks a free one")
        return first

    async def fetch(self, place: Place, environment: Mapping[str, str]) -> None:
        """Have the node fetch the run from its mirror, unless it sees the run's folder. Waits at
        most `cluster.start_s` for a store that does not answer. Raises ConfigError if it cannot be
        fetched."""
        assert self.plan is not None, "the learner's nodes are there first"
        if place.found["shares_folder"]:
            return
        config = self.plan.config
        until_s = time.monotonic() + config.cluster.start_s
        while why := await place.actor.fetch.remote(config, dict(environment)):
            if time.monotonic() >= until_s:
                raise ConfigError(f"node {place.found['address']}: {why}")
            await asyncio.sleep(RETRY_S)
        self._is_fetched = True

    async def prepare(self, place: Place) -> None:
        """Send the node the files that it does not see. Raises ConfigError if it lacks a file, or
        the files are too large."""
        assert self.plan is not None, "the learner's nodes are there first"
        if not (place.found["shares_folder"] and place.found["shares_directory"]):
            config, host = self.plan.config, place.bundle.name
            is_new = host == "learner" and not place.found["shares_folder"] and not self._is_fetched
            sent = b"" if place.found["shares_directory"] else archive(config)
            absent = await place.actor.prepare.remote(
                sent, private_files(self.plan, host), required(config), is_new=is_new
            )
            if absent:
                raise ConfigError(
                    f"node {place.found['address']}: {absent} is not there; a relative path that "
                    "stays below the working folder would be sent"
                )
        place.is_ready = True

    async def require(self, group: Group, within_s: float) -> None:
        """Like `reach`, but within `within_s` seconds. Raises ConfigError if the cluster has no
        room for the group."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    with contextlib.suppress(LostError):
                        return await self.reach(group)
                    group.close()
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise ConfigError(no_room(group, within_s)) from None


def no_room(group: Group, within_s: float) -> str:
    why = missing([place.bundle for place in group.places], rooms())
    return f"--ray: {why}, after {within_s:g} s (cluster.start_s)"


def _import_refusal(message: str) -> str | None:
    """What a person must do about a supervisor that could not be created; None if it failed for
    another reason."""
    has_other = "Can't get attribute 'Supervisor" in message
    if not has_other and "No module named 'streamrl" not in message:
        return None
    node = re.search(r"ip=([^,)\s]+)", message)
    of_this = ", but not the code of this machine" if has_other else ", which every node needs"
    return (
        f"node {node[1] if node else 'of the cluster'}: has {'' if has_other else 'no '}StreamRL "
        f"{__version__}{of_this}: install it there, or start the nodes from an image that has it"
    )


POLL_S = 1.0
CHUNK_BYTES = 8 * 2**20
_APPENDED = (".log", ".jsonl")
_COMPARED_BYTES = 1024
# Copied only at the end, and never; weights/ is the node's own.
_LATER, _NEVER = ("buffer",), ("weights", "keys", "files")


class Copies:
    """Copies what nodes write into the run's folder here."""

    def __init__(self, folder: Path, places: Sequence[Place]) -> None:
        self._folder, self._places = folder, places
        self._known: dict[Place, Mapping[str, tuple[int, int]]] = {}

    async def run(self) -> None:
        """Copy until cancelled. Waits POLL_S between looks."""
        while True:
            await self.bring(_LATER + _NEVER)
            await asyncio.sleep(POLL_S)

    async def bring(self, but: Sequence[str] = _NEVER) -> None:
        """Copy what is new, except below the folders `but`. Waits for the nodes."""
        for place in self._places:
            if place.is_ready and place.found and not place.found["shares_folder"]:
                try:
                    await self._bring_from(place, but)
                except LostError:
                    # The child whose process runs there notices, too.
                    continue

    async def _bring_from(self, place: Place, but: Sequence[str]) -> None:
        is_learner = place.bundle.name == "learner"
        prefix = "" if is_learner else f"logs/{place.bundle.name}.log"
        known = self._known.get(place, {})
        now: Mapping[str, tuple[int, int]] = await place.actor.files.remote(prefix)
        torn: set[str] = set()
        for path, (size, time_ns) in sorted(now.items(), key=_turn):
            if path.partition("/")[0] in but or known.get(path) == (size, time_ns):
                continue
            folder = path.removesuffix(MANIFEST_FILE)
            if folder != path and any(other.startswith(folder) for other in torn):
                continue
            had = known.get(path, (0, 0))[0]
            goes_on = 0 < had <= size and await self._goes_on(place, path, had)
            if await self._copy(place, path, had if goes_on else 0, size):
                known = {**known, path: (size, time_ns)}
                self._known[place] = known
            else:
                torn.add(path)
        if is_learner:
            self._forget([path for path in now if known.get(path) == now[path]])

    async def _goes_on(self, place: Place, path: str, had: int) -> bool:
        """Whether the node's file continues the bytes that are here. It does not if a learner that
        went back has cut lines and the file has grown again."""
        if not path.endswith(_APPENDED):
            return False
        begin = max(0, had - _COMPARED_BYTES)
        with (self._folder / path).open("rb") as file:
            file.seek(begin)
            ours = file.read(had - begin)
        theirs: bytes = await place.actor.read.remote(path, begin, had - begin)
        return ours == theirs

    def _forget(self, there: Collection[str]) -> None:
        """Delete checkpoints that the node has deleted, once a newer one is here; `there` are the
        node's files that are copied."""
        complete = complete_checkpoints(there)
        last = max((version_of(Path(name)) for name in complete), default=-1)
        for path in list_checkpoints(self._folder):
            if path.name not in complete and version_of(path) < last:
                (path / MANIFEST_FILE).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)

    async def _copy(self, place: Place, path: str, start: int, size: int) -> bool:
        """Copy the bytes from `start` to `size`; return whether all are here. If the file is gone
        by now, the copy is not changed."""
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part") if start == 0 else target
        with part.open("wb" if start == 0 else "r+b") as file:
            file.seek(start)
            while start < size:
                body: bytes = await place.actor.read.remote(
                    path, start, min(CHUNK_BYTES, size - start)
                )
                if not body:
                    break
                file.write(body)
                start += len(body)
        if part != target and start == size:
            os.replace(part, target)
        elif part != target:
            part.unlink()
        return start == size


def _turn(item: tuple[str, tuple[int, int]]) -> tuple[bool, int, bool, str]:
    """The order of copying: records, then the checkpoints whose steps they contain, newest first
    (the node holds that one), each with its manifest last."""
    path = item[0]
    folder = path.removeprefix("checkpoints/step-").partition("/")[0]
    version = int(folder) if folder.isdigit() else -1
    return version >= 0, -version, path.endswith(f"/{MANIFEST_FILE}"), path
