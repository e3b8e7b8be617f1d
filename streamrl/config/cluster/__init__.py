"""`cluster`: the machines of a run, and what each of them may be used for."""

from streamrl.config.cluster.settings import ClusterSettings, HostRole, HostSettings

__all__ = ["ClusterSettings", "HostRole", "HostSettings"]
