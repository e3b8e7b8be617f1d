"""The command and the environment of each process of a plan.

Invariant: a command is what a person would type in the working folder of the host; the environment
holds only what follows from the plan. Called by assign.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.config import RunConfig
from streamrl.placement.addresses import ranks_port
from streamrl.placement.memory.fit import Fit
from streamrl.placement.plan import PlannedProcess
from streamrl.placement.seats import Seat

_RENDEZVOUS_S = 900


@dataclass(frozen=True)
class Commands:
    """Makes processes of the seats of one run."""

    config: RunConfig
    seats: Sequence[Seat]
    fit: Fit
    resume: bool

    def process(self, seat: Seat) -> PlannedProcess:
        command = self._command(seat)
        given = ("--resume",) if seat.role == "learner" and self.resume else ()
        on_restart = ("--resume",) if seat.role == "learner" else ()
        return PlannedProcess(
            name=seat.name,
            role=seat.role,
            host=seat.host.name,
            command=(*command, *given),
            restart_command=(*command, *on_restart),
            devices=tuple(seat.host.devices[i].index for i in seat.devices if seat.host.is_counted),
            environment=self._environment(seat),
            num_ranks=seat.num_ranks,
            is_optional=seat.role == "validator",
            memory=self.fit.need(seat),
        )

    def _command(self, seat: Seat) -> tuple[str, ...]:
        ranks = self._torchrun(seat) if seat.role == "learner" else ()
        name = ("--id", seat.name) if seat.role == "generator" else ()
        settings = self.fit.overrides().get(seat.name, {}).items()
        overrides = (word for key, value in settings for word in ("--set", f"{key}={value}"))
        file = str(self.config.run.path / "config.yaml")
        return (*ranks, "streamrl", seat.role, "--config", file, *name, *overrides)

    def _torchrun(self, seat: Seat) -> tuple[str, ...]:
        """Before the command of a learner whose ranks are on several hosts.

        Rank 0 has to be where `weights.address` is, so the hosts' order is given: without
        --node-rank torchrun sorts hosts by their addresses.
        """
        learners = [other for other in self.seats if other.role == "learner"]
        if len(learners) == 1:
            return ()
        return (
            "streamrl",
            "torchrun",
            f"--nnodes={len(learners)}",
            f"--node-rank={learners.index(seat)}",
            f"--nproc-per-node={seat.num_ranks}",
            f"--master-addr={learners[0].host.address}",
            f"--master-port={ranks_port(self.config)}",
            f"--rdzv-id={self.config.run.name}",
            f"--rdzv-conf=timeout={_RENDEZVOUS_S}",
            "--no-python",
        )

    def _environment(self, seat: Seat) -> Mapping[str, str]:
        if seat.role == "buffer":
            return {}
        return {
            **self._devices(seat),
            **self._threads(seat),
            **self._interface(seat),
        }

    def _devices(self, seat: Seat) -> Mapping[str, str]:
        """A device that a setting has chosen is counted among all of the host's."""
        host = seat.host
        if not seat.devices or not host.is_counted:
            return {}
        shown = range(len(host.devices)) if seat.is_pinned else seat.devices
        return {"CUDA_VISIBLE_DEVICES": ",".join(host.devices[i].visible_as for i in shown)}

    def _threads(self, seat: Seat) -> Mapping[str, str]:
        """Its share of the cores; that of all ranks for a learner that starts them itself."""
        if not seat.host.num_cores:
            return {}
        sharing = [other for other in self.seats if other.host.name == seat.host.name]
        num_sharing = sum(other.num_ranks for other in sharing if other.role != "buffer")
        starts_ranks = seat.role == "learner" and not self._torchrun(seat)
        cores = seat.host.num_cores * (seat.num_ranks if starts_ranks else 1)
        return {"OMP_NUM_THREADS": str(max(1, cores // num_sharing))}

    def _interface(self, seat: Seat) -> Mapping[str, str]:
        name = seat.host.interface
        if not name or len({other.host.name for other in self.seats}) == 1:
            return {}
        return {"NCCL_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name}
