"""`streamrl buffer audit`: proves from a run's records that no group was lost or trained twice.

Exit code 1 if anything is not in order.
"""

import argparse
from pathlib import Path

from streamrl.cli.verification.run_audit import audit_run
from streamrl.run_folder import find_run


def main(arguments: argparse.Namespace) -> int:
    audit = audit_run(_folder(arguments.folder))
    print("\n".join(audit.lines()))
    return 1 if audit.faults else 0


def _folder(target: str) -> Path:
    """A folder is audited as it stands, since a journal alone says enough."""
    return Path(target) if Path(target).is_dir() else find_run(target).run.path
