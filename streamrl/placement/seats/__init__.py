"""Which process goes on which host and which of its GPUs.

Learner ranks come first and have a GPU each. An engine then takes free GPUs of one host, all of its
`tensor_parallel_size`. Only where no host has so many does it share, with as few other engines as
possible, and with a learner where nothing else is left.

Invariant: the same configuration and hosts give the same seats, and every process gets one, or the
configuration is refused. Called by `streamrl.placement.assign`.
"""

from collections.abc import Sequence

from streamrl.config import RunConfig
from streamrl.placement.plan import Host
from streamrl.placement.seats.engines import engine_seat, generator_hosts
from streamrl.placement.seats.learner import learner_seats
from streamrl.placement.seats.seat import Seat, allowed_for, at_address

__all__ = ["Seat", "seats"]


def seats(config: RunConfig, hosts: Sequence[Host]) -> tuple[Seat, ...]:
    """All processes of the run, in the order in which they start.

    Raises:
        ConfigError: one of them has no place.
    """
    buffer: tuple[Seat, ...] = ()
    if config.buffer.has_daemon:
        wanted = at_address("buffer.url", config.buffer.url, allowed_for("buffer", hosts), hosts)
        buffer = (Seat("buffer", "buffer", wanted[0]),)
    taken = learner_seats(config, hosts)
    for index, wanted in enumerate(generator_hosts(config, hosts)):
        name = f"generator-{index}"
        taken = (*taken, engine_seat(name, "generator", config.generator, wanted, taken))
    if config.validation.every:
        generator, wanted = config.for_validator().generator, allowed_for("validator", hosts)
        taken = (*taken, engine_seat("validator", "validator", generator, wanted, taken))
    return (*buffer, *taken)
