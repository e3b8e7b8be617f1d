"""Which parts of an engine receive weights, each by itself: the engine, or each of its servers.

Called by `actors.generator`, which runs a `WeightReceiver` for each.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from actors.engines.served.open import server_id
from actors.engines.served.replicas import ReplicatedEngine
from actors.locality import weight_locality
from streamrl.config import RunConfig
from streamrl.config.generator import GeneratorSettings
from streamrl.interfaces import Engine
from streamrl.types import LoadReport, WeightUpdate
from streamrl.weights.receiver import Holding, WeightReceiver

Load = Callable[[WeightUpdate], Awaitable[LoadReport]]


@dataclass(frozen=True)
class WeightTarget:
    """`name` follows the generator's id; `server` is the inference server's, "" without one.
    `is_spare` says whether the engine has other parts to sample with."""

    load: Load
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
    target: WeightTarget, config: RunConfig, generator_id: str, load: Load
) -> WeightReceiver:
    """That of one part; `load` loads into it."""
    generator = config.generator
    return WeightReceiver(
        config.weights.address,
        generator_id + target.name,
        load,
        locality=weight_locality(generator),
        num_ranks=generator.num_ranks,
        has_weights=not generator.lacks_weights,
        server=target.server,
        holding=target.holding,
        curve=config.buffer.curve,
    )
