"""Receives weights inside a vLLM worker: StreamRL's backend for vLLM's weight transfer, driven by
`actors.engines.vllm.weights`.

Invariant: the model's weights change only in `finish_weight_update`, and only if every tensor of
the update has arrived. Sampling goes on while the update arrives.
"""

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import torch
import zmq
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from actors.engines.updates import StagedWeights
from actors.engines.vllm.weights import WorkerReport
from streamrl.curve import use_key
from streamrl.errors import WeightTransferError
from streamrl.types import BroadcastEndpoint, WeightUpdate, replace
from streamrl.weights.transports.receive import TransferReceiver

log = logging.getLogger(__name__)
# vLLM warns at each update about modules that have buffers and nothing to load. The manifest
# already ensures that no parameter is missing.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty, since groups are joined for each update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`update` is a `WeightUpdate` as JSON; "" discards what was received. The report goes to
    `report_to`, a ZeroMQ PULL socket that accepts reports from holders of `report_key`."""

    attempt: int
    update: str = ""
    report_to: str = ""
    report_key: str = ""


class WorkerReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker; vLLM calls every method in the worker's main thread."""

    init_info_cls: ClassVar[type[InitInfo]] = InitInfo
    update_info_cls: ClassVar[type[UpdateInfo]] = UpdateInfo
    supports_draft_weight_update = False
    # Tells vLLM that update_weights may return before the weights are in the model.
    defers_processing = True

    _thread: threading.Thread | None = None
    _is_complete = _is_discarded = False
    _transfer: TransferReceiver | None = None
    _socket: "zmq.Socket[bytes] | None" = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do; see InitInfo."""

    def start_weight_update(self) -> None:
        self.drain_pending()
        self._is_complete = self._is_discarded = False

    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive in a thread, which reports the result; or discard what was received."""
        self.drain_pending()
        self._is_complete, self._is_discarded = False, not update_info.update
        if update_info.update:
            self._thread = threading.Thread(
                target=self._receive, args=(update_info,), name="weights", daemon=True
            )
            self._thread.start()

    def drain_pending(self) -> None:
        """Wait for the receiving thread, at most for the transfer's timeouts."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish_weight_update(self) -> None:
        """Load what was received. If that was discarded, do nothing; vLLM need not be paused then.

        Raises:
            WeightTransferError: there is no complete update (already loaded, or another generator
                has begun one), or vLLM does not take all of it.
        """
        self.drain_pending()
        if self._is_discarded:
            return
        if not self._is_complete:
            raise WeightTransferError("there is no complete update to load")
        self._is_complete = False
        initialize_layerwise_reload(self.model)
        on_device = ((name, tensor.to(self.device)) for name, tensor in self._staged)
        require_kept(self.model, self.model.load_weights(on_device) or ())
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self._transfer is not None:
            self._transfer.close()

    # The receiving thread.

    def _receive(self, info: UpdateInfo) -> None:
        error = ""
        try:
            self._stage(msgspec.json.decode(info.update, type=WeightUpdate))
            self._is_complete = True
        except WeightTransferError as reason:
            error = str(reason)
        except Exception as reason:
            log.exception("weights not received")
            error = f"{type(reason).__name__}: {reason}"
        self._send(info, WorkerReport(info.attempt, error))

    def _send(self, info: UpdateInfo, report: WorkerReport) -> None:
        """Send a report. The socket is kept until the next report: closing it would drop what a
        busy reader has not read yet."""
        if self._socket is not None:
            self._socket.close()
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        use_key(self._socket, info.report_key)
        self._socket.connect(info.report_to)
        self._socket.send(msgspec.json.encode(report))

    def _stage(self, update: WeightUpdate) -> None:
        if self._transfer is None:
            self._transfer = TransferReceiver(self.device)
            self._staged = StagedWeights(
                self.model_config.model,
                trust_remote_code=self.model_config.trust_remote_code,
                is_pinned=self.device.type == "cuda",
            )
        received = self._transfer.tensors(self._as_this_worker(update))
        self._staged.fill(update.manifest, received)

    def _as_this_worker(self, update: WeightUpdate) -> WeightUpdate:
        """The update with this worker's rank: the endpoint names the rank of the engine's first
        worker, and the others follow it."""
        endpoint = update.endpoint
        if not isinstance(endpoint, BroadcastEndpoint):
            return update
        parallel = self.parallel_config
        offset = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return replace(update, endpoint=replace(endpoint, rank=endpoint.rank + offset))


def require_kept(model: torch.nn.Module, loaded: Collection[str]) -> None:
    """Check that no parameter is lost in a reload. Call it between the two halves of the reload,
    while parameters are on the meta device: they keep what comes by their `weight_loader`, and lose
    what a model copies into them in other ways.

    Args:
        loaded: names of the parameters that the model reports as loaded.

    Raises:
        WeightTransferError: a parameter would keep its old value.
    """
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            continue  # All of its parameters have come.
        lost = info.restore_metadata[0].keys() - {name for name, _ in info.loaded_weights}
        for name in sorted(lost):
            if f"{prefix}.{name}".removeprefix(".") in loaded:
                raise WeightTransferError(
                    f"vLLM's {type(model).__name__} loads {prefix}.{name} at its start and in no "
                    "update: use generator.engine hf"
                )
