"""A receiver of weights as a process of its own, which kills or freezes itself at a chosen hop.

    announced   it was announced an update and has not said Ready
    ready       it was told where the bytes are to be had and has not joined the group
    joined      it has joined and has received nothing
    broadcast   it has received the first bucket
    received    it has received everything and has not loaded it
    loaded      it has loaded it and has not said so

Whatever it loads is a line of its record: the version, and whether every value was right.
"""

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamrl.types import LoadReport, WeightUpdate
from streamrl.weights import groups
from streamrl.weights.channel import FromReceiver, Loaded, Ready, WeightReceiver
from streamrl.weights.transfer import TransferReceiver

HOPS = ("announced", "ready", "joined", "broadcast", "received", "loaded")
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

    def meet(self, hop: str, version: int) -> None:
        if not self.is_over and (hop, version) == (self.hop, self.version):
            self.is_over = True
            os.kill(os.getpid(), self.signal)


class Receiver(WeightReceiver):
    """Loads into a dictionary."""

    def __init__(self, address: str, name: str, record: Path, fate: Fate) -> None:
        super().__init__(address, name, f"session of {name}", self._load_update)
        self._record = record
        self._fate = fate
        self._transfer = TransferReceiver()

    async def _say(self, message: FromReceiver) -> None:
        if isinstance(message, Ready):
            self._fate.meet("announced", self._hello.policy_version + 1)
        if isinstance(message, Loaded):
            self._fate.meet("loaded", self._hello.policy_version)
        await super()._say(message)

    async def _load_update(self, update: WeightUpdate) -> LoadReport:
        version = update.policy_version
        self._fate.meet("ready", version)
        weights = await asyncio.to_thread(self._receive, update)
        self._fate.meet("received", version)
        is_right = weights.keys() == SHAPES.keys() and all(
            bool((tensor == float(version)).all()) for tensor in weights.values()
        )
        line = {"version": version, "is_right": is_right, "at_s": time.monotonic()}
        with self._record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return LoadReport(transfer_s=0.0, pause_s=0.0)

    def _receive(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        weights = {}
        for name, tensor in self._transfer.tensors(update):
            weights[name] = tensor.clone()
            self._fate.meet("broadcast", update.policy_version)
        return weights


def receive(address: str, name: str, record: Path, fate: Fate) -> None:
    """Until killed."""
    join = groups.join

    def joined(*arguments: Any, **options: Any) -> groups.Group:
        group = join(*arguments, **options)
        fate.meet("joined", 1)
        return group

    groups.join = joined

    async def follow() -> None:
        await Receiver(address, name, record, fate).run()

    asyncio.run(follow())
