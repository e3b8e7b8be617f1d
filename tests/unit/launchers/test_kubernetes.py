"""The manifests of a run: what Kubernetes' own schemas say, and what the plan says."""

from collections.abc import Mapping
from typing import Any

import kubernetes_validate
import pytest
import yaml

from streamrl.cli.launchers.kubernetes.containers import Names
from streamrl.cli.launchers.kubernetes.launch import secrets
from streamrl.cli.main import main
from streamrl.config import load_config
from streamrl.curve import make_keys
from tests.documents import ROOT

DEPLOY = ROOT / "deploy" / "kubernetes"
# Of the next-to-oldest release that is maintained, and of the newest that is known.
VERSIONS = ("1.34", kubernetes_validate.latest_version())


def render(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", str(DEPLOY / "run.yaml"), "--k8s", "--dry-run", *words]) == 0
    return capsys.readouterr().out


def by_kind(text: str) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    documents = list(yaml.safe_load_all(text))
    return {(d["kind"], d["metadata"]["name"]): d for d in documents}


def container(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return document["spec"]["template"]["spec"]["containers"][0]


def test_the_example_is_what_its_configuration_makes(capsys):
    assert render(capsys) == (DEPLOY / "example.yaml").read_text()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("--set", "validation.every=10", "--set", "validation.num_prompts=8"),
        ("--set", "buffer.url=redis://redis:6379/0"),
        ("--gpus-per-node", "4", "--namespace", "training", "--image", "registry/streamrl:1"),
    ],
)
def test_every_object_is_one_of_kubernetes(capsys, version, settings):
    for document in by_kind(render(capsys, *settings)).values():
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--k8s", "--new"), "--new: a run on Kubernetes goes on with what its volumes have"),
        (("--image", "registry/streamrl:1"), "--image: is an option of --k8s, which was not given"),
        (("--namespace", "rl"), "--namespace: is an option of --k8s, which was not given"),
        (("--gpus-per-node", "0"), "--gpus-per-node: is an option of --k8s, which was not given"),
        (("--storage", "200Gi"), "--storage: is an option of --k8s, which was not given"),
    ],
)
def test_options_that_kubernetes_would_not_follow_are_refused(capsys, words, sentence):
    assert main(["launch", str(DEPLOY / "run.yaml"), "--dry-run", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_misspelled_field_is_found_by_the_schemas(capsys):
    """The check above can fail."""
    job = by_kind(render(capsys))["Job", "example-learner"]
    wrong = {**job, "spec": {**job["spec"], "podFailurePolicies": {}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="podFailurePolicies"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_pods_find_each_other_by_names_that_stay(capsys):
    objects = by_kind(render(capsys))
    config = yaml.safe_load(objects["ConfigMap", "example-config"]["data"]["config.yaml"])
    assert config["buffer"]["url"] == "zmq://example-buffer-0.example-buffer:29600"
    assert config["weights"]["address"] == "tcp://example-learner-0.example-learner:29601"
    for role, kind in (("buffer", "StatefulSet"), ("learner", "Job")):
        service = objects["Service", f"example-{role}"]["spec"]
        pods = objects[kind, f"example-{role}"]["spec"]["template"]
        assert service["selector"] == pods["metadata"]["labels"]
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert objects["StatefulSet", "example-buffer"]["spec"]["serviceName"] == "example-buffer"
    learner = objects["Job", "example-learner"]["spec"]["template"]["spec"]
    assert learner["subdomain"] == "example-learner"


def test_the_configuration_of_the_pods_can_be_loaded(capsys, tmp_path):
    config_map = by_kind(render(capsys))["ConfigMap", "example-config"]
    file = tmp_path / "config.yaml"
    file.write_text(config_map["data"]["config.yaml"])
    config = load_config(file).config
    assert (str(config.run.path), str(config.buffer.curve)) == ("/runs/example", "/keys")


def test_ranks_are_indices_of_a_job_that_fails_where_no_restart_helps(capsys):
    job = by_kind(render(capsys))["Job", "example-learner"]["spec"]
    command = container({"spec": job})["command"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert "--nnodes=2" in command
    assert "--node-rank=$(JOB_INDEX)" in command
    fails, ignores = job["podFailurePolicy"]["rules"]
    assert (fails["action"], fails["onExitCodes"]["values"]) == ("FailJob", [2, 3, 6])
    assert ignores["action"] == "Ignore"
    four = by_kind(render(capsys, "--gpus-per-node", "4"))["Job", "example-learner"]
    assert four["spec"]["completions"] == 4
    assert container(four)["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    # All pods of a Job are alike.
    twelve = by_kind(render(capsys, "--set", "learner.num_ranks=12"))["Job", "example-learner"]
    assert twelve["spec"]["completions"] == 2
    assert container(twelve)["resources"]["limits"] == {"nvidia.com/gpu": "6"}
    assert "--nproc-per-node=6" in container(twelve)["command"]


def test_generators_can_be_scaled_and_have_not_the_secret_of_the_servers(capsys):
    deployment = by_kind(render(capsys))["Deployment", "example-generator"]["spec"]
    pod = deployment["template"]["spec"]
    one = pod["containers"][0]
    assert deployment["replicas"] == 4
    assert one["command"][-2:] == ["--id", "$(POD_NAME)"]
    assert one["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    probe = one["readinessProbe"]["exec"]["command"]
    assert probe[-1] == "streamrl status /etc/streamrl/config.yaml --probe generator --id $POD_NAME"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == "example-client-keys"
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory"}
    # Longer than the drain of `generator.drain_s`.
    assert pod["terminationGracePeriodSeconds"] == 35


def test_a_pod_is_given_longer_than_its_daemon_takes_to_end(capsys):
    documents = by_kind(render(capsys))
    pods = {kind: d["spec"]["template"]["spec"] for kind, d in documents.items() if _has_pod(d)}
    assert pods
    for pod in pods.values():
        environment = {v["name"]: v.get("value") for v in pod["containers"][0]["env"]}
        stop_s = float(environment.get("STREAMRL__RUN__STOP_S", 20.0))
        assert pod["terminationGracePeriodSeconds"] > stop_s
        if "JOB_INDEX" in environment:
            assert stop_s > 800


def _has_pod(document) -> bool:
    return "template" in document.get("spec", {})


def test_no_pod_runs_as_root_or_may_become_it(capsys):
    for document in by_kind(render(capsys)).values():
        if "template" not in document.get("spec", {}):
            continue
        assert document["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
        own = container(document)["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["capabilities"]) == (False, {"drop": ["ALL"]})


def test_keys_go_into_secrets_and_into_nothing_that_is_printed(capsys, tmp_path):
    make_keys(tmp_path / "keys")
    names = Names("example", "default", {})
    servers, clients = secrets(names, tmp_path / "keys")
    for secret in (servers, clients):
        kubernetes_validate.validate(dict(secret), VERSIONS[0], strict=True)
    assert set(servers["data"]) - set(clients["data"]) == {"server.secret"}
    assert not any(kind == "Secret" for kind, _ in by_kind(render(capsys)))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--image", "learnr=x"), "--image: was 'learnr=x', and 'learnr' is no role: did you mean"),
        (("--gpus-per-node", "1"), "--gpus-per-node: was 1; one engine needs 2 of one node"),
        (
            ("--set", "learner.num_ranks=12", "--set", "learner.mesh={tensor: 12}"),
            "--gpus-per-node: was 8; learner.num_ranks 12 cannot be divided among nodes in blocks",
        ),
        (("--set", "run.name=7b"), "run.name: was '7b'; for Kubernetes it begins with a letter"),
    ],
)
def test_what_kubernetes_cannot_take_is_refused_by_name(capsys, words, sentence):
    assert main(["launch", str(DEPLOY / "run.yaml"), "--k8s", "--dry-run", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_machine_without_kubectl_is_told_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["launch", str(DEPLOY / "run.yaml"), "--k8s"]) == 2
    assert "there is no `kubectl` here; --dry-run prints the manifests" in capsys.readouterr().err
