"""A generator's side of the buffer as processes of their own: lease and put until the run is over.

    python tests/contract/buffer_client.py URL NAME...

They are forks of one process that has made the imports; its exit code is the first that is not 0.
"""

import asyncio
import os
import sys

import numpy as np

from buffers.connect import connect
from streamrl.types import FinishReason, Lease, Trajectory, TrajectoryGroup
from tests.contract.limits_config import limits_config


async def generate(url: str, name: str) -> None:
    """Waits for admission, a second at a time, and looks then whether the run has ended."""
    buffer = connect(limits_config(url))
    number = 0
    while True:
        number += 1
        leases = await buffer.lease([f"{name}/{number}"], name, 1.0)
        for lease in leases:
            await buffer.put(lease.lease_id, group_of(lease))
        if not leases and (await buffer.stats()).finished:
            break
    await buffer.close()


def group_of(lease: Lease) -> TrajectoryGroup:
    trajectory = Trajectory(
        token_ids=np.arange(8, dtype=np.int32),
        response_mask=np.ones(8, np.bool_),
        behavior_logprobs=np.full(8, -0.5, np.float32),
        policy_versions=np.full(8, lease.min_policy_version, np.int32),
        reward=1.0,
        finish_reason=FinishReason.STOP,
    )
    return TrajectoryGroup(
        group_id=lease.lease_id,
        prompt_index=lease.prompt_index,
        environment="test",
        trajectories=(trajectory,),
    )


def fork(url: str, name: str) -> int:
    """The id of the process that generates."""
    if child := os.fork():
        return child
    asyncio.run(generate(url, name))
    os._exit(0)


def main(url: str, *names: str) -> int:
    children = [fork(url, name) for name in names]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
