"""A weight update in SGLang: received in this process while it samples, sent on in its pause.

SGLang receives inside its scheduler: it samples nothing meanwhile, and loads bucket by bucket into
the weights in use. So this process receives the update like any engine, and then broadcasts the
complete update again, over a group of this process (rank 0) and SGLang's ranks.

If this process ends during a broadcast, SGLang gives up at once. But if it ends while the group is
being formed, SGLang waits half an hour (torch's default, which SGLang does not let us change) and
answers nobody. So the group is formed once, at the first update, and lasts until this process ends
or an update fails.

Invariant: SGLang's weights change only after every tensor of the update has arrived here. Its label
changes with the last bucket, in the pause.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator

import torch
from msgspec import Struct

from actors.engines.served.http import Http, RefusedError
from actors.engines.sglang.messages import (
    DestroyWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    PauseMode,
    UpdateWeightsFromDistributedReqInput,
)
from actors.engines.updates import StagedWeights
from streamrl.config.generator import SglangSettings
from streamrl.errors import StreamRLError, WeightTransferError
from streamrl.types import WeightUpdate
from streamrl.weights.layout import dtype_name
from streamrl.weights.transports import groups
from streamrl.weights.transports.receive import TransferReceiver

NamedTensor = tuple[str, torch.Tensor]


class RelayGroup(Struct, frozen=True):
    """A group with SGLang's ranks, and its name in SGLang."""

    name: str
    group: groups.BroadcastGroup


class Relay:
    """Implements `actors.engines.served.server.ServerUpdates`. `host` is the address at which
    SGLang's ranks reach this machine."""

    def __init__(
        self,
        http: Http,
        settings: SglangSettings,
        staged: StagedWeights,
        *,
        host: str,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._http = http
        self._settings = settings
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._transfer = TransferReceiver()
        self._staged = staged
        self._store = groups.OpenStore(host, timeout_s)
        self._membership: RelayGroup | None = None

    async def receive(self, update: WeightUpdate) -> None:
        """Receive an update. Waits for the learner, at most for the transfer's timeouts."""
        await asyncio.to_thread(self._stage, update)

    async def load_in_pause(
        self, label: str, on_loaded: Callable[[], None], require_current: Callable[[], None]
    ) -> float:
        """
        Raises:
            WeightTransferError: no group was formed; sampling goes on with the old weights.
        """
        start = time.perf_counter()
        mode: PauseMode = "in_place" if self._settings.keeps_old_kv else "retract"
        if self._settings.pause_mode == "abort":
            mode = "abort"
        await self._http.send("/pause_generation", PauseGenerationReqInput(mode))
        try:
            self._membership = self._membership or await self._form()
        except (RefusedError, WeightTransferError) as error:
            await self._http.send("/continue_generation", {})
            raise WeightTransferError(
                f"SGLang did not join a group at {self._store.host}:{self._store.port} (see "
                f"generator.sglang.reach_host): {error}"
            ) from error
        try:
            try:
                await self._http.send("/begin_weight_update", {})
            except RefusedError:
                # Some generator has left an update unfinished.
                await self._http.send("/end_weight_update", {})
                await self._http.send("/begin_weight_update", {})
            await self._broadcast(self._membership, label, require_current)
            require_current()
            await self._http.send("/end_weight_update", {})
        except (StreamRLError, asyncio.CancelledError):
            await self._leave()
            raise
        require_current()
        on_loaded()
        await self._http.send("/continue_generation", {})
        return time.perf_counter() - start

    async def close(self) -> None:
        """Leave the group. Waits until SGLang has left it, or does not answer."""
        await self._leave()
        self._transfer.close()

    def _stage(self, update: WeightUpdate) -> None:
        self._staged.fill(update.manifest, self._transfer.tensors(update))

    async def _form(self) -> RelayGroup:
        """Form a group. Waits for all ranks; a timeout or a refusal ends the wait."""
        name = f"streamrl-{uuid.uuid4().hex[:12]}"
        world_size = 1 + self._settings.tp_size
        request = InitWeightsUpdateGroupReqInput(
            master_address=self._store.host,
            master_port=self._store.port,
            rank_offset=1,
            world_size=world_size,
            group_name=name,
            backend="gloo",
        )
        joining = asyncio.to_thread(
            self._store.join, prefix_of(name), world_size, "gloo", self._timeout_s
        )
        path = "/init_weights_update_group"
        group, _ = await asyncio.gather(joining, self._http.send(path, request))
        return RelayGroup(name, group)

    async def _broadcast(
        self, membership: RelayGroup, label: str, require_current: Callable[[], None]
    ) -> None:
        buckets = list(buckets_of(self._staged, self._bucket_bytes))
        for i, bucket in enumerate(buckets):
            require_current()
            is_last = i == len(buckets) - 1
            body = UpdateWeightsFromDistributedReqInput(
                names=[tensor_name for tensor_name, _ in bucket],
                dtypes=[dtype_name(tensor.dtype) for _, tensor in bucket],
                shapes=[tuple(tensor.shape) for _, tensor in bucket],
                group_name=membership.name,
                load_format="flattened_bucket",
                # SGLang cannot flush its cache while requests are in flight: it answers 400.
                flush_cache=is_last and not self._settings.keeps_old_kv,
                weight_version=label if is_last else None,
            )
            flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])
            sending = asyncio.create_task(asyncio.to_thread(membership.group.broadcast, flat))
            try:
                path = "/update_weights_from_distributed"
                await asyncio.gather(sending, self._http.send(path, body))
            except (StreamRLError, asyncio.CancelledError):
                # SGLang does not receive a bucket that it refuses: the broadcast ends only with the
                # group.
                await self._dissolve(membership)
                await asyncio.wait([sending])
                raise

    async def _leave(self) -> None:
        membership, self._membership = self._membership, None
        if membership is not None:
            await self._dissolve(membership)
            await asyncio.to_thread(membership.group.close)

    async def _dissolve(self, membership: RelayGroup) -> None:
        """Make SGLang leave the group, if it answers and has not left."""
        body = DestroyWeightsUpdateGroupReqInput(group_name=membership.name)
        with contextlib.suppress(StreamRLError):
            await self._http.send("/destroy_weights_update_group", body, timeout_s=self._timeout_s)


def prefix_of(group_name: str) -> str:
    """The prefix of the keys in our store for a gloo group that SGLang joins under this name.

    SGLang adds a prefix of its own to the two of torch.distributed; a `PrefixStore` joins prefix
    and key with a slash.
    """
    return f"{group_name}/{group_name}//cpu/"


def buckets_of(tensors: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """Yield the tensors of each broadcast, wide element types first: SGLang's views need
    alignment."""
    bucket: list[NamedTensor] = []
    for name, tensor in sorted(tensors, key=lambda named: -named[1].element_size()):
        if bucket and sum(t.nbytes for _, t in bucket) + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket = []
        bucket.append((name, tensor))
    if bucket:
        yield bucket
