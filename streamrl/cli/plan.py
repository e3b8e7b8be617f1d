"""`streamrl plan`: what a launch would start, on which hosts, GPUs and ports. Starts nothing.

`streamrl check` says whether it fits.

Invariant: what is printed is what a launch starts, except for ports given as 0 on one machine,
which are chosen at the start. It is text for a person, or JSON for a program.
"""

import argparse
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from streamrl.config.loading.load import configuration
from streamrl.placement.hosts import this_machine
from streamrl.placement.make_plan import make_plan
from streamrl.placement.plan import Device, Host, Plan, gib


def tables(plan: Plan) -> Iterator[str]:
    """Yield lines for each host: its hardware, and each process with its devices and command.

    A command has its own line, so that it can be copied.
    """
    yield f"{plan.config_file}: buffer.url {plan.config.buffer.url}, weights.address " + (
        plan.config.weights.address
    )
    for host in plan.hosts:
        yield f"\n{_described(host)}"
        processes = plan.on(host.name)
        if not processes:
            yield "  nothing"
        for process in processes:
            ranks = f", {process.num_ranks} ranks" if process.num_ranks > 1 else ""
            devices = ", ".join(map(str, process.devices))
            plural = "s" if len(process.devices) > 1 else ""
            yield f"  {process.name:<14}{f'GPU{plural} {devices}' if devices else 'CPU'}{ranks}"
            variables = (f"{name}={shlex.quote(v)}" for name, v in process.environment.items())
            yield f"    {' '.join((*variables, shlex.join(process.command)))}"


def as_json(plan: Plan) -> str:
    """Processes with everything that a launcher needs to start them; addresses and hosts."""
    content = {
        "config_file": str(plan.config_file),
        "buffer_url": plan.config.buffer.url,
        "weights_address": plan.config.weights.address,
        "hosts": plan.hosts,
        "processes": plan.processes,
    }
    return json.dumps(msgspec.to_builtins(content), indent=2)


def _described(host: Host) -> str:
    place = "" if host.name == host.address or host.name == "here" else f" at {host.address}"
    sizes = [gib(d.memory_bytes) if d.memory_bytes else "unknown memory" for d in host.devices]
    devices = [f"GPU {d.index} of {size}" for d, size in zip(host.devices, sizes, strict=True)]
    has = ", ".join(devices) if host.is_counted else "GPUs that are not counted"
    cores = f"{host.num_cores} cores" if host.num_cores else "cores not known"
    return f"{host.name}{place}: {has or 'no GPU'}, {cores}"


def main(arguments: argparse.Namespace) -> int:
    config, host = configuration(arguments).config, this_machine()
    if arguments.gpus is not None:
        like = next(iter(host.devices), Device(0))
        numbers = range(arguments.gpus)
        devices = tuple(replace(like, index=i, visible_as=str(i)) for i in numbers)
        host = replace(host, devices=devices, is_counted=True)
    print_plan(make_plan(config, [host]), is_json=arguments.json)
    return 0


def print_plan(plan: Plan, *, is_json: bool = False) -> None:
    print(as_json(plan) if is_json else "\n".join(tables(plan)))
