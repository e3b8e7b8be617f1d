"""The pod of one role: its container, what it may do, what it mounts.

    /runs             the volume of all runs, where the run's folder is and where commands start
    /runs/NAME/buffer the buffer's own volume, since SQLite does not go on a shared file system
    /etc/streamrl     config.yaml
    /keys             of buffer.curve; generators have no server.secret
    /dev/shm          memory, for weights between the processes of a pod

Invariant: a container's command is that of the plan; only the place of the configuration, and the
names and addresses that Kubernetes gives to a pod, are put in.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from streamrl.config import RunConfig
from streamrl.config.addresses import port_of
from streamrl.config.cluster import HostRole
from streamrl.placement.plan import Host, Plan, PlannedProcess

Document: TypeAlias = Mapping[str, Any]

RUNS_FOLDER, KEYS_FOLDER = Path("/runs"), Path("/keys")
CONFIG_FILE = Path("/etc/streamrl/config.yaml")
USER_ID = 10001
# What a role does after SIGTERM: a learner finishes the step at hand and saves.
GRACE_PERIOD_S: Mapping[HostRole, int] = {
    "buffer": 30,
    "learner": 900,
    "generator": 30,
    "validator": 30,
}
SPARE_S = 10
"""Of that, after `run.stop_s`."""
_OWN_ADDRESS = "$(POD_IP)"
_INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class Names:
    """`run` begins the name of every object; `images` are by role."""

    run: str
    namespace: str
    images: Mapping[str, str]

    def of(self, part: str) -> str:
        return f"{self.run}-{part}"

    def labels(self, role: str) -> Document:
        return {**self.selector, "app.kubernetes.io/component": role}

    @property
    def selector(self) -> Document:
        return {"app.kubernetes.io/name": "streamrl", "app.kubernetes.io/instance": self.run}

    def metadata(self, part: str, role: str = "run") -> Document:
        return {
            "name": self.of(part),
            "namespace": self.namespace,
            "labels": self.labels(role),
        }


def pod(plan: Plan, process: PlannedProcess, names: Names) -> Document:
    """Template of the pods of a role; `process` is the first of the role in the plan."""
    role, host = process.role, plan.host(process.host)
    grace_s = _grace_s(plan.config, role)
    container = _container(plan.config, process, host, names)
    return {
        "metadata": {"labels": names.labels(role)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **_init_containers(plan.config, role, container),
            "containers": [container],
            "volumes": _volumes(names, role),
        },
    }


def _grace_s(config: RunConfig, role: HostRole) -> int:
    usual_s = GRACE_PERIOD_S[role] + int(config.generator.drain_s)
    return max(usual_s, math.ceil(config.stop_within_s) + SPARE_S)


def _container(
    config: RunConfig, process: PlannedProcess, host: Host, names: Names
) -> dict[str, Any]:
    return {
        "name": process.role,
        "image": names.images[process.role],
        "command": _command(config, process),
        "workingDir": str(RUNS_FOLDER),
        "env": _environment(config, process),
        # Passwords and tokens, such as STREAMRL_REDIS_PASSWORD, HF_TOKEN, WANDB_API_KEY.
        "envFrom": [{"secretRef": {"name": names.of("environment"), "optional": True}}],
        "resources": _resources(process, host),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        **_probes(config, process.role),
        "volumeMounts": _mounts(config, process.role),
    }


def _command(config: RunConfig, process: PlannedProcess) -> list[str]:
    """That of a restart, since Kubernetes does not tell a pod whether it is the first one."""
    words = [_placed(word, config) for word in process.restart_command]
    match process.role:
        case "buffer":
            url = f"zmq://{_OWN_ADDRESS}:{port_of(config.buffer.url)}"
            return [*words, "--set", f"buffer.url={url}"]
        case "learner":
            address = f"tcp://{_OWN_ADDRESS}:{port_of(config.weights.address)}"
            return [*words, "--set", f"weights.address={address}"]
        case "generator":
            return ["$(POD_NAME)" if word == process.name else word for word in words]
        case _:
            return words


def _placed(word: str, config: RunConfig) -> str:
    """The configuration is mounted; a host of ranks is an index of the Job."""
    if word == str(config.run.path / "config.yaml"):
        return str(CONFIG_FILE)
    return "--node-rank=$(JOB_INDEX)" if word.startswith("--node-rank=") else word


def _environment(config: RunConfig, process: PlannedProcess) -> Sequence[Document]:
    """Kubernetes gives a pod its GPUs, counted from 0, one network interface, and time to end."""
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    if process.role == "learner":
        fields = {**fields, "JOB_INDEX": f"metadata.annotations['{_INDEX}']"}
    given = {k: v for k, v in process.environment.items() if not k.endswith("_SOCKET_IFNAME")}
    if process.role == "learner":
        given["STREAMRL__RUN__STOP_S"] = str(_grace_s(config, "learner") - SPARE_S)
    return [
        *({"name": k, "valueFrom": {"fieldRef": {"fieldPath": v}}} for k, v in fields.items()),
        *({"name": key, "value": value} for key, value in sorted(given.items())),
        {"name": "HF_HOME", "value": str(RUNS_FOLDER / "huggingface")},
        {"name": "HOME", "value": "/tmp"},
    ]


def _resources(process: PlannedProcess, host: Host) -> Document:
    requests = {"cpu": str(host.num_cores)}
    if not process.devices:
        return {"requests": requests}
    return {"requests": requests, "limits": {"nvidia.com/gpu": str(len(process.devices))}}


def _probes(config: RunConfig, role: HostRole) -> Document:
    """The buffer answers at its port once it has read its journal. A learner and a generator end by
    themselves when they cannot go on, and their steps may take long: they are shown as not ready,
    and not ended."""
    if role == "buffer":
        port = {"tcpSocket": {"port": port_of(config.buffer.url)}}
        return {
            "startupProbe": {**port, "periodSeconds": 5, "failureThreshold": 120},
            "readinessProbe": {**port, "periodSeconds": 10},
            "livenessProbe": {**port, "periodSeconds": 20, "failureThreshold": 6},
        }
    if role == "validator":
        return {}
    # A shell, since Kubernetes puts no variables into the command of a probe.
    name = " --id $POD_NAME" if role == "generator" else ""
    probe = f"streamrl status {CONFIG_FILE} --probe {role}{name}"
    return {
        "readinessProbe": {
            "exec": {"command": ["sh", "-c", probe]},
            "periodSeconds": 60,
            "timeoutSeconds": 30,
        }
    }


def _init_containers(config: RunConfig, role: HostRole, container: Document) -> Document:
    """A model that is made here is made once, by the first pod of the learner."""
    if role != "learner" or config.model.recipe is None:
        return {}
    make = ["streamrl", "get-model", "--config", str(CONFIG_FILE)]
    kept = ("image", "workingDir", "env", "securityContext", "volumeMounts")
    is_there = f"test -e {shlex.quote(config.model.path)}"
    return {
        "initContainers": [
            {
                "name": "make-model",
                "command": ["sh", "-c", f"{is_there} || {' '.join(make)}"],
                **{key: container[key] for key in kept},
            }
        ]
    }


def _mounts(config: RunConfig, role: HostRole) -> Sequence[Document]:
    journal = {"name": "journal", "mountPath": str(config.run.path / "buffer")}
    return [
        {"name": "runs", "mountPath": str(RUNS_FOLDER)},
        *([journal] if role == "buffer" else []),
        {"name": "config", "mountPath": str(CONFIG_FILE.parent), "readOnly": True},
        {"name": "keys", "mountPath": str(KEYS_FOLDER), "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]


def _volumes(names: Names, role: HostRole) -> Sequence[Document]:
    keys = "keys" if role in ("buffer", "learner") else "client-keys"
    return [
        {"name": "runs", "persistentVolumeClaim": {"claimName": names.of("runs")}},
        {"name": "config", "configMap": {"name": names.of("config")}},
        # 0440: the group is `fsGroup`.
        {"name": "keys", "secret": {"secretName": names.of(keys), "defaultMode": 0o440}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
