"""Weights between processes of one GPU, through a learner's endpoints; and over NCCL."""

import asyncio
import multiprocessing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from streamrl.config.weights import WeightSettings  # noqa: E402
from streamrl.types import LoadReport, WeightUpdate  # noqa: E402
from streamrl.weights.layout import Layout, manifest_of  # noqa: E402
from streamrl.weights.locality import locality_of  # noqa: E402
from streamrl.weights.receiver import WeightReceiver  # noqa: E402
from streamrl.weights.sender import WeightSender  # noqa: E402
from streamrl.weights.transports.receive import TransferReceiver  # noqa: E402
from tests.waiting import until as waiting_until  # noqa: E402

SHAPES = {"embed": (500, 64), "head": (64, 500), "norm": (64,)}
BUCKET_BYTES = 70_000
WAIT_S = 120.0


def parameters(value: float, device: str) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value, device=device) for name, shape in SHAPES.items()}


def receive(address: str, name: str, device: str, pipe: Connection) -> None:
    """A generator's process, until it is killed: sends version, route and whether all was right."""
    transfer = TransferReceiver(device)
    layout = Layout(manifest_of(parameters(0.0, "cpu")), BUCKET_BYTES)
    landing = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)

    async def load(update: WeightUpdate) -> LoadReport:
        # By turns in place and, as vLLM's workers do, into host memory.
        is_odd = update.policy_version % 2
        tensors = transfer.tensors(update, landing if is_odd else None)
        own = {n: tensor if is_odd else tensor.to("cpu", copy=True) for n, tensor in tensors}
        value = float(update.policy_version)
        is_right = own.keys() == SHAPES.keys() and all((t == value).all() for t in own.values())
        route = getattr(update.endpoint, "backend", "shared")
        pipe.send((update.policy_version, route, bool(is_right)))
        return LoadReport(transfer_s=0.0, pause_s=0.0)

    receiver = WeightReceiver(address, name, load, locality=locality_of(device))
    asyncio.run(receiver.run())


until = partial(waiting_until, deadline_s=WAIT_S)


async def loads_of(folder: Path, devices: list[str], **settings: object) -> list[list[object]]:
    """What each receiver reports of versions 1 to 4, which the learner sends from the first GPU."""
    chosen = {"address": "tcp://127.0.0.1:0", "bucket_bytes": BUCKET_BYTES, **settings}
    layout = Layout(manifest_of(parameters(0.0, "cpu")), BUCKET_BYTES)
    learner = torch.device("cuda:0")
    sender = WeightSender(WeightSettings.model_validate(chosen), layout, learner, folder)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number, device in enumerate(devices):
        ours, theirs = context.Pipe()
        arguments = (sender.address, str(number), device, theirs)
        processes.append(context.Process(target=receive, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    running = asyncio.create_task(sender.run())
    try:
        await until(lambda: sender.gauges()["num_receivers"] == len(devices))
        reports: list[list[object]] = [[] for _ in devices]
        for version in range(1, 5):
            sender.snapshot(parameters(float(version), "cuda:0"), version)
            sender.publish()
            for lines, pipe in zip(reports, pipes, strict=True):
                await until(pipe.poll)
                lines.append(pipe.recv())
        return reports
    finally:
        running.cancel()
        await asyncio.wait([running])
        for process in processes:
            process.kill()
            process.join()
        sender.close()


@pytest.mark.parametrize("verify", [False, True], ids=["", "verify"])
async def test_two_processes_read_a_learners_buffers_on_the_same_gpu(tmp_path, verify):
    reports = await loads_of(tmp_path, ["cuda:0", "cuda:0"], verify=verify)
    assert reports == [[(version, "shared", True) for version in range(1, 5)]] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_a_process_on_another_gpu_gets_nccl_beside_one_that_shares(tmp_path):
    reports = await loads_of(tmp_path, ["cuda:0", "cuda:1"])
    assert reports[0] == [(version, "shared", True) for version in range(1, 5)]
    assert reports[1] == [(version, "nccl", True) for version in range(1, 5)]
