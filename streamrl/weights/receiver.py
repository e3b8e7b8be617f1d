"""A generator's end: loads every version that the learner sends, or that a store has.

Waits for the learner without limit, since there may be none; waits at most LOAD_S for the engine to
load a version.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from pathlib import Path
from typing import TypeAlias

import zmq
import zmq.asyncio
from msgspec import structs

from streamrl import wire
from streamrl.curve import reconnect_soon, set_client_keys
from streamrl.errors import WeightTransferError, WireError
from streamrl.types import LoadReport, Locality, TensorSpec, ValidatorStatus, WeightUpdate
from streamrl.types.ranges import MAX_TEXT
from streamrl.weights.protocol import (
    HELLO_S,
    NO_LEARNER,
    UNKNOWN_LOCALITY,
    Announce,
    Failed,
    FromReceiver,
    FromSender,
    Hello,
    Leave,
    Loaded,
    Ready,
    Transfer,
    digest_of,
)
from streamrl.weights.transports.store import ObjectStore, StoreReader

log = logging.getLogger(__name__)

LOAD_S = 600.0
LOG_S = 10.0
POLL_S = 1.0
"""Between two looks at the store."""
MAX_POLL_S = 30.0
"""The same after several failed looks."""
MAX_MESSAGE_BYTES = 64 * 2**20


class Holding(Enum):
    """What became of the version that was loaded last."""

    KEPT = "kept"
    LOST = "lost"
    GONE = "gone"
    """Gone with the process that had it; there is nothing to load into."""


OnUpdate: TypeAlias = Callable[[WeightUpdate], Awaitable[LoadReport]]


class WeightReceiver:
    """The receiver of sent versions; runs in the generator's event loop. `on_update` receives and
    loads a version off the loop's thread, in the processes at `locality`, which have `num_ranks`
    ranks. Without `has_weights` it is sent version 0, too. `server` is the inference server that
    receives, if other receivers may load for it, too; `holding` says what became of the loaded
    version. `validator` is None for a generator. `curve` is the folder of the keys."""

    def __init__(
        self,
        address: str,
        receiver_id: str,
        on_update: OnUpdate,
        *,
        locality: Locality = UNKNOWN_LOCALITY,
        num_ranks: int = 1,
        has_weights: bool = True,
        server: str = "",
        holding: Callable[[], Holding] = lambda: Holding.KEPT,
        validator: ValidatorStatus | None = None,
        curve: Path | None = None,
    ) -> None:
        self._on_update = on_update
        learner_id = "" if has_weights else NO_LEARNER
        known = (receiver_id, secrets.token_hex(16), 0, learner_id, locality, num_ranks)
        self._hello = Hello(*known, validator=validator, server=server)
        self._manifest: tuple[TensorSpec, ...] = ()
        self._holding = holding
        self._is_due = asyncio.Event()
        self._logged_s = -LOG_S
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        reconnect_soon(self._socket)
        set_client_keys(self._socket, address, curve, "weights.address")
        self._socket.connect(address)

    def set_validator(self, status: ValidatorStatus) -> None:
        """Set what the next Hello says about this validator."""
        self._hello = structs.replace(self._hello, validator=status)

    def say_hello(self) -> None:
        """Send the next Hello at once."""
        self._is_due.set()

    async def run(self) -> None:
        """Send Hellos, and load what the learner sends, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_hellos())
                tasks.create_task(self._receive_messages())
        finally:
            await self._send(Leave(self._hello.receiver_id))
            self._socket.close()

    async def _send_hellos(self) -> None:
        """Send a Hello every HELLO_S, and at `say_hello`. Waits for a connection first; a load,
        which runs in another thread, does not block it."""
        while True:
            self._is_due.clear()
            await self._socket.poll(None, zmq.POLLOUT)  # type: ignore[call-arg]
            await self._greet()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HELLO_S):
                    await self._is_due.wait()

    async def _greet(self) -> None:
        """Send a Hello, unless what it receives for is gone; the sender then forgets it."""
        holding = self._holding()
        if holding is Holding.LOST:
            self._hello = structs.replace(self._hello, policy_version=0, learner_id=NO_LEARNER)
        if holding is not Holding.GONE:
            await self._send(self._hello)

    async def _receive_messages(self) -> None:
        """Handle the learner's messages. Waits for them without limit."""
        while True:
            frame, *more = await self._socket.recv_multipart()
            try:
                message: FromSender = wire.decode(b"" if more else frame, FromSender)  # type: ignore[arg-type]
            except WireError as error:
                self._log_unreadable(error)
                continue
            match message:
                case Announce(attempt):
                    await self._send(Ready(self._hello.receiver_id, attempt))
                case Transfer(attempt, update):
                    await self._on_transfer(attempt, update)

    async def _on_transfer(self, attempt: int, update: WeightUpdate) -> None:
        name = self._hello.receiver_id
        if update.manifest:
            self._manifest = update.manifest
            self._hello = structs.replace(self._hello, manifest=digest_of(update.manifest))
        update = structs.replace(update, manifest=self._manifest)
        self._hello = structs.replace(self._hello, is_loading=True)
        try:
            report = await _load_in_time(self._on_update, update)
        except WeightTransferError as error:
            log.warning("version %d not loaded: %s", update.policy_version, error)
            self._hello = structs.replace(self._hello, is_loading=False)
            await self._send(Failed(name, attempt, str(error)[:MAX_TEXT]))
        else:
            self._hello = structs.replace(
                self._hello,
                policy_version=update.policy_version,
                learner_id=update.learner_id,
                is_loading=False,
            )
            await self._send(Loaded(name, attempt, report))
            # A sender that no longer waits for the answer learns from this Hello what is here.
            self.say_hello()

    def _log_unreadable(self, error: WireError) -> None:
        """Log an unreadable message, at most one every LOG_S: there may be a flood."""
        if time.monotonic() - self._logged_s >= LOG_S:
            self._logged_s = time.monotonic()
            log.warning("unreadable message from the learner: %s", error)

    async def _send(self, message: FromReceiver) -> None:
        """Send a message. Without a learner it is dropped; the next Hello makes up for it."""
        with contextlib.suppress(zmq.Again):
            await self._socket.send(wire.encode(message), zmq.NOBLOCK)


