"""`streamrl launch FILE --k8s`: the manifests of a run, and with `kubectl` the run itself.

Invariant: keys are made once, in RUN/keys on this machine, and go into Secrets; they are printed
nowhere.
"""

import argparse
import base64
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from streamrl.cli.launchers.kubernetes.containers import (
    KEYS_FOLDER,
    RUNS_FOLDER,
    Document,
    Names,
)
from streamrl.cli.launchers.kubernetes.manifests import manifests, rendered
from streamrl.cli.launchers.kubernetes.pods import hosts_of_pods, object_name, pod_sizes
from streamrl.config import RunConfig
from streamrl.config.cluster import HostRole
from streamrl.curve import make_keys
from streamrl.errors import ConfigError, StreamRLError, did_you_mean
from streamrl.placement.assign import make_plan
from streamrl.placement.plan import Plan

_NAMESPACE, _GPUS_PER_NODE, _STORAGE = "default", 8, "200Gi"
# Of deploy/Dockerfile, by its targets.
_IMAGES: Mapping[str, str] = {"buffer": "streamrl:buffer", "learner": "streamrl:learner"}
_ENGINE_IMAGES: Mapping[str, str] = {
    "vllm": "streamrl:generator-vllm",
    "sglang": "streamrl:generator-sglang",
}
_SERVER = ("server.secret", "server.public", "client.secret", "client.public")
_CLIENT = _SERVER[1:]


def launch(given: RunConfig, arguments: argparse.Namespace) -> int:
    if arguments.new:
        raise ConfigError(
            "--new: a run on Kubernetes goes on with what its volumes have: choose another "
            f"run.name than {given.run.name!r}, or delete them"
        )
    if arguments.strict:
        raise ConfigError(
            "--strict: on Kubernetes no launcher sees a daemon end: the cluster starts it again; "
            "leave it out"
        )
    names = _names(given, arguments)
    documents = _documents(given, names, arguments)
    if arguments.dry_run:
        print(rendered(documents), end="")
        print(_about_keys(names), file=sys.stderr)
        return 0
    keys = given.buffer.curve or given.run.path / "keys"
    if not (keys / "server.secret").exists():
        make_keys(keys)
    _kubectl(rendered((*secrets(names, keys), *documents)))
    print(_what_next(names))
    return 0


def _documents(given: RunConfig, names: Names, arguments: argparse.Namespace) -> Sequence[Document]:
    """Without the Secrets."""
    asked = arguments.gpus_per_node
    plan = plan_of(given, _GPUS_PER_NODE if asked is None else asked)
    return manifests(plan, names, arguments.storage or _STORAGE)


def plan_of(given: RunConfig, gpus_per_node: int) -> Plan:
    """With the places that a pod has for its run and its keys."""
    run = given.run.model_copy(update={"folder": RUNS_FOLDER})
    buffer = given.buffer.model_copy(update={"curve": KEYS_FOLDER})
    cluster = given.cluster.model_copy(update={"hosts": ()})
    config = given.model_copy(update={"run": run, "buffer": buffer, "cluster": cluster})
    return make_plan(config, hosts_of_pods(config, pod_sizes(config, gpus_per_node)), resume=True)


def secrets(names: Names, keys: Path) -> Sequence[Document]:
    """Those of the servers, and those of the generators, who have not the servers' secret."""
    return [_secret(names, "keys", keys, _SERVER), _secret(names, "client-keys", keys, _CLIENT)]


def _secret(names: Names, part: str, keys: Path, files: Sequence[str]) -> Document:
    try:
        data = {name: base64.b64encode((keys / name).read_bytes()).decode() for name in files}
    except OSError as error:
        raise ConfigError(f"buffer.curve: cannot read {error.filename}: {error.strerror}") from None
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": names.metadata(part),
        "type": "Opaque",
        "data": data,
    }


def _names(config: RunConfig, arguments: argparse.Namespace) -> Names:
    namespace = arguments.namespace or _NAMESPACE
    return Names(object_name(config), namespace, _images(config, arguments.image))


def _images(config: RunConfig, given: Sequence[str]) -> Mapping[str, str]:
    """
    Raises:
        ConfigError: an image is for a role that there is not.
    """
    engine = _ENGINE_IMAGES.get(config.generator.engine, _IMAGES["learner"])
    images = {**_IMAGES, "generator": engine, "validator": engine}
    for text in given:
        role, equals, image = text.partition("=")
        if equals and role not in get_args(HostRole):
            raise ConfigError(
                f"--image: was {text!r}, and {role!r} is no role: "
                f"{did_you_mean(role, get_args(HostRole))}"
            )
        images = {**images, role: image} if equals else dict.fromkeys(images, text)
    return images


def _kubectl(text: str) -> None:
    """
    Raises:
        ConfigError: there is no kubectl here.
        StreamRLError: the cluster does not take the objects.
    """
    command = ["kubectl", "apply", "--filename", "-"]
    try:
        done = subprocess.run(command, input=text, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            "--k8s: there is no `kubectl` here; --dry-run prints the manifests"
        ) from None
    if done.returncode != 0:
        raise StreamRLError(f"kubectl apply ended with exit code {done.returncode}")


def _about_keys(names: Names) -> str:
    name = names.run
    create = f"kubectl create secret generic --namespace {names.namespace}"
    return "\n".join(
        [
            "The manifests need two Secrets, with keys that `streamrl keys new keys` makes:",
            f"{create} {name}-keys {_from_files(_SERVER)}",
            f"{create} {name}-client-keys {_from_files(_CLIENT)}",
        ]
    )


def _from_files(files: Sequence[str]) -> str:
    return " ".join(f"--from-file=keys/{name}" for name in files)


def _what_next(names: Names) -> str:
    return (
        f"kubectl logs --namespace {names.namespace} --follow job/{names.of('learner')}\n"
        "when it has completed, or to stop it (the volumes stay):\n"
        f"kubectl delete job,deployment,statefulset --namespace {names.namespace} "
        f"--selector app.kubernetes.io/instance={names.run}"
    )
