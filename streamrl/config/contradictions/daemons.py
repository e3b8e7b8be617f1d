"""Devices, ports and keys of the daemons, and the versions that pass between them.

Each function returns a sentence that names both settings, or None.
"""

from typing import TYPE_CHECKING

from streamrl.config.addresses import host_of, is_loopback, port_of

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig


def weights_too_rare(c: "RunConfig") -> str | None:
    if c.weights.publish_every <= c.buffer.max_staleness + 1:
        return None
    return (
        f"weights.publish_every {c.weights.publish_every} with buffer.max_staleness "
        f"{c.buffer.max_staleness} would deadlock: generators would wait for a version that is not "
        f"published; publish_every may be at most {c.buffer.max_staleness + 1}"
    )


def images_to_a_server(c: "RunConfig") -> str | None:
    columns = [name for name in ("image_key", "video_key") if getattr(c.data, name) is not None]
    engine = "sglang" if c.generator.engine == "sglang" else "vllm.url"
    is_served = engine == "sglang" or (c.generator.engine == "vllm" and c.generator.vllm.url)
    if not columns or not is_served:
        return None
    return (
        f"data.{columns[0]} with generator.{engine}: a server samples from token ids alone; use "
        "generator.engine hf, or vllm without a URL"
    )


def videos_to_vllm(c: "RunConfig") -> str | None:
    if c.data.video_key is None or c.generator.engine != "vllm":
        return None
    return (
        "data.video_key with generator.engine vllm, which cuts videos into frames of its own: use "
        "generator.engine hf"
    )


def nccl_without_gpu(c: "RunConfig") -> str | None:
    on_cpu = [
        f"{owner}.device"
        for owner, device in (("learner", c.learner.device), ("generator", c.generator.device))
        if device == "cpu"
    ]
    if c.weights.backend != "nccl" or not on_cpu:
        return None
    return f"weights.backend nccl needs GPUs at both ends, but {on_cpu[0]} is cpu"


def shared_between_gpu_and_cpu(c: "RunConfig") -> str | None:
    crosses = c.learner.device.startswith("cuda") and c.generator.device == "cpu"
    if c.weights.backend != "shared" or not crosses:
        return None
    return (
        "weights.backend shared needs generators on the learner's GPU, but learner.device is "
        f"{c.learner.device} and generator.device is cpu; auto, or gloo, crosses"
    )


def weights_without_keys(c: "RunConfig") -> str | None:
    if c.buffer.curve is not None or is_loopback(c.weights.address):
        return None
    return (
        f"weights.address: was {c.weights.address!r}, which other machines can reach; that needs "
        "keys: make them with `streamrl keys new FOLDER` and set buffer.curve to FOLDER"
    )


def one_address(c: "RunConfig") -> str | None:
    buffer, weights = c.buffer.url, c.weights.address
    if not c.buffer.has_daemon or not 0 < port_of(buffer) == port_of(weights):
        return None
    if host_of(buffer) != host_of(weights) and not (is_loopback(buffer) and is_loopback(weights)):
        return None
    return (
        f"buffer.url {buffer} and weights.address {weights} are one port, where the buffer and the "
        "learner listen each: give one of them another"
    )
