"""Processes in namespaces of their own, as containers are: who shares memory, and who does not."""

import shutil
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch

from streamrl.types import Locality, SharedEndpoint
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.locality import can_share, locality_of
from streamrl.weights.transports.shared_memory import SendBuffers

LAYOUT = Layout(manifest_of({"w": torch.zeros(1000)}), 600)
# Reads the endpoint as a receiver does, after it has said where it is.
RECEIVER = """
import sys
import msgspec, torch
from streamrl.errors import WeightTransferError
from streamrl.types import SharedEndpoint
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.locality import locality_of
from streamrl.weights.transports.shared_memory import SharedReader
endpoint = msgspec.json.decode(sys.stdin.buffer.read(), type=SharedEndpoint)
layout = Layout(manifest_of({"w": torch.zeros(1000)}), 600)
try:
    weights = {n: t.clone() for n, t in SharedReader().tensors(endpoint, layout, None, b"k" * 40)}
    outcome = "read" if bool((weights["w"] == 3.0).all()) else "other bytes"
except WeightTransferError as error:
    outcome = str(error)
print(msgspec.json.encode([locality_of("cpu"), outcome]).decode())
"""
PROCESSES = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--ipc", "--net", "--uts")
OWN_MEMORY = (*PROCESSES, "--mount", "sh", "-c", 'mount -t tmpfs shm /dev/shm && exec "$@"', "sh")


@pytest.fixture
def endpoint() -> Iterator[SharedEndpoint]:
    buffers = SendBuffers(LAYOUT, "cpu")
    buffers.write({"w": torch.full((1000,), 3.0)}, 1)
    with buffers.reading() as held:
        assert held is not None
        yield buffers.endpoint(held, None)


def receive(namespaces: tuple[str, ...], endpoint: SharedEndpoint) -> tuple[Locality, str]:
    """Where the process in these namespaces is, and what it got."""
    if not shutil.which("unshare") or subprocess.run([*namespaces, "true"]).returncode:
        pytest.skip("this system does not let the test make namespaces (unshare)")
    done = subprocess.run(
        [*namespaces, sys.executable, "-c", RECEIVER],
        input=msgspec.json.encode(endpoint),
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    return msgspec.json.decode(done.stdout, type=tuple[Locality, str])


def test_a_container_with_our_shared_memory_is_on_this_host_and_reads_it(endpoint):
    locality, outcome = receive(PROCESSES, endpoint)
    assert can_share(locality_of("cpu"), locality)
    assert outcome == "read"


def test_a_container_with_shared_memory_of_its_own_is_elsewhere_and_cannot_read(endpoint):
    locality, outcome = receive(OWN_MEMORY, endpoint)
    assert locality.host
    assert not can_share(locality_of("cpu"), locality)
    assert "cannot be opened here" in outcome
