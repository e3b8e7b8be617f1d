"""Which parts of an engine receive weights, each by itself: the engine, or each of its servers.
`actors.generator` runs a receiver for each. Where a part receives decides by which route its
weights come: not always in this process, and not always on the GPU that samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from actors.engines.model import device_of
from actors.engines.served.open import server_id
from actors.engines.served.replicas import ReplicatedEngine
from streamrl.config import RunConfig
from streamrl.config.generator import GeneratorSettings
from streamrl.interfaces import Engine
from streamrl.types import Locality
from streamrl.weights.locality import locality_of
from streamrl.weights.receiver import Holding, OnUpdate, StoreReceiver, WeightReceiver
from streamrl.weights.transports.store import ObjectStore


def weight_locality(generator: GeneratorSettings) -> Locality:
    """By `generator.engine`; that of the engine's workers if they run on this machine."""
    device = device_of(generator.device)
    match generator.engine:
        case "sglang":
            # The relay receives into this process's host memory.
            return locality_of("cpu")
        case "vllm" if generator.vllm.url:
            return Locality(device_type=torch.device(device).type)
        case _:
            return locality_of(device, generator.num_ranks)


@dataclass(frozen=True)
class WeightTarget:
    """`name` follows the generator's id; `server` is the inference server's, "" without one.
    `is_spare` says whether the engine has other parts to sample with."""

    load_weights: OnUpdate
    name: str = ""
    server: str = ""
    holding: Callable[[], Holding] = lambda: Holding.KEPT
    is_spare: Callable[[], bool] = lambda: False


def weight_targets(engine: Engine, generator: GeneratorSettings) -> Sequence[WeightTarget]:
    if not isinstance(engine, ReplicatedEngine):
        server = server_id(generator.url) if generator.url else ""
        return [WeightTarget(engine.load_weights, server=server)]
    return [
        WeightTarget(
            replica.load_weights,
            name=f"@{server_id(replica.url)}",
            server=server_id(replica.url),
            holding=replica.holding,
            is_spare=lambda: engine.has_weights,
        )
        for replica in engine.replicas
    ]


def receiver_of(
    target: WeightTarget, config: RunConfig, generator_id: str, on_update: OnUpdate
) -> WeightReceiver | StoreReceiver:
    """That of one part, by `weights.transport`; `on_update` loads into it.

    Raises:
        ConfigError: the package for `weights.store` is not installed.
    """
    generator, weights = config.generator, config.weights
    if weights.transport == "store":
        assert weights.store is not None, "refused before"
        store = ObjectStore(weights.store, config.run.name)
        folder = config.run.path / "weights" / "store"
        return StoreReceiver(store, folder, generator_id + target.name, on_update)
    return WeightReceiver(
        weights.address,
        generator_id + target.name,
        on_update,
        locality=weight_locality(generator),
        num_ranks=generator.num_ranks,
        has_weights=not generator.lacks_weights,
        server=target.server,
        holding=target.holding,
        curve=config.buffer.curve,
    )
