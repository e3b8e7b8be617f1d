"""A Docker engine of the tests' own, and the images of `deploy/Dockerfile` on a base made here.

Nothing is pulled: debootstrap makes the base from the mirror that apt uses, and the builds install
wheels that pip has fetched outside, through its own settings. Packages, base, wheels and layers are
kept in CACHE, so that the first use takes minutes and the next ones seconds; containers and volumes
that killed tests left there are removed. The engine changes no route, firewall or bridge of the
machine, and ends with the tests, also where they are killed.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.documents import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "streamrl-test-deploy"
PACKAGES = {
    "dockerd": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
}
IN_BASE = "ca-certificates,python3,python3-pip,python3-venv,tini,redis-server,systemd-sysv"
BASE = f"streamrl-test-base:{hashlib.sha256(IN_BASE.encode()).hexdigest()[:8]}"
REDIS, IMAGE = "streamrl-test-redis", "streamrl-test"
# What the builds install besides the package's requirements: its build system, and what redis asks
# for on the Python of the base.
ALSO = ("hatchling", "async-timeout")
START_S, BUILD_S = 120.0, 1800.0
DOCKER = "/usr/bin/docker"


class Engine:
    """A dockerd; its command lines get `environment`."""

    def __init__(self, folder: Path) -> None:
        self.data = CACHE / "docker"
        self._socket = folder / "docker.sock"
        self._log = folder / "dockerd.log"
        self._folder = folder
        self.environment = {**os.environ, "DOCKER_HOST": f"unix://{self._socket}"}

    def start(self) -> None:
        """Waits until it answers; skips the tests where this system lets no engine run."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "TERM", "dockerd"),
                    *("--data-root", self.data, "--exec-root", self._folder / "exec"),
                    *("--host", f"unix://{self._socket}", "--pidfile", self._folder / "pid"),
                    *("--bridge", "none", "--iptables=false", "--ip-forward=false"),
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while subprocess.run(
            [DOCKER, "version"], env=self.environment, capture_output=True
        ).returncode:
            if self._process.poll() is not None:
                last = self._log.read_text().strip().splitlines()[-1:]
                pytest.skip(f"dockerd does not run here: {''.join(last)}")
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

    def remove_left(self) -> None:
        """Containers and volumes of tests that were killed before they removed theirs."""
        if left := self.docker("ps", "--all", "--quiet").split():
            self.docker("rm", "--force", "--volumes", *left)
        if volumes := self.docker("volume", "ls", "--quiet").split():
            self.docker("volume", "rm", *volumes)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(START_S)

    def docker(self, *arguments: str | Path) -> str:
        """Standard output of the command, which has to succeed."""
        done = subprocess.run(
            [DOCKER, *arguments],
            env={**self.environment, "DOCKER_BUILDKIT": "1"},
            capture_output=True,
            text=True,
            timeout=BUILD_S,
        )
        assert done.returncode == 0, (
            f"docker {arguments}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
        return done.stdout


@contextlib.contextmanager
def running_engine(folder: Path) -> Iterator[Engine]:
    """With the images `IMAGE`:buffer, `IMAGE`:cpu and `REDIS`."""
    install()
    CACHE.mkdir(parents=True, exist_ok=True)
    engine = Engine(folder)
    engine.start()
    try:
        engine.remove_left()
        build(engine, folder)
        yield engine
    finally:
        engine.stop()


def install() -> None:
    """The engine's Debian packages, as far as they are missing."""
    if os.geteuid() != 0:
        pytest.skip("an engine for containers needs root")
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if not missing:
        return
    if not shutil.which("apt-get"):
        pytest.skip(f"{' '.join(missing)} and apt-get, which installs them, are missing")
    for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        done = subprocess.run(["apt-get", "-qq", *command], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"apt-get {' '.join(command)}: {done.stderr.strip()[-300:]}")


def build(engine: Engine, folder: Path) -> None:
    if not engine.docker("images", "--quiet", BASE).strip():
        with timed("base"):
            make_base(engine, folder / "base")
    with timed("wheels"):
        fetch_wheels()
    settings = folder / "pip.conf"
    with timed("images"), serving(CACHE / "wheels") as url:
        settings.write_text(f"[global]\nno-index = true\nfind-links = {url}\n")
        for target in ("buffer", "cpu"):
            engine.docker(
                *("build", "--network", "host", "--secret", f"id=pip,src={settings}"),
                *("--build-arg", f"BASE={BASE}", "--file", ROOT / "deploy" / "Dockerfile"),
                *("--target", target, "--tag", f"{IMAGE}:{target}", ROOT),
            )
        own = folder / "redis"
        own.mkdir()
        (own / "Dockerfile").write_text(f"FROM {BASE}\nRUN install -d -o redis -g redis /data\n")
        engine.docker("build", "--network", "none", "--tag", REDIS, own)


def make_base(engine: Engine, folder: Path) -> None:
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={IN_BASE}", "bookworm", folder, mirror()],
        check=True,
        capture_output=True,
        timeout=BUILD_S,
    )
    for package in (folder / "var/cache/apt/archives").glob("*.deb"):
        package.unlink()
    with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as archive:
        subprocess.run(
            [DOCKER, "import", "-", BASE], stdin=archive.stdout, env=engine.environment, check=True
        )
    shutil.rmtree(folder)


def mirror() -> str:
    """Debian's, as the machine's apt has it."""
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True, text=True
    )
    found = (line for line in targets.stdout.split() if line.rstrip("/").endswith("/debian"))
    return next(found, "http://deb.debian.org/debian")


def fetch_wheels() -> None:
    """What the images install, unless it is there for these requirements."""
    names = [sys.executable, str(ROOT / "deploy" / "requirements.py"), "redis"]
    wanted = subprocess.run(names, capture_output=True, text=True, check=True).stdout.split()
    constraints = ROOT / "constraints.txt"
    digest = hashlib.sha256(f"{wanted} {ALSO} {constraints.read_text()}".encode()).hexdigest()
    folder, stamp = CACHE / "wheels", CACHE / "wheels" / f"{digest[:16]}.stamp"
    if stamp.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    # Where PyPI's torch is the one for CUDA, as the installed one shows.
    is_cpu = importlib.metadata.version("torch").endswith("+cpu")
    index = [] if is_cpu else ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-qq", "--dest", folder, *index),
            *("--python-version", "3.11", "--only-binary", ":all:", "-c", constraints),
            *(*wanted, *ALSO),
        ],
        check=True,
        timeout=BUILD_S,
    )
    stamp.touch()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The folder's URL on the loopback address."""
    answer = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - start:.1f} s", flush=True)
