"""The learner's end of the weight protocol: it keeps every live receiver at the newest version.

Nobody waits for a slow receiver: the learner copies its parameters into a send buffer and goes on,
a round (`streamrl.weights.rounds`) is for those that answer in time, and one that misses it is in
the next one.

Waits for a published version or a Hello; each starts a round if some receiver is outdated.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from streamrl.config.weights import WeightSettings
from streamrl.types import ValidationReport, ValidatorStatus
from streamrl.weights.layout import Layout
from streamrl.weights.rounds import Rounds
from streamrl.weights.send_buffers import SendBuffers


class WeightSender:
    """Runs in the learner's event loop; only `snapshot` is called in the training thread.

    `folder` is for files, `device` is where the parameters are, and `curve` the folder of the keys.
    `learner_id` is new for every learner process, whose versions it distinguishes from others of
    the same number; "" makes one up.
    """

    def __init__(
        self,
        settings: WeightSettings,
        layout: Layout,
        device: torch.device,
        folder: Path,
        curve: Path | None = None,
        learner_id: str = "",
    ) -> None:
        self._changed = asyncio.Event()
        self._buffers = SendBuffers(layout, device)
        learner_id = learner_id or uuid.uuid4().hex[:12]
        asked = self._changed.set
        self._rounds = Rounds(settings, self._buffers, device, folder, asked, curve, learner_id)
        self._snapshot_s: float | None = None
        self.address = self._rounds.socket.address

    def snapshot(self, parameters: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Copy the parameters into a send buffer; the caller must not change them meanwhile."""
        start = time.perf_counter()
        self._buffers.write(parameters, policy_version)
        self._snapshot_s = time.perf_counter() - start

    def publish(self) -> None:
        """From now on the newest snapshot is the version that receivers should have."""
        self._changed.set()

    def handle_reports(self, on_report: Callable[[ValidationReport], None]) -> None:
        """Call it with each report of a validation of this learner's versions, again with each
        Hello of the validator."""
        self._rounds.on_report = on_report

    def send_last(self) -> None:
        """The newest snapshot is the last version of the run, which validators get in any case."""
        self._rounds.send_last()

    def validators(self) -> dict[str, ValidatorStatus]:
        """What each validator that is alive does, by its name."""
        return self._rounds.validators()

    def validating(self) -> dict[int, ValidatorStatus]:
        """The versions of this learner that are being validated."""
        return self._rounds.validating()

    def gauges(self) -> dict[str, float]:
        """Seconds of the last snapshot, and the gauges of `Rounds`."""
        snapshot = {} if self._snapshot_s is None else {"snapshot_s": self._snapshot_s}
        return {**snapshot, **self._rounds.gauges()}

    def behind(self) -> tuple[str, ...]:
        """Receivers that have not answered the last message to them, late already or not."""
        return self._rounds.behind()

    def left_out(self) -> tuple[str, ...]:
        """A sentence for each receiver that updates do not reach, or not in time."""
        return self._rounds.left_out()

    async def run(self) -> None:
        """Until cancelled: handle the receivers' messages, and send them the published version."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._rounds.socket.receive())
            tasks.create_task(self._run_rounds(tasks))

    def close(self) -> None:
        self._rounds.close()

    async def _run_rounds(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            with self._buffers.reading() as held:
                if held is not None:
                    await self._rounds.run(held, tasks)
