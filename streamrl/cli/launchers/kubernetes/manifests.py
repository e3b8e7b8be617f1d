"""All objects of a run, in the order in which they are applied, without the keys.

Invariant: the same plan gives the same manifests, byte for byte, and nothing in them is secret.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from streamrl.cli.launchers.kubernetes.containers import Document, Names, pod
from streamrl.config import to_yaml
from streamrl.config.addresses import port_of
from streamrl.config.cluster import HostRole
from streamrl.errors import EXIT_CONFIG, EXIT_DIVERGED, EXIT_FENCED
from streamrl.placement.plan import Plan, PlannedProcess

NEVER_RESTARTED = (EXIT_CONFIG, EXIT_FENCED, EXIT_DIVERGED)


# Groups wait in it, and the books of a run.
JOURNAL_SIZE = "20Gi"


def manifests(plan: Plan, names: Names, storage: str) -> tuple[Document, ...]:
    """`storage` is the size of the volume that has the run."""
    return tuple(_manifests(plan, names, storage))


def rendered(documents: Sequence[Document]) -> str:
    """As one YAML file."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """Without anchors, and a text of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _manifests(plan: Plan, names: Names, storage: str) -> Iterator[Document]:
    yield _config_map(plan, names)
    yield _claim(names, storage)
    yield _network_policy(names)
    if buffer := _of_role(plan, "buffer"):
        yield _service(names, "buffer", port_of(plan.config.buffer.url))
        yield _buffer(plan, buffer[0], names)
    yield _service(names, "learner", port_of(plan.config.weights.address))
    yield _learner(plan, names)
    yield _deployment(plan, _of_role(plan, "generator"), names)
    if validator := _of_role(plan, "validator"):
        yield _deployment(plan, validator, names)


def _of_role(plan: Plan, role: HostRole) -> tuple[PlannedProcess, ...]:
    return tuple(process for process in plan.processes if process.role == role)


def _config_map(plan: Plan, names: Names) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata("config"),
        "data": {"config.yaml": to_yaml(plan.config)},
    }


def _claim(names: Names, size: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": names.metadata("runs"),
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": size}},
        },
    }


def _network_policy(names: Names) -> Document:
    """The ranks' rendezvous has no key, so pods of other runs do not reach it."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": names.metadata("pods"),
        "spec": {
            "podSelector": {"matchLabels": names.selector},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": names.selector}}]}],
        },
    }


def _service(names: Names, role: HostRole, port: int) -> Document:
    """Without an address of its own: it gives each pod a name, before the pod is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(role, role),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.labels(role),
            "ports": [{"name": role, "port": port}],
        },
    }


def _buffer(plan: Plan, process: PlannedProcess, names: Names) -> Document:
    claim = {
        "metadata": {"name": "journal"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": JOURNAL_SIZE}},
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": names.metadata("buffer", "buffer"),
        "spec": {
            "serviceName": names.of("buffer"),
            "replicas": 1,
            "selector": {"matchLabels": names.labels("buffer")},
            "template": pod(plan, process, names),
            "volumeClaimTemplates": [claim],
        },
    }


def _learner(plan: Plan, names: Names) -> Document:
    """A Job with an index for each host of ranks; a pod whose exit code says that no restart helps
    fails the Job at once, and one that its node has lost does not count."""
    processes = _of_role(plan, "learner")
    template = pod(plan, processes[0], names)
    spec = {**template["spec"], "subdomain": names.of("learner"), "restartPolicy": "Never"}
    rules = [
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": "learner",
                "operator": "In",
                "values": list(NEVER_RESTARTED),
            },
        },
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": names.metadata("learner", "learner"),
        "spec": {
            "completionMode": "Indexed",
            "completions": len(processes),
            "parallelism": len(processes),
            "backoffLimit": plan.config.run.max_restarts * len(processes),
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            "template": {**template, "spec": spec},
        },
    }


def _deployment(plan: Plan, processes: Sequence[PlannedProcess], names: Names) -> Document:
    role = processes[0].role
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(role, role),
        "spec": {
            "replicas": len(processes),
            "selector": {"matchLabels": names.labels(role)},
            "template": pod(plan, processes[0], names),
        },
    }
