"""A receiver of weights as a process of its own, which kills or freezes itself at a chosen hop.

    announced   it has got Announce and has not sent Ready
    ready       it has got Transfer, with the endpoint, and has received nothing
    joined      it has joined the group of a broadcast and has received nothing
    frame       it has received the first bucket, or what changed of it
    begun       it has received the first tensor
    received    it has received everything and has not loaded it
    loaded      it has loaded it and has not sent Loaded

Each load is a line of its record: the version, and whether every value was right. Each failed load
is a line of the file beside it.
"""

import asyncio
import json
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamrl.errors import WeightTransferError
from streamrl.types import LoadReport, WeightUpdate
from streamrl.weights.locality import locality_of
from streamrl.weights.protocol import FromReceiver, Loaded, Ready
from streamrl.weights.receiver import WeightReceiver
from streamrl.weights.transports import groups
from streamrl.weights.transports.receive import TransferReceiver

HOPS = ("announced", "ready", "joined", "begun", "received", "loaded")
# More than sockets hold, so that a sender notices who does not read; in several buckets.
SHAPES = {f"layer {i}": (1024, 256) for i in range(6)}
BUCKET_BYTES = 2**20


@dataclass
class Fate:
    """`signal` is what the receiver sends itself at the `hop` of the update to `version`, once."""

    hop: str
    version: int
    signal: signal.Signals
    is_over: bool = False
    arriving: int = 0
    """The version that is about to be received."""

    def meet(self, hop: str, version: int) -> None:
        if not self.is_over and (hop, version) == (self.hop, self.version):
            self.is_over = True
            # To this thread, so that it is not a moment further when the process stops.
            signal.pthread_kill(threading.get_ident(), self.signal)


class Receiver(WeightReceiver):
    """Loads into a dictionary."""

    def __init__(self, address: str, name: str, record: Path, fate: Fate) -> None:
        super().__init__(address, name, self._load_update, locality=locality_of("cpu"))
        self._record = record
        self._fate = fate
        self._transfer = TransferReceiver()

    async def _send(self, message: FromReceiver) -> None:
        if isinstance(message, Ready):
            self._fate.meet("announced", self._hello.policy_version + 1)
        if isinstance(message, Loaded):
            self._fate.meet("loaded", self._hello.policy_version)
        await super()._send(message)

    async def _load_update(self, update: WeightUpdate) -> LoadReport:
        version = update.policy_version
        self._fate.arriving = version
        self._fate.meet("ready", version)
        try:
            weights = await asyncio.to_thread(self._receive, update)
        except WeightTransferError as error:
            self._note(".failed", version=version, reason=str(error))
            raise
        self._fate.meet("received", version)
        is_right = weights.keys() == SHAPES.keys() and all(
            bool((tensor == float(version)).all()) for tensor in weights.values()
        )
        is_difference = getattr(update.endpoint, "difference", None) is not None
        self._note(
            "",
            version=version,
            is_right=is_right,
            is_difference=is_difference,
        )
        return LoadReport(transfer_s=0.0, pause_s=0.0)

    def _note(self, suffix: str, **line: object) -> None:
        with self._record.with_suffix(suffix).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _receive(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        weights = {}
        for name, tensor in self._transfer.tensors(update):
            weights[name] = tensor.clone()
            self._fate.meet("begun", update.policy_version)
        return weights


def receive(address: str, name: str, record: Path, fate: Fate) -> None:
    """Until killed."""
    join = groups.join

    def joined(*arguments: Any, **options: Any) -> groups.BroadcastGroup:
        group = join(*arguments, **options)
        fate.meet("joined", 1)
        return group

    groups.join = joined
    pipelined = groups.BroadcastGroup.pipelined

    def arriving(group: groups.BroadcastGroup, tensors: Any) -> Any:
        for tensor in pipelined(group, tensors):
            fate.meet("frame", fate.arriving)
            yield tensor

    groups.BroadcastGroup.pipelined = arriving

    async def follow() -> None:
        await Receiver(address, name, record, fate).run()

    asyncio.run(follow())
