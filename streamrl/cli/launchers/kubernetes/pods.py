"""The pods of a run as the hosts of its plan: Kubernetes finds the machines.

    NAME-buffer-0      StatefulSet   its name and its journal stay when it is started again
    NAME-learner-N     Indexed Job   as many as the ranks need
    NAME-generator-*   Deployment    as many as one wants; the plan has `generator.count`
    NAME-validator-*   Deployment    one, where the run is validated

Invariant: a pod that others connect to has a name that stays, so that it is in the configuration
which every pod gets.
"""

import re
from dataclasses import dataclass
from math import ceil

from streamrl.config import RunConfig
from streamrl.config.cluster import HostRole
from streamrl.errors import ConfigError
from streamrl.placement.plan import Device, Host
from streamrl.placement.seats import devices_per_engine

CORES_PER_DEVICE = 8
CORES_WITHOUT_DEVICE = 2
# Kubernetes appends what tells pods apart, and a label has at most 63 characters.
_LONGEST_NAME = 40


@dataclass(frozen=True)
class PodSizes:
    """GPUs of one pod of each role."""

    learner: int
    generator: int


def object_name(config: RunConfig) -> str:
    """The run's name as a part of Kubernetes' names: lower case, digits and hyphens.

    >>> from streamrl.config import RunConfig
    >>> rest = {"model": {"path": "m"}, "data": {"source": "copy"}}
    >>> object_name(RunConfig.model_validate({"run": {"name": "GSM8k_7b.v2"}, **rest}))
    'gsm8k-7b-v2'
    """
    name = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"run.name: was {config.run.name!r}; for Kubernetes it begins with a letter and has at "
            f"most {_LONGEST_NAME} characters"
        )
    return name


def pod_sizes(config: RunConfig, devices: int) -> PodSizes:
    """By what the configuration needs; `devices` is what a node has.

    Raises:
        ConfigError: an engine, or ranks that share tokens or matrices, need more devices than a
            node has.
    """
    of_engine = devices_per_engine(config.generator)
    if of_engine > devices > 0:
        raise ConfigError(
            f"--gpus-per-node: was {devices}; one engine needs {of_engine} of one node (see "
            "generator.vllm.tensor_parallel_size)"
        )
    return PodSizes(
        learner=0 if config.learner.device == "cpu" or not devices else _ranks(config, devices),
        generator=0 if config.generator.device == "cpu" else min(devices, of_engine),
    )


def _ranks(config: RunConfig, devices: int) -> int:
    """Of each pod alike, since all pods of a Job are made by one template."""
    learner = config.learner
    block = learner.mesh.sequence * learner.mesh.tensor
    alike = range(block, min(devices, learner.num_ranks) + 1, block)
    sizes = [size for size in alike if learner.num_ranks % size == 0]
    if not sizes:
        raise ConfigError(
            f"--gpus-per-node: was {devices}; learner.num_ranks {learner.num_ranks} cannot be "
            f"divided among nodes in blocks of learner.mesh.sequence {learner.mesh.sequence} x "
            f"tensor {learner.mesh.tensor}"
        )
    return sizes[-1]


def hosts_of_pods(config: RunConfig, sizes: PodSizes) -> tuple[Host, ...]:
    """One for each pod, in the order of their start."""
    name = object_name(config)
    num_learners = ceil(config.learner.num_ranks / sizes.learner) if sizes.learner else 1
    return (
        *([_host(name, "buffer", 0, 0)] if config.buffer.has_daemon else []),
        *(_host(name, "learner", i, sizes.learner) for i in range(num_learners)),
        *(_host(name, "generator", i, sizes.generator) for i in range(config.generator.count)),
        *([_host(name, "validator", 0, sizes.generator)] if config.is_validated else []),
    )


def _host(name: str, role: HostRole, index: int, num_devices: int) -> Host:
    pod = f"{name}-{role}-{index}"
    return Host(
        name=f"{role}-{index}",
        # Its name in DNS: the headless service of a role is called as the role's pods.
        address=f"{pod}.{name}-{role}",
        devices=tuple(Device(i) for i in range(num_devices)),
        num_cores=num_devices * CORES_PER_DEVICE or CORES_WITHOUT_DEVICE,
        roles=(role,),
        ssh=pod,
        generators=1 if role == "generator" else None,
    )
