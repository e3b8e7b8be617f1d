"""The parts of an engine that receive weights: the engine itself, or each of its servers.
`actors.generator` runs a receiver for each. The place where a part receives decides how its weights
travel; it is not always this process, nor the GPU that samples.
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
    """Where the engine receives weights; for workers on this machine, where they run."""
    device = device_of(generator.device)
    match generator.engine:
        case "sglang":
            # SGLang's relay receives into this process's host memory.
            return locality_of("cpu")
        case "vllm" if generator.vllm.url:
            return Locality(device_type=torch.device(device).type)
        case _:
            return locality_of(device, generator.num_ranks)


@dataclass(frozen=True)
class WeightTarget:
    """One part that receives weights. `name` is appended to the generator's id; `server` identifies
    the inference server, "" without one. `is_spare` says whether the engine has other parts to
    sample with."""

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
    """The weight receiver of one part, by `weights.transport`; `on_update` loads an update.

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
