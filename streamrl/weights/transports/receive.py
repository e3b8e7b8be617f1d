"""The receiving end of every transport; the update's endpoint says which one.

Invariant: it yields every tensor of the manifest, or raises. The caller keeps the old weights until
the last tensor has arrived.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from streamrl.errors import WeightTransferError
from streamrl.types import (
    BroadcastEndpoint,
    FilesEndpoint,
    HeldEndpoint,
    SharedEndpoint,
    WeightUpdate,
)
from streamrl.weights.layout import Layout
from streamrl.weights.transports.broadcast import BroadcastReceiver
from streamrl.weights.transports.differences import Difference
from streamrl.weights.transports.files import is_delta, read_delta, read_whole, version_name
from streamrl.weights.transports.shared_memory import SharedReader
from streamrl.weights.transports.tensor_file import TensorFile

Tensors: TypeAlias = Iterator[tuple[str, torch.Tensor]]


class TransferReceiver:
    """Receives in the process that has the model; one call at a time, in any thread."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._broadcast = BroadcastReceiver(torch.device(device))
        self._shared = SharedReader()
        self._kept: tuple[str, torch.Tensor] | None = None
        """Name and bytes of the last version, kept if the next may be a difference to it."""

    def tensors(self, update: WeightUpdate, landing: torch.Tensor | None = None) -> Tensors:
        """Every tensor of the manifest by name; each is read-only, and valid until the next one.

        `landing` [num_bytes of the manifest's layout] uint8, initially zeros, allows receiving in
        place: tensors inside it stay valid until it is passed again. Tensors that arrive on another
        device, or must be decoded, are in other memory anyway.

        Raises:
            WeightTransferError: the sender or a peer is gone, or data differs from what was sent,
                which may be known only after the last tensor.
        """
        endpoint, key = update.endpoint, update.key
        if isinstance(endpoint, HeldEndpoint):
            raise WeightTransferError("the update has no tensors")
        layout = Layout(update.manifest, endpoint.bucket_bytes)
        match endpoint:
            case SharedEndpoint():
                yield from self._shared.tensors(endpoint, layout, landing, key)
            case BroadcastEndpoint():
                # Receive all of it before using it, so that failing to use it breaks no broadcast.
                difference = self._broadcast.difference(endpoint)
                whole = partial(self._broadcast.tensors, endpoint, layout, key)
                yield from self._follow(update, endpoint, layout, landing, difference, whole)
            case FilesEndpoint():
                with TensorFile(Path(endpoint.path)) as file:
                    difference = read_delta(file, layout) if is_delta(file) else None
                    whole = partial(read_whole, file, layout, key)
                    yield from self._follow(update, endpoint, layout, landing, difference, whole)

    def close(self) -> None:
        self._broadcast.close()
        self._shared.close()

    def _follow(
        self,
        update: WeightUpdate,
        endpoint: BroadcastEndpoint | FilesEndpoint,
        layout: Layout,
        landing: torch.Tensor | None,
        difference: Difference | None,
        whole: Callable[[torch.Tensor | None], Tensors],
    ) -> Tensors:
        """The version that the difference makes of the kept one, or the `whole` version. It is kept
        once complete, if the next one may be a difference to it."""
        kept, self._kept = self._kept, None
        on_host = landing if landing is not None and landing.device.type == "cpu" else None
        if difference is not None:
            source = "the broadcast" if isinstance(endpoint, BroadcastEndpoint) else endpoint.path
            if kept is None or kept[0] != difference.base:
                has = kept[0] if kept else "nothing"
                raise WeightTransferError(
                    f"cannot read weights from {source}: it changes {difference.base}, but here is "
                    f"{has}"
                )
            data = kept[1] if on_host is None else on_host
            difference.apply(layout, kept[1], data, update.key, source)
            yield from layout.views(data)
        elif endpoint.is_base:
            kept = None  # Its memory is free before the next one is made.
            size = layout.num_bytes
            data = torch.zeros(size, dtype=torch.uint8) if on_host is None else on_host
            yield from whole(data)
        else:
            yield from whole(landing)
            return
        self._kept = (version_name(update.learner_id, update.policy_version), data)
