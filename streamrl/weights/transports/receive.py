"""The receiving end of every transport, by the update's endpoint.

Invariant: a receiver has either yielded every tensor of the manifest, or has raised; loading is up
to the caller, who keeps the old weights until the last tensor has arrived.
"""

from collections.abc import Iterator

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
from streamrl.weights.transports.differences import ReceivedVersion
from streamrl.weights.transports.files import FileReader, version_name
from streamrl.weights.transports.shared_memory import SharedReader


class TransferReceiver:
    """In the process that has the model; one call at a time, in any thread."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        last = ReceivedVersion()
        self._broadcast = BroadcastReceiver(torch.device(device), last)
        self._files = FileReader(last)
        self._shared = SharedReader()

    def tensors(
        self, update: WeightUpdate, landing: torch.Tensor | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the manifest by name; each is read-only, and valid until the next one.

        `landing` [num_bytes of the manifest's layout] uint8, zeros at first, lets them be received
        in place: tensors inside it are valid until it is passed again. What arrives on another
        device or has to be decoded is in other memory all the same.

        Raises:
            WeightTransferError: the sender or a peer is gone, or something is not as it was sent,
                which may be known after the last tensor only.
        """
        name = version_name(update.learner_id, update.policy_version)
        match update.endpoint:
            case BroadcastEndpoint() as endpoint:
                layout = Layout(update.manifest, endpoint.bucket_bytes)
                yield from self._broadcast.tensors(endpoint, layout, name, landing, update.key)
            case FilesEndpoint() as endpoint:
                yield from self._files.tensors(endpoint, update.manifest, name, landing, update.key)
            case SharedEndpoint() as endpoint:
                layout = Layout(update.manifest, endpoint.bucket_bytes)
                yield from self._shared.tensors(endpoint, layout, landing, update.key)
            case HeldEndpoint():
                raise WeightTransferError("the update has no tensors")

    def close(self) -> None:
        self._broadcast.close()
        self._shared.close()
