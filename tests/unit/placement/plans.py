"""Configurations and hosts as the tests of this folder have them."""

from typing import Any

from streamrl.config import RunConfig
from streamrl.placement.plan import Device, Host

GIB = 2**30


def gpus(count: int, gib: float = 0) -> tuple[Device, ...]:
    return tuple(Device(index, int(gib * GIB)) for index in range(count))


def one_host(count: int, gib: float = 0, **fields: Any) -> tuple[Host, ...]:
    """This machine with so many GPUs."""
    return (Host("here", "127.0.0.1", gpus(count, gib), 16, **fields),)


def several(*counts: int, gib: float = 0) -> tuple[Host, ...]:
    """Hosts a, b, ... at 10.0.0.1, ... with so many GPUs each."""
    return tuple(
        Host(f"host-{i}", f"10.0.0.{i + 1}", gpus(count, gib), 16) for i, count in enumerate(counts)
    )


def configured(**sections: Any) -> RunConfig:
    given = {"run": {"name": "x"}, "model": {"path": "no-such-model"}, "data": {"source": "chain"}}
    return RunConfig.model_validate({**given, "buffer": {"curve": "keys"}, **sections})
