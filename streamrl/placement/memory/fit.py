"""Whether what is placed on a GPU fits there, and how much of it each engine takes.

vLLM and SGLang fill a fraction of a GPU, by default nearly all. Where they share one with others
that fraction is what the others leave, divided among them.

Invariant: pure; refused is only what shapes and settings make certain. Called by assign.py.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from streamrl.config import RunConfig
from streamrl.config.cluster import HostRole
from streamrl.config.generator import GeneratorSettings
from streamrl.errors import ConfigError
from streamrl.placement.memory.engine import EngineMemory, fraction_setting, given_fraction
from streamrl.placement.memory.learner import LearnerMemory
from streamrl.placement.memory.need import Need, gib
from streamrl.placement.memory.shape import ModelShape
from streamrl.placement.plan import Device, Host
from streamrl.placement.seats import Seat

_USABLE = 0.9
_STATIC = 0.85
"""Of SGLang's part, what its fraction is of: activations and CUDA graphs come on top."""
_SETTINGS: Mapping[HostRole, str] = {
    "learner": "learner.device",
    "generator": "generator.device",
    "validator": "validation.generator.device",
}


@dataclass(frozen=True)
class Fit:
    """Of all seats of a run on the GPUs of its hosts; `shape` is None for a model that is not
    here, of which nothing is known."""

    config: RunConfig
    seats: Sequence[Seat]
    shape: ModelShape | None

    def need(self, seat: Seat, position: int = 0) -> Need | None:
        """Of a seat on its GPU at this position; None where it has none, or nothing is known."""
        if self.shape is None or not seat.devices or not seat.host.is_counted:
            return None
        if seat.role == "learner":
            sends = seat == self._learners[0] and position == 0
            num_ranks = sum(other.num_ranks for other in self._learners)
            return LearnerMemory(self.config, self.shape, num_ranks, sends).need()
        return EngineMemory(self.config, self._generator(seat), self.shape).need()

    def overrides(self) -> Mapping[str, Mapping[str, str]]:
        """Settings of the engines that share a GPU, by seat."""
        return {
            seat.name: {fraction_setting(self._generator(seat)): f"{fraction:.2f}"}
            for seat in self.seats
            if (fraction := self._fraction(seat)) is not None
        }

    def require(self) -> None:
        """
        Raises:
            ConfigError: what a GPU has to hold is certainly more than it has.
        """
        for host, device, sharing in self._devices:
            needs = [(seat, self._least(seat, index, device)) for seat, index in sharing]
            if device.memory_bytes and sum(least for _, least in needs) > device.memory_bytes:
                raise ConfigError(self._refusal(host, device, sharing))

    def warnings(self) -> Iterator[str]:
        """What may not fit, by the estimate."""
        for host, device, sharing in self._devices:
            total = sum(self._likely(seat, index, device) for seat, index in sharing)
            if total > device.memory_bytes > 0:
                who = "; ".join(self._described(seat, index) for seat, index in sharing)
                yield (
                    f"{_SETTINGS[sharing[0][0].role]}: {_place(host, device)} may have too little "
                    f"memory, {gib(device.memory_bytes)} for about {gib(total)}: {who}"
                )

    @cached_property
    def _learners(self) -> tuple[Seat, ...]:
        return tuple(seat for seat in self.seats if seat.role == "learner")

    @cached_property
    def _devices(self) -> tuple[tuple[Host, Device, tuple[tuple[Seat, int], ...]], ...]:
        """Each GPU that is used, with the seats on it and which of their GPUs it is."""
        placed: dict[tuple[str, int], tuple[tuple[Seat, int], ...]] = {}
        for seat in self.seats:
            for index, device in enumerate(seat.devices if seat.host.is_counted else ()):
                key = (seat.host.name, device)
                placed[key] = (*placed.get(key, ()), (seat, index))
        return tuple(
            (sharing[0][0].host, sharing[0][0].host.devices[position], sharing)
            for (_, position), sharing in placed.items()
        )

    def _generator(self, seat: Seat) -> GeneratorSettings:
        is_validator = seat.role == "validator"
        return (self.config.for_validator() if is_validator else self.config).generator

    def _takes_fraction(self, seat: Seat) -> bool:
        return seat.role != "learner" and bool(fraction_setting(self._generator(seat)))

    def _given(self, seat: Seat) -> float | None:
        return None if seat.role == "learner" else given_fraction(self._generator(seat))

    def _fraction(self, seat: Seat) -> float | None:
        """Of each of its GPUs; None where it has them alone, or a person has set it."""
        if not self._takes_fraction(seat) or self._given(seat) is not None:
            return None
        shared = [
            self._part(device, sharing)
            for _, device, sharing in self._devices
            if len(sharing) > 1 and any(other == seat for other, _ in sharing)
        ]
        if not shared:
            return None
        is_static = self._generator(seat).engine == "sglang"
        part = min(shared) * (_STATIC if is_static else 1.0)
        return max(0.01, math.floor(100 * part) / 100)

    def _part(self, device: Device, sharing: Sequence[tuple[Seat, int]]) -> float:
        """What each engine without a fraction of its own gets of a shared GPU."""
        open_seats = [s for s, _ in sharing if self._takes_fraction(s) and self._given(s) is None]
        others = [(seat, index) for seat, index in sharing if seat not in open_seats]
        if not device.memory_bytes or self.shape is None:
            return _USABLE / len(sharing)
        taken = sum(self._likely(seat, index, device) for seat, index in others)
        left = _USABLE - taken / device.memory_bytes
        least = max(self._least(seat, 0, device) for seat in open_seats) / device.memory_bytes
        return max(left / len(open_seats), least + 0.01)

    def _least(self, seat: Seat, index: int, device: Device) -> float:
        """Bytes that the seat takes of the GPU in any case."""
        given, need = self._given(seat), self.need(seat, index)
        certain = need.certain_bytes if need else 0
        return max(certain, (given or 0.0) * device.memory_bytes)

    def _likely(self, seat: Seat, index: int, device: Device) -> float:
        """Bytes that the seat takes of the GPU by the estimate."""
        need = self.need(seat, index)
        if self._takes_fraction(seat) or need is None:
            return self._least(seat, index, device)
        return need.num_bytes

    def _refusal(self, host: Host, device: Device, sharing: Sequence[tuple[Seat, int]]) -> str:
        who = "; ".join(self._described(seat, index, device) for seat, index in sharing)
        needs = [need for seat, index in sharing if (need := self.need(seat, index))]
        remedies = ", ".join(dict.fromkeys(name for need in needs for name in need.remedies))
        return (
            f"{_SETTINGS[sharing[0][0].role]}: {_place(host, device)} has "
            f"{gib(device.memory_bytes)}, which is too little: {who}; what would help: {remedies}"
        )

    def _described(self, seat: Seat, index: int, device: Device | None = None) -> str:
        need = self.need(seat, index)
        parts = f" ({need.describe()})" if need else ""
        if device is None:
            return f"{seat.name} needs about {gib(need.num_bytes if need else 0)}{parts}"
        return f"{seat.name} needs at least {gib(self._least(seat, index, device))}{parts}"


def _place(host: Host, device: Device) -> str:
    return f"GPU {device.index} {'here' if host.name == 'here' else f'of {host.name}'}"
