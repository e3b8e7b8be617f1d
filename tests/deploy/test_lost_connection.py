"""A connection that a firewall has forgotten: nothing of it arrives, and nobody is told."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from buffers.zmq.client import ZmqBuffer
from tests.contract.test_zmq import zmq_server

DEADLINE_S = 100.0


def forget_connections(port: str) -> None:
    """Drop what comes from the other ends of the connections to this port."""
    listed = subprocess.run(["ss", "-tnH"], capture_output=True, text=True, check=True).stdout
    places = (place for line in listed.splitlines() for place in line.split()[3:5])
    for other in {place.rpartition(":")[2] for place in places} - {port}:
        rule = ["-p", "tcp", "--sport", other, "-j", "DROP"]
        subprocess.run(["iptables", "-A", "INPUT", *rule], check=True)


async def ask(folder: Path) -> None:
    """In a network of its own."""
    with zmq_server(folder) as server:
        buffer = ZmqBuffer(server.url, deadline_s=DEADLINE_S)
        await buffer.attach(0, None)
        forget_connections(server.url.rpartition(":")[2])
        await buffer.stats()
        await buffer.close()


def test_a_connection_that_is_lost_without_a_word_is_made_anew(tmp_path: Path):
    lacking = [tool for tool in ("ip", "iptables", "ss", "unshare") if shutil.which(tool) is None]
    if os.geteuid() or lacking:
        pytest.skip(f"needs root and {', '.join(lacking) or 'namespaces'}")
    program = [sys.executable, "-m", "tests.deploy.test_lost_connection", str(tmp_path)]
    command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *program]
    subprocess.run(command, check=True, timeout=2 * DEADLINE_S)


if __name__ == "__main__":
    asyncio.run(ask(Path(sys.argv[1])))
