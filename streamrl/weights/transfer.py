"""One update's bytes, both ends: a broadcast in buckets, or a safetensors file.

Invariant: a receiver either has yielded every tensor of the manifest, or has raised; loading is up
to the caller, who keeps the old weights until the last tensor is there.
"""

import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from streamrl.config.sections import WeightSettings
from streamrl.errors import WeightTransferError
from streamrl.types import BroadcastEndpoint, FilesEndpoint, TensorSpec, WeightUpdate
from streamrl.weights import groups
from streamrl.weights.layout import Layout


class BroadcastSender:
    """The sending end of broadcasts: rank 0 of a group that is formed anew when members change."""

    def __init__(self, settings: WeightSettings, host: str, device: torch.device) -> None:
        self._settings = settings
        self._host = host
        self._device = device
        self._timeout_s = settings.deadline_s / 4
        self._store: groups.Store | None = None
        self._members: tuple[str, ...] = ()
        self._group: groups.Group | None = None
        self._name = ""

    def endpoints(self, members: Mapping[str, int], backend: str) -> dict[str, BroadcastEndpoint]:
        """Where each member (name to number of ranks) is to join before `send` is called."""
        if self._store is None:
            self._store = groups.Store(self._host, self._timeout_s)
        if self._group is None or self._members != tuple(members):
            self.close()
            self._members = tuple(members)
            self._name = uuid.uuid4().hex
        first_ranks = itertools.accumulate(members.values(), initial=1)
        return {
            member: BroadcastEndpoint(
                host=self._host,
                port=self._store.port,
                group=self._name,
                rank=rank,
                world_size=1 + sum(members.values()),
                backend=backend,
                bucket_bytes=self._settings.bucket_bytes,
                timeout_s=self._timeout_s,
            )
            for member, rank in zip(members, first_ranks, strict=False)
        }

    def send(self, endpoint: BroadcastEndpoint, layout: Layout, data: torch.Tensor) -> None:
        """Broadcast `data` [layout.num_bytes] uint8; waits for the members of the endpoint's group.

        Raises:
            WeightTransferError: a member is gone or too slow; the next update forms a new group.
        """
        assert self._store is not None, "endpoints() comes first"
        device = torch.device("cpu") if endpoint.backend == "gloo" else self._device
        try:
            if self._group is None:
                self._group = self._store.join(
                    endpoint.group, endpoint.world_size, endpoint.backend, self._timeout_s
                )
            for bucket in layout.buckets:
                self._group.broadcast(data[bucket.start : bucket.stop].to(device))
        except WeightTransferError:
            self.close()
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def write_file(path: Path, layout: Layout, data: torch.Tensor) -> None:
    """The same bytes as a safetensors file, complete or absent under its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    tensors = {
        name: tensor
        for bucket in layout.buckets
        for name, tensor in bucket.views(data[bucket.start : bucket.stop])
    }
    save_file(tensors, unfinished)
    unfinished.replace(path)


class TransferReceiver:
    """The receiving end, in the process that holds the model; one call at a time, in any thread.

    Keeps the group of the last broadcast, since membership seldom changes between two updates.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._group: tuple[str, groups.Group] | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def tensors(self, update: WeightUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the manifest by name; each is valid until the next one is asked for.

        Raises:
            WeightTransferError: the sender or a peer is gone, or the file does not match.
        """
        match update.endpoint:
            case BroadcastEndpoint() as endpoint:
                yield from self._broadcast(endpoint, Layout(update.manifest, endpoint.bucket_bytes))
            case FilesEndpoint() as endpoint:
                yield from self._file(Path(endpoint.path), update.manifest)

    def close(self) -> None:
        if self._group is not None:
            self._group[1].close()
            self._group = None

    def _broadcast(
        self, endpoint: BroadcastEndpoint, layout: Layout
    ) -> Iterator[tuple[str, torch.Tensor]]:
        group = self._join(endpoint)
        try:
            for bucket in layout.buckets:
                data = self._reserve(bucket.stop - bucket.start, endpoint.backend)
                group.broadcast(data)
                yield from bucket.views(data)
        except WeightTransferError:
            self.close()
            raise

    def _join(self, endpoint: BroadcastEndpoint) -> groups.Group:
        if self._group is None or self._group[0] != endpoint.group:
            self.close()
            group = groups.join(
                endpoint.host,
                endpoint.port,
                endpoint.group,
                endpoint.rank,
                endpoint.world_size,
                endpoint.backend,
                endpoint.timeout_s,
            )
            self._group = (endpoint.group, group)
        return self._group[1]

    def _reserve(self, num_bytes: int, backend: str) -> torch.Tensor:
        device = torch.device("cpu") if backend == "gloo" else self._device
        if len(self._scratch) < num_bytes or self._scratch.device != device:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._scratch[:num_bytes]

    def _file(
        self, path: Path, manifest: Iterable[TensorSpec]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            with safe_open(path, framework="pt", device=str(self._device)) as file:
                for spec in manifest:
                    yield spec.name, file.get_tensor(spec.name)
        except (OSError, ValueError, KeyError) as error:
            raise WeightTransferError(
                f"cannot read weights from {path}: {error}; transport `files` needs a file system "
                "that learner and generators share"
            ) from error
