"""Stands in for the `ssh` command: runs what it is given on this machine, where each host has a
home folder.

    hosts = write_ssh(folder)       folder/bin/ssh; put folder/bin first on the PATH

A host named after a row of _REFUSALS is refused as ssh does it. The arguments of each call are in
`calls.txt`.
"""

from pathlib import Path

_SSH = """#!/bin/sh
printf '%s\\n' "$*" >> {folder}/calls.txt
while [ "$1" != -- ]; do shift; done
host=$2
if [ -e {folder}/$host.down ]; then
    echo "ssh: connect to host $host: No route to host" >&2
    exit 255
fi
case $host in
{refusals}
esac
mkdir -p {folder}/homes/$host && cd {folder}/homes/$host && echo "Welcome to $host"
exec sh -c "$3"
"""

_REFUSALS = {
    "stranger": "Host key verification failed.",
    "locked": "me@locked: Permission denied (publickey).",
    "closed": "ssh: connect to host closed port 22: Connection refused",
}


def write_ssh(folder: Path) -> Path:
    """The folder of the hosts' home folders."""
    refusals = "\n".join(f"{host}) echo '{why}' >&2; exit 255;;" for host, why in _REFUSALS.items())
    file = folder / "bin" / "ssh"
    file.parent.mkdir()
    file.write_text(_SSH.format(folder=folder, refusals=refusals))
    file.chmod(0o755)
    return folder / "homes"