class StoreReceiver:
    """The receiver of stored versions; runs in the generator's event loop, like `WeightReceiver`,
    and loads what the `store` has. The learner does not know about it. `folder` is for downloads,
    under `receiver_id`."""

    def __init__(
        self, store: ObjectStore, folder: Path, receiver_id: str, on_update: OnUpdate
    ) -> None:
        log.info("%s follows %s", receiver_id, store.url)
        self._reader = StoreReader(store, folder, receiver_id)
        self._on_update = on_update
        self._known: tuple[str, int] | None = None

    async def run(self) -> None:
        """Look for newer versions and load them, until cancelled. While the store cannot be
        reached, the current weights stay."""
        wait_s = POLL_S
        while True:
            try:
                await self._follow()
                wait_s = POLL_S
            except WeightTransferError as error:
                log.warning("%s; looking again in %.0f s", error, wait_s)
                wait_s = min(2 * wait_s, MAX_POLL_S)
            await asyncio.sleep(wait_s)

    async def _follow(self) -> None:
        update = await asyncio.to_thread(self._reader.newest, self._known)
        if update is None:
            return
        try:
            await _load_in_time(self._on_update, update)
        except WeightTransferError:
            self._reader.forget()
            raise
        self._known = (update.learner_id, update.policy_version)


async def _load_in_time(on_update: OnUpdate, update: WeightUpdate) -> LoadReport:
    """Waits at most LOAD_S for the engine. If it hangs, or gives up silently, the process must end,
    or it would sample with old weights forever."""
    try:
        async with asyncio.timeout(LOAD_S) as deadline:
            return await on_update(update)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(
            f"the engine has canceled its load of version {update.policy_version}"
        ) from error
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise RuntimeError(
            f"the engine has not loaded version {update.policy_version} for {LOAD_S:g} s"
        ) from error
