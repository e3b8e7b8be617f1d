"""deploy/kubernetes and deploy/ray: manifests that the schemas of Kubernetes take, of runs that can
start. The schemas of KubeRay are in no package: of its objects the pods are checked by those of
Kubernetes, and the fields that stand here by a list of those that KubeRay has (ray.io/v1).
"""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from streamrl.cli.arguments.commands import parse
from streamrl.config import load_config
from streamrl.config.run import RunSettings
from streamrl.errors import EXIT_CONFIG, EXIT_DIVERGED, EXIT_FENCED
from tests.documents import ROOT

FILE = ROOT / "deploy" / "kubernetes" / "example.yaml"
DOCUMENTS: list[dict[str, Any]] = [*yaml.safe_load_all(FILE.read_text())]
BY_NAME = {(one["kind"], one["metadata"]["name"]): one for one in DOCUMENTS}
PODS = {
    name: one["spec"]["template"]["spec"]
    for (_, name), one in BY_NAME.items()
    if "template" in one.get("spec", {})
}


@pytest.mark.parametrize("version", ["1.34", kubernetes_validate.latest_version()])
def test_every_object_is_one_of_kubernetes(version):
    for document in DOCUMENTS:
        kubernetes_validate.validate(document, version, strict=True)
    job = BY_NAME["Job", "example-learner"]
    wrong = {**job, "spec": {**job["spec"], "podFailurePolicies": {}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="podFailurePolicies"):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_configuration_names_the_services_and_the_commands_can_be_parsed(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(BY_NAME["ConfigMap", "example-config"]["data"]["config.yaml"])
    config = load_config(file, environment={}).config
    for url, role in ((config.buffer.url, "buffer"), (config.weights.address, "learner")):
        name = f"example-{role}"
        assert f"//{name}-0.{name}:" in url
        selector = BY_NAME["Service", name]["spec"]["selector"]
        owner = next(one for (kind, n), one in BY_NAME.items() if n == name and kind != "Service")
        assert selector.items() <= owner["spec"]["template"]["metadata"]["labels"].items()
    assert {*PODS} == {"example-buffer", "example-learner", "example-generator"}
    for pod in PODS.values():
        (container,) = pod["containers"]
        words = [*container["command"], *container.get("args", ())]
        assert parse(words[1:]).command in ("buffer", "torchrun", "generator")
    job = BY_NAME["Job", "example-learner"]["spec"]
    (learner,) = PODS["example-learner"]["containers"]
    assert f"--nnodes={job['completions']}" in learner["command"]
    num_gpus = int(learner["resources"]["limits"]["nvidia.com/gpu"])
    assert job["completions"] * num_gpus == config.learner.num_ranks
    fails, _ = job["podFailurePolicy"]["rules"]
    assert fails["onExitCodes"]["values"] == [EXIT_CONFIG, EXIT_FENCED, EXIT_DIVERGED]


def test_pods_are_no_roots_and_are_given_longer_than_their_daemon_takes_to_end():
    for pod in PODS.values():
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        own = container["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["capabilities"]) == (False, {"drop": ["ALL"]})
        values = {one["name"]: one.get("value") for one in container["env"]}
        stop_s = float(values.get("STREAMRL__RUN__STOP_S", 20.0))
        assert pod["terminationGracePeriodSeconds"] > stop_s
    (secret,) = (v["secret"] for v in PODS["example-generator"]["volumes"] if "secret" in v)
    assert secret["secretName"] == "example-client-keys"


RAY = {
    one["kind"]: one
    for name in ("raycluster", "rayjob")
    for one in yaml.safe_load_all((ROOT / "deploy" / "ray" / f"{name}.yaml").read_text())
}
FIELDS = {
    "RayCluster": {
        *("rayVersion", "enableInTreeAutoscaling", "autoscalerOptions"),
        *("headGroupSpec", "workerGroupSpecs"),
    },
    "RayJob": {
        *("clusterSelector", "submissionMode", "entrypoint", "runtimeEnvYAML"),
        *("shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec"),
    },
    "head": {"rayStartParams", "template"},
    "group": {
        *("groupName", "replicas", "minReplicas", "maxReplicas"),
        *("rayStartParams", "template"),
    },
}


def test_the_cluster_of_kuberay_grows_by_generators_and_learners_that_share_a_folder():
    spec = RAY["RayCluster"]["spec"]
    groups = spec["workerGroupSpecs"]
    assert set(spec) <= FIELDS["RayCluster"]
    assert set(spec["headGroupSpec"]) <= FIELDS["head"]
    assert all(set(group) <= FIELDS["group"] for group in groups)
    for group in (spec["headGroupSpec"], *groups):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    kubernetes_validate.validate(RAY["PersistentVolumeClaim"], "1.34", strict=True)
    assert spec["enableInTreeAutoscaling"] is True
    assert [group["groupName"] for group in groups] == ["learners", "generators"]
    assert all(group["minReplicas"] == 0 < group["maxReplicas"] for group in groups)
    with_runs = [
        [mount["mountPath"] for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]]
        for group in (spec["headGroupSpec"], groups[0])
    ]
    assert all("/runs" in mounts for mounts in with_runs)


def test_the_job_of_kuberay_is_a_launch_on_that_cluster_with_time_to_save():
    spec = RAY["RayJob"]["spec"]
    assert set(spec) <= FIELDS["RayJob"]
    assert spec["clusterSelector"] == {"ray.io/cluster": RAY["RayCluster"]["metadata"]["name"]}
    program, command, file, *options = spec["entrypoint"].split()
    assert (program, command, options) == ("streamrl", "launch", ["--ray", "--no-view"])
    head = RAY["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert any(file.startswith(mount["mountPath"]) for mount in head["volumeMounts"])
    variables = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert float(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > RunSettings().stop_s
