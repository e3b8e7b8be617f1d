"""The load of `bench_weights`: parameters to publish, and the receivers' processes.

A receiver holds its weights as the HF engine does, follows one sender after the other, and takes
part in the bare gloo broadcasts that publishing is measured against.
"""

import asyncio
import itertools
import json
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from actors.engines.hf.engine import SpareWeights
from streamrl.types import LoadReport, TensorSpec, WeightUpdate
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.locality import locality_of
from streamrl.weights.receiver import WeightReceiver
from streamrl.weights.transports.receive import TransferReceiver

ROWS, COLUMNS = 2048, 1024
CHANGED = 0.03
WAIT_S = 3600.0


def make_parameters(size: int, device: str) -> dict[str, torch.Tensor]:
    """Matrices and norms of bfloat16 in one flat tensor, `size` bytes in all."""
    count = max(1, round(size / (2 * ROWS * COLUMNS)))
    shapes = {f"layers.{i}.weight": (ROWS, COLUMNS) for i in range(count)}
    shapes |= {f"layers.{i}.norm": (COLUMNS,) for i in range(count)}
    manifest = tuple(TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items())
    slots = Layout(manifest, 1).slots
    data = torch.rand(slots[-1].start // 2 + COLUMNS, dtype=torch.bfloat16, device=device)
    return {slot.spec.name: slot.read(slot.of(data.view(torch.uint8))) for slot in slots}


def flat_of(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    """The one tensor that `make_parameters` cut up."""
    first = next(iter(parameters.values()))
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())


def move_some(parameters: dict[str, torch.Tensor]) -> None:
    """CHANGED of the weights, to the next representable value."""
    for tensor in parameters.values():
        bits = tensor.view(-1).view(torch.int16)
        bits[torch.randint(len(bits), (int(CHANGED * len(bits)),), device=bits.device)] += 1


def join_bare(store: TCPStore, rank: int, count: int) -> Any:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=WAIT_S)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(PrefixStore("bare", store), rank, count + 1, options)


class Model(torch.nn.Module):
    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._named = {n: torch.nn.Parameter(p, requires_grad=False) for n, p in parameters.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self._named.items())


class Weights(SpareWeights):
    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__(Model(parameters))
        self._manifest = manifest_of(parameters)

    def flat(self) -> torch.Tensor:
        """The spare ones, in one piece."""
        landing = self.landing(self._manifest)
        assert landing is not None, "an update is in the same precision"
        return landing


async def receive(port: str, number: str, count: str, size: str, device: str) -> None:
    """A receiver's process: follows one sender after the other, loads as the HF engine does, and
    takes part in bare broadcasts."""
    device = f"cuda:{number}" if device == "cuda" else device
    weights = Weights(make_parameters(int(size), device))
    timeout = timedelta(seconds=WAIT_S)
    store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
    bare = await asyncio.to_thread(join_bare, store, int(number), int(count))
    taking_part = asyncio.create_task(asyncio.to_thread(take_part, bare, weights))
    following: asyncio.Task[None] | None = None
    for sender in itertools.count():
        address = (await asyncio.to_thread(store.get, f"sender {sender}")).decode()
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
        if not address:
            break
        following = asyncio.create_task(follow(address, number, device, weights))
    await taking_part


async def follow(address: str, name: str, device: str, weights: Weights) -> None:
    transfer = TransferReceiver(device)

    async def load(update: WeightUpdate) -> LoadReport:
        start = time.perf_counter()
        await asyncio.to_thread(stage, weights, transfer, update)
        received = time.perf_counter()
        weights.swap()
        pause_s = time.perf_counter() - received
        times = {"receive_s": received - start, "pause_s": pause_s}
        print(json.dumps({"version": update.policy_version, **times}), flush=True)
        return LoadReport(transfer_s=received - start, load_s=pause_s, pause_s=pause_s)

    receiver = WeightReceiver(address, name, load, locality=locality_of(device))
    try:
        await receiver.run()
    finally:
        transfer.close()


def stage(weights: Weights, transfer: TransferReceiver, update: WeightUpdate) -> None:
    weights.stage(transfer.tensors(update, weights.landing(update.manifest)))


def take_part(bare: Any, weights: Weights) -> None:
    """Bare broadcasts into the spare weights. Waits for the sender's command; 0 is the last."""
    while True:
        command = torch.zeros(1)
        bare.broadcast(command, 0).wait()
        if not command.item():
            return
        bare.barrier().wait()
        bare.broadcast(weights.flat(), 0).wait()
        bare.barrier().wait()
