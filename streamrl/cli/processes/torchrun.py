"""`streamrl torchrun`: torchrun that ends as the rank that failed.

torchrun's own exit code is 1 whatever a rank says, so whoever supervises it would start a learner
again that cannot work. Plans whose learner is on several hosts start it on each.

Invariant: the exit code and the sentence are those of a rank of this host, if one failed; of
several that of one which did not fail because of another. Waits for the ranks to end.
"""

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from learners.executor.starter import failure
from streamrl.errors import ERROR_FILE_VARIABLE, PARENT_VARIABLE, read_record


def main(arguments: argparse.Namespace) -> int:
    """Raise the error of a rank of this host that failed, with its sentence."""
    # The parser has put "--" before them.
    words = arguments.words[arguments.words[:1] == ["--"] :]
    parsed = torchrun.parse_args(words)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # By nohup, which torchrun would undo.
        names = parsed.signals_to_handle.split(",")
        parsed.signals_to_handle = ",".join(name for name in names if name != "SIGHUP")
    with _folder_of_records() as folder:
        try:
            torchrun.run(parsed)
        except ChildFailedError as error:
            codes = {rank: failed.exitcode for rank, failed in error.failures.items()}
            records = {rank: read_record(folder / str(rank)) for rank in codes}
            # Another start of the rank, by --max-restarts, may have left one.
            own = [r for rank, r in records.items() if r and r.exit_code == codes[rank]]
            raise failure(codes, own) from None
        except SignalException as stopped:
            return 128 + stopped.sigval
    return 0


@contextlib.contextmanager
def _folder_of_records() -> Iterator[Path]:
    """Where the ranks, children of this process, say why they fail."""
    with TemporaryDirectory(prefix="streamrl-") as folder:
        before = dict(os.environ)
        os.environ[ERROR_FILE_VARIABLE] = str(Path(folder) / "$RANK")
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ.update(before)
