"""Weights and checkpoints in S3: `s3://` through s3fs, against a server of its own process (moto).

Server and client are installed in a Python of their own; the client's packages come last on the
path, so all else is what the tests have.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from streamrl.errors import ConfigError, WeightTransferError
from streamrl.object_store import StoreFolder
from tests.deploy.conftest import kept_environment
from tests.ports import free_port
from tests.unit.test_mirror import FIRST, Machine
from tests.unit.weights.test_store import Generator, Learner

# Each version of s3fs takes fsspec of the same version.
PACKAGES = ("moto[server]>=5.1,<6", f"s3fs=={version('fsspec')}")
SECRET = "never-to-be-printed"
START_S = 120.0


@pytest.fixture(scope="module")
def packages() -> Path:
    return kept_environment("stores", *PACKAGES)


class S3Server:
    """In the memory of its process: killed, it comes back with nothing."""

    def __init__(self, program: Path) -> None:
        self._program, self._port = program, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [self._program, "-H", "127.0.0.1", "-p", str(self._port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        deadline = time.monotonic() + START_S
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", self._port)):
                assert time.monotonic() < deadline
                assert self._process.poll() is None
                time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def server(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Not started yet; clients find it by their environment."""
    lib = next((packages / "lib").glob("python*/site-packages"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(lib)])
    server = S3Server(packages / "bin" / "moto_server")
    use_keys(monkeypatch, "an-id", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield server
    server.kill()


def use_keys(monkeypatch: pytest.MonkeyPatch, key_id: str, secret: str) -> None:
    from s3fs import S3FileSystem

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    S3FileSystem.clear_instance_cache()


def make_bucket(name: str = "weights") -> None:
    from s3fs import S3FileSystem

    S3FileSystem().mkdir(name)


@pytest.fixture
def retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that has refused is tried again at once."""
    monkeypatch.setattr("streamrl.weights.transports.store.RETRY_S", 0.0)


@pytest.mark.usefixtures("retried")
def test_generators_follow_weights_in_s3_bit_for_bit(server: S3Server, tmp_path: Path):
    server.start()
    make_bucket()
    learner = Learner(tmp_path, store="s3://weights/of/ours", full_every=2)
    generator = Generator(tmp_path, learner)
    kinds = []
    for _ in range(5):
        assert learner.publish()
        assert generator.load()
        assert generator.has(learner)
        kinds.append(learner.kinds()[-1])
    assert kinds == [False, True, True, False, True]
    late = Generator(tmp_path, learner, "late")
    assert late.load()
    assert late.has(learner)


@pytest.mark.usefixtures("retried")
def test_a_key_that_vanishes_and_a_server_that_is_killed_cost_versions_and_no_bits(
    server: S3Server, tmp_path: Path
):
    server.start()
    make_bucket()
    learner = Learner(tmp_path, store="s3://weights/of/ours")
    generator = Generator(tmp_path, learner)
    for _ in range(2):
        assert learner.publish()
        assert generator.load()
    before = generator.weights
    assert learner.publish()
    manifest = learner.store.manifest()
    assert manifest is not None
    learner.store.remove(manifest.name_of(manifest.chain[-1]))
    with pytest.raises(WeightTransferError, match=r"a-00000003.delta.safetensors is gone"):
        generator.load()
    assert generator.weights is before
    assert not learner.publish()
    assert learner.publish()
    assert learner.kinds() == [False]
    assert generator.load()
    assert generator.has(learner)
    server.kill()
    assert not learner.publish()
    assert "Could not connect" in learner.sender.sentence()
    with pytest.raises(WeightTransferError, match="Could not connect"):
        generator.load()
    server.start()
    make_bucket()
    until(learner.publish)
    assert generator.load()
    assert generator.has(learner)


def until(publish: Callable[[], bool]) -> None:
    for _ in range(3):
        if publish():
            return
    pytest.fail("the store is there, and nothing is written to it")


def test_a_run_mirrored_in_s3_is_fetched_by_another_machine(server: S3Server, tmp_path: Path):
    server.start()
    make_bucket()
    one, other, third = (Machine(tmp_path / n, "s3://weights/runs") for n in ("1", "2", "3"))
    one.begin(FIRST)
    for step in (2, 3):
        one.save(step)
    assert one.bring()
    other.mirror.take(resume=True, new=False)
    assert other.step == 3
    third.mirror.take(resume=False, new=True)
    assert third.step == 0
    assert "the run that was in s3://weights/runs/run is in s3://" in third.said[0]


def test_keys_that_s3_refuses_are_told_without_the_secret(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
):
    # Until then the server asks for no keys: those who may write are made by these calls.
    server.start(INITIAL_NO_AUTH_ACTION_COUNT="3")
    right = make_user()
    use_keys(monkeypatch, *right)
    make_bucket()
    StoreFolder("weights.store", "s3://weights/ours").require_writable()
    for keys, reason in (
        ((right[0], SECRET), "signature .* does not match"),
        (("another", SECRET), "Access Key Id you provided does not exist"),
    ):
        use_keys(monkeypatch, *keys)
        store = StoreFolder("weights.store", "s3://weights/ours")
        with pytest.raises(
            ConfigError, match=f"weights.store s3://weights/ours: .*{reason}"
        ) as told:
            store.require_writable()
        assert SECRET not in str(told.value)
    use_keys(monkeypatch, *right)
    with pytest.raises(
        ConfigError, match=r"run.folder_mirror s3://no/ours: .*bucket does not exist"
    ):
        StoreFolder("run.folder_mirror", "s3://no/ours").require_writable()


def make_user() -> tuple[str, str]:
    """The id and the secret of one who may do all."""
    from botocore.session import get_session

    iam = get_session().create_client("iam")
    iam.create_user(UserName="u")
    keys = iam.create_access_key(UserName="u")["AccessKey"]
    allowed = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName="u", PolicyName="p", PolicyDocument=policy)
    return keys["AccessKeyId"], keys["SecretAccessKey"]
