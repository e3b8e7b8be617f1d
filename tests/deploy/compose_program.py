"""`docker compose` 2, which is in no release of Debian before 13, as a plug-in of the tests' own.

The package of Debian 13 has the program, which needs libc alone; it is taken out of the package,
and nothing is installed.
"""

import functools
import os
import subprocess
import tempfile
from pathlib import Path

RELEASE, PACKAGE = "trixie", "docker-compose"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_IN_PACKAGE = "usr/libexec/docker/cli-plugins/docker-compose"
_APT = """
Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "-";
Dir::State "{folder}/state";
Dir::Cache "{folder}/cache";
APT::Sandbox::User "root";
"""


@functools.cache
def docker_settings(folder: Path, mirror: str) -> Path | None:
    """The folder for DOCKER_CONFIG where `docker compose` is 2; None where it cannot be had."""
    plugin = folder / "cli-plugins" / "docker-compose"
    if not plugin.exists():
        with tempfile.TemporaryDirectory() as work:
            program = _download(Path(work), mirror)
            if program is None:
                return None
            plugin.parent.mkdir(parents=True, exist_ok=True)
            # Whole, or not there.
            part = plugin.with_suffix(".part")
            part.write_bytes(program.read_bytes())
            part.chmod(0o755)
            part.rename(plugin)
    return folder


def _download(work: Path, mirror: str) -> Path | None:
    for name in ("state/lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    (work / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror} {RELEASE} main\n")
    (work / "apt.conf").write_text(_APT.format(folder=work))
    environment = {**os.environ, "APT_CONFIG": str(work / "apt.conf")}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "download", "-qq", PACKAGE],
        ["sh", "-c", "dpkg -x *.deb out"],
    ):
        if subprocess.run(command, cwd=work, env=environment, capture_output=True).returncode:
            return None
    return work / "out" / _IN_PACKAGE
